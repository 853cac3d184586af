//! The `[congestion]` table: parameters of congestion control for all devices that enable it.

use std::ops::RangeInclusive;
use std::time::Duration;

use pvrdma_roce::Congestion;

use super::keys::keys;

/// Valid intervals in microseconds.
const INTERVALS: RangeInclusive<u32> = 1..=1_000_000;
/// Valid rates in megabits per second.
const RATES: RangeInclusive<u32> = 1..=1_000_000;
/// Bytes per second of a megabit per second.
pub(super) const MEGABIT: u64 = 125_000;

keys! {
    /// Parameters of congestion control; omitted ones keep their defaults, see [`Congestion`].
    pub struct CongestionSpec {
        /// Minimum interval of CNPs for a queue pair.
        ["cnp_interval_us", "MICROSECONDS", "50"]
        cnp_interval_us: Option<u32>,
        /// DSCP of CNPs.
        ["cnp_dscp", "0..63", "48"]
        cnp_dscp: Option<u8>,
        /// 802.1p priority of CNPs that have a tag.
        ["cnp_priority", "0..7", "6"]
        cnp_priority: Option<u8>,
        /// Rate before the first cut, in Mb/s. The default is `link-rate` of the network, or the speed that the
        /// interface of the uplink reports, or 10000.
        ["line_rate_mbps", "MBPS", ""]
        line_rate_mbps: Option<u32>,
        /// Minimum rate after cuts, in Mb/s.
        ["min_rate_mbps", "MBPS", "10"]
        min_rate_mbps: Option<u32>,
        /// Minimum interval of rate cuts.
        ["cut_interval_us", "MICROSECONDS", "200"]
        cut_interval_us: Option<u32>,
        /// Time between two updates of alpha, the estimate of congestion.
        ["alpha_interval_us", "MICROSECONDS", "220"]
        alpha_interval_us: Option<u32>,
        /// Reciprocal of the weight of a new observation in alpha (1/g).
        ["alpha_weight", "1..65536", "256"]
        alpha_weight: Option<u32>,
        /// Time without a cut after which the rate increases, randomized by 10 %.
        ["increase_interval_us", "MICROSECONDS", "220"]
        increase_interval_us: Option<u32>,
        /// Bytes sent without a cut after which the rate also increases.
        ["increase_bytes", "BYTES", "10485760"]
        increase_bytes: Option<u64>,
        /// Increases of each kind that recover half of the cut (fast recovery, F).
        ["recovery_steps", "NUMBER", "5"]
        recovery_steps: Option<u32>,
        /// Later increases of the target rate, in Mb/s (additive increase, R_AI).
        ["additive_increase_mbps", "MBPS", "40"]
        additive_increase_mbps: Option<u32>,
        /// Increases once both kinds have passed fast recovery, in Mb/s (hyper increase, R_HAI).
        ["hyper_increase_mbps", "MBPS", "400"]
        hyper_increase_mbps: Option<u32>,
    }
}

impl CongestionSpec {
    /// Returns the parameters, with defaults for those that were not given.
    ///
    /// # Errors
    /// A parameter is out of range.
    pub fn resolve(&self) -> Result<Congestion, String> {
        let default = Congestion::default();
        let interval = |name, given: Option<u32>, default| match given {
            None => Ok(default),
            Some(us) => within(name, us, &INTERVALS).map(|us| Duration::from_micros(us.into())),
        };
        let rate = |name, given: Option<u32>, default| match given {
            None => Ok(default),
            Some(mbps) => within(name, mbps, &RATES).map(|mbps| u64::from(mbps) * MEGABIT),
        };
        let parameters = Congestion {
            cnp_interval: interval("cnp_interval_us", self.cnp_interval_us, default.cnp_interval)?,
            cnp_dscp: within("cnp_dscp", self.cnp_dscp.unwrap_or(default.cnp_dscp), &(0..=63))?,
            cnp_priority: within("cnp_priority", self.cnp_priority.unwrap_or(default.cnp_priority), &(0..=7))?,
            line_rate: rate("line_rate_mbps", self.line_rate_mbps, default.line_rate)?,
            min_rate: rate("min_rate_mbps", self.min_rate_mbps, default.min_rate)?,
            cut_interval: interval("cut_interval_us", self.cut_interval_us, default.cut_interval)?,
            alpha_interval: interval("alpha_interval_us", self.alpha_interval_us, default.alpha_interval)?,
            alpha_weight: within("alpha_weight", self.alpha_weight.unwrap_or(default.alpha_weight), &(1..=65_536))?,
            increase_interval: interval("increase_interval_us", self.increase_interval_us, default.increase_interval)?,
            increase_bytes: self.increase_bytes.unwrap_or(default.increase_bytes),
            recovery_steps: self.recovery_steps.unwrap_or(default.recovery_steps),
            additive_increase: rate("additive_increase_mbps", self.additive_increase_mbps, default.additive_increase)?,
            hyper_increase: rate("hyper_increase_mbps", self.hyper_increase_mbps, default.hyper_increase)?,
        };
        if parameters.min_rate > parameters.line_rate {
            return Err("min_rate_mbps is above line_rate_mbps".to_owned());
        }
        Ok(parameters)
    }
}

fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, range: &RangeInclusive<T>) -> Result<T, String> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(format!("{name} {value} is not one of {} to {}", range.start(), range.end()))
}
