//! A device's share of common resources, as written on the command line.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use pvrdma_rxe::{DEFAULT_WEIGHT, ShareConfig};

use super::error::ConfigError;
use super::network::Network;
use super::rate::BitRate;
use super::spec::DeviceSpec;

/// Valid weights of devices.
const WEIGHTS: RangeInclusive<u32> = 1..=1000;
/// Valid bursts in bytes: at least a packet.
const BURSTS: RangeInclusive<u64> = 4096..=1 << 30;

impl DeviceSpec {
    /// Returns the share that the keys describe.
    ///
    /// # Errors
    /// A value is out of range, or values contradict each other.
    pub(super) fn share(&self) -> Result<ShareConfig, String> {
        let share = ShareConfig::default()
            .with_weight(self.weight.unwrap_or(DEFAULT_WEIGHT))
            .with_max_rate(self.max_rate.map(BitRate::bytes))
            .with_burst(self.burst)
            .with_qp_max_rate(self.qp_max_rate.map(BitRate::bytes))
            .with_min_rate(self.min_rate.map(BitRate::bytes));
        checked(share)
    }
}

/// # Errors
/// A value is out of range, or values contradict each other.
fn checked(share: ShareConfig) -> Result<ShareConfig, String> {
    let ShareConfig { weight, max_rate, burst, min_rate, .. } = share;
    if !WEIGHTS.contains(&weight) {
        return Err(format!("weight {weight} is not one of {} to {}", WEIGHTS.start(), WEIGHTS.end()));
    }
    if let Some(burst) = burst {
        if max_rate.is_none() {
            return Err("burst needs a max-rate, which it may exceed (max-rate=RATE)".to_owned());
        }
        if !BURSTS.contains(&burst) {
            return Err(format!("burst {burst} is not one of {} to {}", BURSTS.start(), BURSTS.end()));
        }
    }
    if let (Some(least), Some(most)) = (min_rate, max_rate)
        && least > most
    {
        let [least, most] = [least, most].map(BitRate::from_bytes);
        return Err(format!("min-rate {least} is above max-rate {most}"));
    }
    Ok(share)
}

/// Word that removes an optional value.
const OFF: &str = "off";

/// Changes keys of a share. The value `off` removes a rate or the burst.
///
/// # Errors
/// There is no such key, a value is out of range, or values contradict each other.
pub fn change_share(mut share: ShareConfig, set: &BTreeMap<String, String>) -> Result<ShareConfig, String> {
    let wrong = |key: &str, problem: String| format!("{key}: {problem}");
    let rate = |key: &str, value: &str| {
        let rate = (value != OFF).then(|| value.parse().map(BitRate::bytes)).transpose();
        rate.map_err(|problem| wrong(key, problem))
    };
    let number = |key: &str, value: &str| {
        value.parse::<u64>().map_err(|_| wrong(key, format!("'{value}' is not a number from 0 to {}", u64::MAX)))
    };
    for (key, value) in set {
        match key.as_str() {
            "weight" => share.weight = u32::try_from(number(key, value)?).unwrap_or(u32::MAX),
            "burst" => share.burst = (value != OFF).then(|| number(key, value)).transpose()?,
            "max-rate" => share.max_rate = rate(key, value)?,
            "qp-max-rate" => share.qp_max_rate = rate(key, value)?,
            "min-rate" => share.min_rate = rate(key, value)?,
            unknown => {
                let known: Vec<_> = share_words(&share).into_keys().collect();
                return Err(format!("unknown key '{unknown}' (the keys of a share are {})", known.join(", ")));
            }
        }
    }
    checked(share)
}

/// Returns a share in the form that [`change_share`] accepts.
pub fn share_words(share: &ShareConfig) -> BTreeMap<String, String> {
    let ShareConfig { weight, max_rate, burst, qp_max_rate, min_rate, .. } = *share;
    let off = || OFF.to_owned();
    let rate = |rate: Option<u64>| rate.map_or_else(off, |bytes| BitRate::from_bytes(bytes).word());
    let words = [
        ("weight", weight.to_string()),
        ("max-rate", rate(max_rate)),
        ("burst", burst.map_or_else(off, |burst| burst.to_string())),
        ("qp-max-rate", rate(qp_max_rate)),
        ("min-rate", rate(min_rate)),
    ];
    words.map(|(key, value)| (key.to_owned(), value)).into()
}

impl Network {
    /// Checks that the capacity of the network covers the rates that are guaranteed to its devices.
    ///
    /// # Errors
    /// Its rate is too low or unknown.
    pub(super) fn check_rates(&self) -> Result<(), ConfigError> {
        let shares = self.devices.iter().map(|device| (device.config.name.as_str(), device.share));
        self.carries(shares).map_err(|(name, problem)| ConfigError::Device { name: name.to_owned(), problem })
    }

    /// Checks that the capacity of the network covers the guaranteed rates of devices with these shares.
    ///
    /// # Errors
    /// The rate of the network is unknown or too low. The error names the first device whose guarantee cannot be kept.
    pub(crate) fn carries<'a>(
        &self,
        shares: impl Iterator<Item = (&'a str, ShareConfig)>,
    ) -> Result<(), (&'a str, String)> {
        let mut sum = 0_u64;
        for (name, share) in shares {
            let Some(promised) = share.min_rate else { continue };
            sum = sum.saturating_add(promised);
            let problem = match self.link_rate {
                None => format!("min-rate needs the capacity of network {} (link-rate=RATE)", self.name),
                Some(rate) if sum > rate.bytes() => format!(
                    "min-rate: devices of network {} are promised {} together, and it carries {rate} (link-rate)",
                    self.name,
                    BitRate::from_bytes(sum)
                ),
                Some(_) => continue,
            };
            return Err((name, problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_changes_by_words() {
        let set = |share, words: &[(&str, &str)]| {
            let words = words.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
            change_share(share, &words)
        };
        let share =
            set(ShareConfig::default(), &[("weight", "300"), ("max-rate", "2.5G"), ("burst", "100000")]).unwrap();
        assert_eq!((share.weight, share.max_rate, share.burst), (300, Some(312_500_000), Some(100_000)));
        // The output is valid input.
        assert_eq!(change_share(ShareConfig::default(), &share_words(&share)), Ok(share));
        assert_eq!(set(share, &[]), Ok(share));
        let off = set(share, &[("max-rate", "off"), ("burst", "off"), ("weight", "100")]);
        assert_eq!(off, Ok(ShareConfig::default()));
        for (key, value, word) in [
            ("max-rate", "off", "burst needs a max-rate"),
            ("min-rate", "3G", "min-rate 3Gbit/s is above max-rate 2500Mbit/s"),
            ("weight", "0", "1 to 1000"),
            ("weight", "99999999999", "1 to 1000"),
            ("weight", "off", "weight: 'off' is not a number"),
            ("max-rate", "fast", "max-rate: 'fast' is not a rate"),
            ("wait", "1", "unknown key 'wait' (the keys of a share are burst, max-rate,"),
        ] {
            let error = set(share, &[(key, value)]).unwrap_err();
            assert!(error.contains(word), "{key}={value}: {error}");
        }
    }

    #[test]
    fn compatible_keys_are_accepted() {
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
