//! Rates in bits per second, as written on the command line.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::keys::deserialize_from_str;

/// Units of a rate, the largest first.
const UNITS: [(&str, u64); 4] = [("T", 1_000_000_000_000), ("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000)];
/// Valid rates in bits per second.
const RATES: RangeInclusive<u64> = 100_000..=100_000_000_000_000;
/// Bits per second: `2.5G`, `800M`, `100k`, or a number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BitRate(u64);

impl BitRate {
    /// Returns bytes per second.
    pub const fn bytes(self) -> u64 {
        self.0 / 8
    }

    /// Returns the rate as written in the configuration.
    pub fn word(self) -> String {
        self.to_string().trim_end_matches("bit/s").to_owned()
    }

    /// Makes a rate from bytes per second.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes.saturating_mul(8))
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|&(_, unit)| self.0 >= unit && self.0.is_multiple_of(unit)) {
            Some((name, unit)) => write!(f, "{}{name}bit/s", self.0 / unit),
            None => write!(f, "{}bit/s", self.0),
        }
    }
}

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a rate in bits per second, as 800M or 2.5G (100k to 100T)");
        let unit = UNITS.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
        let (number, unit) = unit.unwrap_or((text, 1));
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
        // A fraction has at most three digits, so that with a unit the result is a whole number of bits.
        if !is_number(whole) || !is_number(part) || whole.is_empty() || part.len() > 3 || number.ends_with('.') {
            return Err(wrong());
        }
        let thousandths = format!("{whole}{part:0<3}").parse::<u64>().ok();
        let bits = thousandths.and_then(|thousandths| thousandths.checked_mul(unit)).map(|product| product / 1000);
        bits.filter(|bits| RATES.contains(bits)).map(Self).ok_or_else(wrong)
    }
}

deserialize_from_str!(BitRate);

impl Serialize for BitRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Written as it is read: a number in a string.
        serializer.collect_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_in_bits() {
        for (text, bits) in [
            ("100k", 100_000),
            ("2.5G", 2_500_000_000),
            ("0.125M", 125_000),
            ("1.5T", 1_500_000_000_000),
            ("1000000", 1_000_000),
        ] {
            assert_eq!(text.parse(), Ok(BitRate(bits)), "{text}");
        }
        for wrong in ["", "0", "1", "99k", "101T", "G", "1.G", ".5G", "1.2345G", "-1G", "1g", "1GB", "1e9", "1 G"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
        let shown = ["2.5G", "100k", "10G"].map(|text| text.parse::<BitRate>().unwrap().to_string());
        assert_eq!(shown, ["2500Mbit/s", "100kbit/s", "10Gbit/s"]);
    }
}
