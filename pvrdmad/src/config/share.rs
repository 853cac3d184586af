//! What a device may use of what it shares with others, in the words of the command line.

use std::ops::RangeInclusive;

use pvrdma_rxe::{DEFAULT_WEIGHT, ShareConfig};

use super::error::ConfigError;
use super::network::Network;
use super::rate::BitRate;
use super::spec::DeviceSpec;

/// Weights of devices.
const WEIGHTS: RangeInclusive<u32> = 1..=1000;
/// Bytes that may be used at once: at least a packet.
const BURSTS: RangeInclusive<u64> = 4096..=1 << 30;

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
