//! Faults injected into an uplink, as written on the command line.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pvrdma_link::{
    Link,
    fault::{FaultLink, Faults},
};
use serde::{Deserialize, Serialize, Serializer};

use super::keys::{deserialize_from_str, keys};
use super::pairs::{Syntax, from_pairs};

/// Reason why `fault=corrupt` is refused.
const NO_ICRC: &str = "fault=corrupt damages packets, which receivers notice only by their ICRC: set icrc=always for \
                       the network";

/// Resolution of a rate: a hundredth of a percent.
const STEPS: f64 = 10_000.0;

keys! {
    /// Faults of a link in both directions: each rate is a fraction of all frames, omitted faults are off.
    pub(crate) struct FaultKeys {
        /// Fraction of frames to drop.
        ["loss", "RATE", ""]
        loss: Option<Rate>,
        /// Fraction of frames to duplicate.
        ["duplicate", "RATE", ""]
        duplicate: Option<Rate>,
        /// Fraction of frames to reorder.
        ["reorder", "RATE", ""]
        reorder: Option<Rate>,
        /// Fraction of frames in which to flip a bit.
        ["corrupt", "RATE", ""]
        corrupt: Option<Rate>,
        /// Fraction of frames to delay.
        ["delay", "RATE", ""]
        delay: Option<Rate>,
        /// Seed; equal seeds give equal faults.
        ["seed", "NUMBER", "1"]
        seed: Option<u64>,
    }
}

/// A fraction of frames in units of 1/[`STEPS`].
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
    /// Wraps the link so that it has these faults in both directions. `None` means no faults, but they can be set
    /// later.
    pub fn wrap(spec: Option<&Self>, link: Arc<dyn Link>) -> Arc<FaultLink<Arc<dyn Link>>> {
        let (faults, seed) = Self::parts(spec);
        Arc::new(FaultLink::both_ways(link, faults, seed))
    }

    /// Replaces the faults of the link, `None` for no faults.
    pub fn set(spec: Option<&Self>, link: &FaultLink<Arc<dyn Link>>) {
        let (faults, seed) = Self::parts(spec);
        link.set_faults(faults, seed);
    }

    /// Checks that receivers notice the faults. Without an ICRC they do not notice a damaged packet, and the guest
    /// would get wrong data.
    ///
    /// # Errors
    /// The faults damage frames, and packets may have no ICRC.
    pub fn check(spec: Option<&Self>, omit_icrc: bool) -> Result<(), String> {
        match spec {
            Some(spec) if omit_icrc && spec.faults.corrupt > 0 => Err(NO_ICRC.to_owned()),
            _ => Ok(()),
        }
    }

    fn parts(spec: Option<&Self>) -> (Faults, u64) {
        spec.map_or_else(|| (Faults::default(), 1), |spec| (spec.faults, spec.seed))
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Faults { loss, duplicate, reorder, corrupt, delay } = self.faults;
        let rates =
            [("loss", loss), ("duplicate", duplicate), ("reorder", reorder), ("corrupt", corrupt), ("delay", delay)];
        for (name, steps) in rates.into_iter().filter(|&(_, steps)| steps > 0) {
            write!(f, "{name}:{}/", f64::from(steps) / STEPS)?;
        }
        write!(f, "seed:{}", self.seed)
    }
}

/// New faults of a link: a [`FaultSpec`], or `off`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultWord(pub Option<FaultSpec>);

impl FromStr for FaultWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" { Ok(Self(None)) } else { text.parse().map(Some).map(Self) }
    }
}

impl fmt::Display for FaultWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(spec) => spec.fmt(f),
            None => f.write_str("off"),
        }
    }
}

impl Serialize for FaultWord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

deserialize_from_str!(FaultWord);

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
        let spec: FaultSpec = all.parse().unwrap();
        assert_eq!(spec.to_string(), all);
        assert_eq!(["off", all].map(|text| text.parse::<FaultWord>().unwrap().to_string()), ["off", all]);
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
