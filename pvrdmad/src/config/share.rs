//! What a device may use of what it shares with others, in the words of the command line.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use pvrdma_rxe::{DEFAULT_WEIGHT, ShareConfig};
use serde::{Serialize, Serializer};

use super::error::ConfigError;
use super::keys::deserialize_from_str;
use super::network::Network;
use super::spec::DeviceSpec;

/// Units of a rate, the largest first.
const UNITS: [(&str, u64); 4] = [("T", 1_000_000_000_000), ("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000)];
/// Bits per second that mean something.
const RATES: RangeInclusive<u64> = 100_000..=100_000_000_000_000;
/// Weights of devices.
const WEIGHTS: RangeInclusive<u32> = 1..=1000;
/// Bytes that may be used at once: at least a packet.
const BURSTS: RangeInclusive<u64> = 4096..=1 << 30;

/// Bits per second: `2.5G`, `800M`, `100k`, or a number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BitRate(u64);

impl BitRate {
    /// The same in bytes per second.
    pub const fn bytes(self) -> u64 {
        self.0 / 8
    }

    /// A rate in bytes per second.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes.saturating_mul(8))
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|&(_, unit)| self.0 >= unit && self.0 % unit == 0) {
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
        // A fraction has a unit to be one of, and no more digits than that has zeros.
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
        // As it is read: a number in a string.
        serializer.collect_str(&self.0)
    }
}

impl DeviceSpec {
    /// What the device may use.
    ///
    /// # Errors
    /// A value is out of range, or they do not go together.
    pub(super) fn share(&self) -> Result<ShareConfig, String> {
        let weight = self.weight.unwrap_or(DEFAULT_WEIGHT);
        if !WEIGHTS.contains(&weight) {
            return Err(format!("weight {weight} is not one of {} to {}", WEIGHTS.start(), WEIGHTS.end()));
        }
        if let Some(burst) = self.burst {
            if self.max_rate.is_none() {
                return Err("burst is what may exceed max-rate (max-rate=RATE)".to_owned());
            }
            if !BURSTS.contains(&burst) {
                return Err(format!("burst {burst} is not one of {} to {}", BURSTS.start(), BURSTS.end()));
            }
        }
        if let (Some(least), Some(most)) = (self.min_rate, self.max_rate)
            && least > most
        {
            return Err(format!("min-rate {least} is above max-rate {most}"));
        }
        Ok(ShareConfig {
            weight,
            max_rate: self.max_rate.map(BitRate::bytes),
            burst: self.burst,
            qp_max_rate: self.qp_max_rate.map(BitRate::bytes),
            min_rate: self.min_rate.map(BitRate::bytes),
        })
    }
}

impl Network {
    /// Checks that the network has the rates that its devices are promised.
    ///
    /// # Errors
    /// It has not, or nobody says what it has.
    pub(super) fn check_rates(&self) -> Result<(), ConfigError> {
        let mut sum = 0_u64;
        for device in &self.devices {
            let Some(promised) = device.share.min_rate else { continue };
            sum = sum.saturating_add(promised);
            let problem = match self.link_rate {
                None => format!("min-rate needs to know what network {} carries (link-rate=RATE)", self.name),
                Some(rate) if sum > rate.bytes() => format!(
                    "min-rate: devices of network {} are promised {} together, and it carries {rate} (link-rate)",
                    self.name,
                    BitRate::from_bytes(sum)
                ),
                Some(_) => continue,
            };
            return Err(ConfigError::Device { name: device.config.name.clone(), problem });
        }
        Ok(())
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

    #[test]
    fn what_goes_together() {
        let share = |keys: &str| format!("name=a,{keys}").parse::<DeviceSpec>().and_then(|spec| spec.share());
        assert_eq!(share("pin=off"), Ok(ShareConfig::default()));
        let all = share("weight=300,max-rate=10G,burst=1000000,qp-max-rate=1G,min-rate=500M").unwrap();
        assert_eq!((all.weight, all.max_rate, all.burst), (300, Some(1_250_000_000), Some(1_000_000)));
        assert_eq!((all.qp_max_rate, all.min_rate), (Some(125_000_000), Some(62_500_000)));
        for (keys, word) in [
            ("weight=0", "1 to 1000"),
            ("weight=1001", "1 to 1000"),
            ("burst=100000", "max-rate=RATE"),
            ("max-rate=1G,burst=1", "4096"),
            ("max-rate=fast", "max-rate: 'fast' is not a rate"),
            ("max-rate=1G,min-rate=2G", "min-rate 2Gbit/s is above max-rate 1Gbit/s"),
        ] {
            let error = share(keys).unwrap_err();
            assert!(error.contains(word), "{keys}: {error}");
        }
    }
}
