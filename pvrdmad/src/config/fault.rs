//! A bad cable, for tests: the faults of a device's uplink in the words of the command line.

use std::str::FromStr;
use std::sync::Arc;

use pvrdma_ether_link::Link;
use pvrdma_ether_link::fault::{FaultLink, Faults};
use serde::{Deserialize, Deserializer};

/// Steps of a rate: a hundredth of a percent.
const STEPS: f64 = 10_000.0;
/// The words, for messages.
const GRAMMAR: &str = "loss, duplicate, reorder, corrupt or delay with a rate of 0.0001 to 1 (loss:0.01), or seed with a \
                       number, separated by '/'";

/// Faults of a link: `loss:0.01/duplicate:0.01/reorder:0.01/corrupt:0.01/delay:0.01/seed:7`, in any order, what is left out
/// does not happen. Rates are of frames, in each direction. The seed (1 if not given) makes a run repeatable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultSpec {
    faults: Faults,
    seed: u64,
}

impl FaultSpec {
    /// The link with these faults in both directions.
    pub fn wrap(&self, link: Arc<dyn Link>) -> Arc<dyn Link> {
        Arc::new(FaultLink::both_ways(link, self.faults, self.seed))
    }
}

impl FromStr for FaultSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut faults, mut seed) = (Faults::default(), None);
        for part in text.split('/') {
            let wrong = || format!("'{part}': expected {GRAMMAR}");
            let (word, value) = part.split_once(':').ok_or_else(wrong)?;
            let rate = match word {
                "loss" => &mut faults.loss,
                "duplicate" => &mut faults.duplicate,
                "reorder" => &mut faults.reorder,
                "corrupt" => &mut faults.corrupt,
                "delay" => &mut faults.delay,
                "seed" if seed.is_none() => {
                    seed = Some(value.parse().map_err(|_| wrong())?);
                    continue;
                }
                _ => return Err(wrong()),
            };
            if *rate != 0 {
                return Err(format!("'{word}' is given twice"));
            }
            *rate = value.parse().ok().and_then(steps).ok_or_else(wrong)?;
        }
        if faults == Faults::default() {
            return Err(format!("'{text}': no fault; expected {GRAMMAR}"));
        }
        Ok(Self { faults, seed: seed.unwrap_or(1) })
    }
}

/// A rate in steps, if it is at least one and at most all.
fn steps(rate: f64) -> Option<u16> {
    let steps = (rate * STEPS).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in the range that is asked for")]
    (1.0..=STEPS).contains(&steps).then_some(steps as u16)
}

impl<'de> Deserialize<'de> for FaultSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let all = "loss:0.01/duplicate:0.02/reorder:0.5/corrupt:1/delay:0.0001/seed:7";
        let faults = Faults { loss: 100, duplicate: 200, reorder: 5000, corrupt: 10_000, delay: 1 };
        assert_eq!(all.parse(), Ok(FaultSpec { faults, seed: 7 }));
        let loss = Faults { loss: 100, ..Faults::default() };
        assert_eq!("loss:0.01".parse(), Ok(FaultSpec { faults: loss, seed: 1 }));
        for wrong in [
            "",
            "loss",
            "loss:",
            "loss:0",
            "loss:1.1",
            "loss:-1",
            "loss:NaN",
            "loss:0.00001",
            "loss:1%",
            "loss:0.1/loss:0.1",
            "seed:1",
            "loss:0.1/seed:x",
            "loss:0.1/seed:1/seed:2",
            "loss:0.1/",
            "jitter:0.1",
        ] {
            assert!(wrong.parse::<FaultSpec>().is_err(), "{wrong}");
        }
    }
}
