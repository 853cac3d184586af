//! Faults injected on an uplink, in the words of the command line.

use std::str::FromStr;
use std::sync::Arc;

use pvrdma_ether_link::Link;
use pvrdma_ether_link::fault::{FaultLink, Faults};
use serde::{Deserialize, Serialize};

use super::keys::{deserialize_from_str, keys};
use super::pairs::{Syntax, from_pairs};

/// Steps of a rate: a hundredth of a percent.
const STEPS: f64 = 10_000.0;

keys! {
    /// Faults of a link in both directions: each rate is a fraction of all frames, omitted faults are off.
    pub(crate) struct FaultKeys {
        /// Frames that are lost.
        ["loss", "RATE", ""]
        loss: Option<Rate>,
        /// Frames that arrive twice.
        ["duplicate", "RATE", ""]
        duplicate: Option<Rate>,
        /// Frames that later ones overtake.
        ["reorder", "RATE", ""]
        reorder: Option<Rate>,
        /// Frames with a flipped bit.
        ["corrupt", "RATE", ""]
        corrupt: Option<Rate>,
        /// Frames that arrive late.
        ["delay", "RATE", ""]
        delay: Option<Rate>,
        /// The same seed makes the same faults again.
        ["seed", "NUMBER", "1"]
        seed: Option<u64>,
    }
}

/// A fraction of frames, in [`STEPS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate(u16);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let steps =
            text.parse().ok().map(|rate: f64| (rate * STEPS).round()).filter(|steps| (1.0..=STEPS).contains(steps));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in the range that is asked for")]
        let rate = steps.map(|steps| Self(steps as u16));
        rate.ok_or_else(|| format!("'{text}' is not a rate of 0.0001 to 1"))
    }
}

deserialize_from_str!(Rate);

/// Faults of a link: `loss:0.01/duplicate:0.01/seed:7`, in any order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
        let keys: FaultKeys = from_pairs(text, Syntax { separator: '/', assign: ':', of: "fault" })?;
        let steps = |rate: Option<Rate>| rate.map_or(0, |Rate(steps)| steps);
        let faults = Faults {
            loss: steps(keys.loss),
            duplicate: steps(keys.duplicate),
            reorder: steps(keys.reorder),
            corrupt: steps(keys.corrupt),
            delay: steps(keys.delay),
        };
        if faults == Faults::default() {
            return Err(format!("'{text}' holds no fault, as loss:0.01"));
        }
        Ok(Self { faults, seed: keys.seed.unwrap_or(1) })
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
