//! Limits of a device: the amount of each resource that it offers its guest.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use pvrdma_guest_memory::MemoryBudget;
use pvrdma_verbs::{HcaLimits, VerbsError};
use serde::de::{DeserializeSeed, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error as ThisError;

/// Reason why a limit was not set.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum LimitError {
    /// No limit has this name.
    #[error("there is no limit '{0}' (they are {list})", list = NAMES.join(", "))]
    Unknown(String),
    /// A running device cannot change the limit.
    #[error("{0} is the size of a BAR: it is given when a device is added")]
    Fixed(String),
    /// The value is out of range.
    #[error(transparent)]
    Value(#[from] VerbsError),
}

/// Upper limits of a device (section 2.4). Where the interface requires a power of two, the next lower one is
/// advertised.
///
/// Deserialized from a map of limits by name; missing ones keep their default. A new limit needs a field here (or in
/// [`HcaLimits`] if adapters have it as well), a default, and a row in the table below. Its place in the guest's
/// structure is in `abi/dsr.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Limits {
    /// Limits that an adapter has as well: the smaller of both is in force.
    #[serde(flatten)]
    pub verbs: HcaLimits,
    /// Requests per shared receive queue.
    pub max_srq_wr: u32,
    /// Doorbell pages, including the driver's own. Their number is the size of BAR 2 in pages.
    pub max_uar: u32,
    /// Address handles of the guest's kernel.
    pub max_ah: u32,
    /// GID table entries.
    pub gid_table: u32,
    /// Maximum memory in bytes that the guest and its peers may make this process allocate, beside the guest's own
    /// memory.
    pub max_memory: u64,
}

pvrdma_base::setters!(const Limits {
    with_verbs => verbs: HcaLimits,
    with_max_srq_wr => max_srq_wr: u32,
    with_max_uar => max_uar: u32,
    with_max_ah => max_ah: u32,
    with_gid_table => gid_table: u32,
    with_max_memory => max_memory: u64,
});

impl Default for Limits {
    fn default() -> Self {
        Self {
            verbs: HcaLimits::NONE
                .with_max_qp(16_384)
                .with_max_qp_wr(16_384)
                .with_max_sge(16)
                .with_max_cq(16_384)
                .with_max_cqe(1 << 22)
                .with_max_mr(65_536)
                .with_max_mr_size(1 << 30)
                .with_max_pd(16_384)
                .with_max_srq(1024)
                .with_max_rd_atomic(u8::MAX)
                .with_atomics(true)
                .with_memory_management(true),
            max_srq_wr: 16_384,
            max_uar: 1024,
            max_ah: 65_536,
            gid_table: 256,
            max_memory: MemoryBudget::DEFAULT_LIMIT,
        }
    }
}

/// [`Limits`] as sent between processes: all of them, whereas a table of limits holds only those that can be set.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Limits")]
pub(crate) struct AllLimits {
    verbs: HcaLimits,
    max_srq_wr: u32,
    max_uar: u32,
    max_ah: u32,
    gid_table: u32,
    max_memory: u64,
}

/// A limit that can be set: its value, and the range that the interface supports.
struct Entry<'a> {
    value: Value<'a>,
    least: u64,
    most: u64,
    is_power_of_two: bool,
    /// Error message for a value that is out of range.
    error: &'static str,
}

enum Value<'a> {
    Word(&'a mut u32),
    Long(&'a mut u64),
}

impl<'a> From<&'a mut u32> for Value<'a> {
    fn from(value: &'a mut u32) -> Self {
        Self::Word(value)
    }
}

impl<'a> From<&'a mut u64> for Value<'a> {
    fn from(value: &'a mut u64) -> Self {
        Self::Long(value)
    }
}

/// Time at which a running device applies a change of a limit. Existing objects are never affected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitChange {
    /// With the next object that the guest creates, because the guest has not been told this limit.
    Now,
    /// When the guest's driver starts and reads the limits.
    DriverStart,
    /// Never: the limit is the size of a BAR.
    NewDevice,
}

/// State of a limit of a running device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LimitStatus {
    /// Name.
    pub name: String,
    /// Value in force.
    pub value: u64,
    /// Value for a driver that starts now: the configured one, bounded by the adapter.
    pub next: u64,
    /// Time at which a change takes effect.
    pub change: LimitChange,
}

/// Description of a limit that can be set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitKey {
    /// Name.
    pub name: &'static str,
    /// Range that the interface supports.
    pub range: RangeInclusive<u64>,
    /// Default.
    pub default: u64,
    /// Meaning, as a sentence.
    pub help: &'static str,
}

macro_rules! table {
    ($(#[doc = $help:literal] $key:ident $(in $group:ident)?: $least:literal..=$most:literal $($power:literal)?,)*) => {
        /// The limits that can be set.
        const NAMES: &[&str] = &[$(stringify!($key)),*];

        impl Limits {
            fn entries(&mut self) -> [Entry<'_>; NAMES.len()] {
                [$(Entry {
                    value: Value::from(&mut self.$($group.)?$key),
                    least: $least,
                    most: $most,
                    is_power_of_two: [$($power,)?].contains(&"power of two"),
                    error: concat!("limit: ", stringify!($key), " must be ", $least, "..=", $most),
                },)*]
            }

            /// The limits that can be set.
            pub fn keys() -> Vec<LimitKey> {
                let default = Self::default();
                vec![$(LimitKey {
                    name: stringify!($key),
                    range: $least..=$most,
                    default: default.$($group.)?$key.into(),
                    help: $help.trim_ascii(),
                },)*]
            }
        }
    };
}

table! {
    /// Queue pairs, two of them reserved.
    max_qp in verbs: 3..=65_535,
    /// Work requests in a queue, rounded down to a power of two.
    max_qp_wr in verbs: 1..=8_388_608 "power of two",
    /// Scatter/gather elements in a request, rounded down to a power of two.
    max_sge in verbs: 1..=128 "power of two",
    /// Completion queues.
    max_cq in verbs: 2..=16_777_216,
    /// Entries of a completion queue, rounded down to a power of two.
    max_cqe in verbs: 1..=8_388_608 "power of two",
    /// Memory regions.
    max_mr in verbs: 1..=4_294_967_295,
    /// Bytes of a memory region.
    max_mr_size in verbs: 1..=1_073_741_824,
    /// Protection domains.
    max_pd in verbs: 1..=16_777_215,
    /// Shared receive queues.
    max_srq in verbs: 0..=16_777_216,
    /// Work requests in a shared receive queue, rounded down to a power of two.
    max_srq_wr: 1..=8_388_608 "power of two",
    /// Doorbell pages, rounded down to a power of two: one for each process and one for the driver.
    max_uar: 2..=1_048_576 "power of two",
    /// Address handles of the guest's kernel.
    max_ah: 0..=4_294_967_295,
    /// Entries of the GID table.
    gid_table: 1..=256,
    /// Bytes of the daemon's memory that the guest and its peers can occupy; guest memory is not included.
    max_memory: 0..=18_446_744_073_709_551_615,
}

impl Entry<'_> {
    fn get(&self) -> u64 {
        match &self.value {
            Value::Word(value) => u64::from(**value),
            Value::Long(value) => **value,
        }
    }

    /// # Errors
    /// The value is out of range; nothing has changed then.
    fn set(&mut self, new: u64) -> Result<(), VerbsError> {
        let error = VerbsError::Invalid(self.error);
        if !(self.least..=self.most).contains(&new) {
            return Err(error);
        }
        match &mut self.value {
            Value::Word(value) => **value = u32::try_from(new).map_err(|_| error)?,
            Value::Long(value) => **value = new,
        }
        Ok(())
    }
}

impl Limits {
    /// Sets a limit by its name.
    ///
    /// # Errors
    /// The limit is unknown, or the value is out of range; nothing has changed then.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), LimitError> {
        let entry = NAMES.iter().zip(self.entries()).find_map(|(known, entry)| (*known == name).then_some(entry));
        let mut entry = entry.ok_or_else(|| LimitError::Unknown(name.to_owned()))?;
        Ok(entry.set(value)?)
    }

    /// Sets limits of a running device, by their names.
    ///
    /// # Errors
    /// A limit is unknown, or a running device cannot change it, or a value is out of range; nothing has changed then.
    pub fn set_all(&mut self, values: &BTreeMap<String, u64>) -> Result<(), LimitError> {
        let mut changed = *self;
        for (name, &value) in values {
            if Self::change(name) == LimitChange::NewDevice {
                return Err(LimitError::Fixed(name.clone()));
            }
            changed.set(name, value)?;
        }
        *self = changed;
        Ok(())
    }

    /// Returns when a running device applies a change of a limit.
    pub fn change(name: &str) -> LimitChange {
        match name {
            "max_memory" => LimitChange::Now,
            "max_uar" => LimitChange::NewDevice,
            _ => LimitChange::DriverStart,
        }
    }

    /// Combines these limits, which are in force, with those of the next driver.
    pub(crate) fn beside(mut self, mut next: Self) -> Vec<LimitStatus> {
        let entries = NAMES.iter().zip(self.entries()).zip(next.entries());
        let status = |((&name, value), next): ((&&str, Entry<'_>), Entry<'_>)| LimitStatus {
            name: name.to_owned(),
            value: value.get(),
            next: next.get(),
            change: Self::change(name),
        };
        entries.map(status).collect()
    }

    /// Returns the first limit that is above the one of `most`: its name, its value, and the value of `most`.
    pub(crate) fn first_above(mut self, mut most: Self) -> Option<(&'static str, u64, u64)> {
        let both = NAMES.iter().zip(self.entries()).zip(most.entries());
        let mut values = both.map(|((&name, value), most)| (name, value.get(), most.get()));
        values.find(|(_, value, most)| value > most)
    }

    /// Checks each limit against the range that the interface supports.
    ///
    /// # Errors
    /// A limit is out of range; the error names it and its range.
    pub fn check(mut self) -> Result<(), VerbsError> {
        self.entries().into_iter().try_for_each(|mut entry| entry.set(entry.get()))
    }

    /// Returns the minimum of these limits and the adapter's, rounded as drivers require.
    ///
    /// # Errors
    /// A limit is out of range, or the adapter supports less of a resource than drivers need.
    pub(crate) fn bounded_by(&self, hca: &HcaLimits) -> Result<Self, VerbsError> {
        self.check()?;
        let max_srq_wr = self.max_srq_wr.min(hca.max_qp_wr);
        let mut limits = Self { verbs: self.verbs.bounded_by(hca), max_srq_wr, ..*self };
        for mut entry in limits.entries() {
            let value = entry.get();
            let rounded = value.checked_ilog2().filter(|_| entry.is_power_of_two).map_or(value, |log| 1 << log);
            entry.set(rounded)?;
        }
        Ok(limits)
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LimitsVisitor)
    }
}

struct LimitsVisitor;

impl<'de> Visitor<'de> for LimitsVisitor {
    type Value = Limits;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of limits")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Limits, A::Error> {
        let mut limits = Limits::default();
        while let Some(key) = map.next_key::<String>()? {
            let entry = NAMES.iter().zip(limits.entries()).find_map(|(name, entry)| (*name == key).then_some(entry));
            map.next_value_seed(entry.ok_or_else(|| Error::unknown_field(&key, NAMES))?)?;
        }
        Ok(limits)
    }
}

/// Limits are checked while they are deserialized, so that an error points to their place in the input.
impl<'de> DeserializeSeed<'de> for Entry<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(mut self, deserializer: D) -> Result<(), D::Error> {
        let value = u64::deserialize(deserializer)?;
        self.set(value).map_err(Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MOCK_LIMITS as LIMITS;

    #[test]
    fn the_adapter_bounds_everything() {
        let wide = Limits { verbs: LIMITS.with_max_qp(65_535).with_max_sge(100), ..Limits::default() };
        let wide = Limits { verbs: wide.verbs.with_max_mr_size(1 << 30), ..wide };
        let hca = LIMITS.with_max_qp(u32::MAX).with_max_qp_wr(1000).with_max_sge(1000).with_atomics(false);
        let limits = wide.bounded_by(&hca).unwrap();
        let verbs = limits.verbs;
        assert_eq!((verbs.max_qp, verbs.max_qp_wr, verbs.max_sge, limits.max_srq_wr), (65_535, 512, 64, 512));
        assert_eq!((verbs.max_cq, verbs.max_rd_atomic, verbs.atomics), (LIMITS.max_cq, LIMITS.max_rd_atomic, false));
        assert!(wide.bounded_by(&hca.with_max_qp_wr(0)).is_err());
        assert!(wide.bounded_by(&hca.with_max_qp(2)).is_err());
    }

    #[test]
    fn limits_of_a_running_device() {
        let set = |values: &[(&str, u64)]| {
            let mut limits = Limits::default();
            let values = values.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
            limits.set_all(&values).map(|()| limits).inspect_err(|_| assert_eq!(limits, Limits::default()))
        };
        let limits = set(&[("max_qp", 100), ("max_memory", 0)]).unwrap();
        assert_eq!((limits.verbs.max_qp, limits.max_memory, limits.gid_table), (100, 0, 256));
        for (values, problem) in [
            (&[("max_qp", 2)][..], "max_qp must be 3..=65535"),
            (&[("max_cq", 7), ("max_srq", u64::MAX)], "max_srq must be"),
            (&[("max_uar", 1024)], "size of a BAR"),
            (&[("", 1)], "there is no limit ''"),
        ] {
            let error = set(values).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        let both = Limits::default().beside(limits);
        assert_eq!(both.len(), Limits::keys().len());
        let of = |name: &str| {
            both.iter().find(|limit| limit.name == name).map(|limit| (limit.value, limit.next, limit.change))
        };
        assert_eq!(of("max_qp"), Some((16_384, 100, LimitChange::DriverStart)));
        assert_eq!(of("max_memory"), Some((384 << 20, 0, LimitChange::Now)));
        assert_eq!(of("max_uar"), Some((1024, 1024, LimitChange::NewDevice)));
    }

    #[test]
    fn limits_are_read_by_name() {
        let limits: Limits = serde_json::from_str(r#"{"max_qp": 100, "gid_table": 16, "max_memory": 0}"#).unwrap();
        assert_eq!((limits.verbs.max_qp, limits.gid_table, limits.max_memory), (100, 16, 0));
        assert_eq!(limits.max_srq_wr, Limits::default().max_srq_wr);
        for (text, error) in [
            (r#"{"max_qp": 0}"#, "max_qp must be 3..=65535"),
            (r#"{"max_qp": 99999999}"#, "max_qp must be 3..=65535"),
            (r#"{"max_uar": 4294967298}"#, "max_uar must be 2..=1048576"),
            (r#"{"gid_table": 257}"#, "gid_table must be 1..=256"),
            (r#"{"max_qp": -1}"#, "integer `-1`"),
            (r#"{"max_qps": 1}"#, "unknown field `max_qps`, expected one of `max_qp`, `max_qp_wr`"),
            (r#"{"atomics": false}"#, "unknown field `atomics`"),
        ] {
            let problem = serde_json::from_str::<Limits>(text).unwrap_err().to_string();
            assert!(problem.contains(error), "{text}: {problem}");
        }
    }

    #[test]
    fn each_value_fits_its_type_and_can_be_read_back() {
        for mut entry in Limits::default().entries() {
            entry.set(entry.most).unwrap();
            entry.set(entry.least).unwrap();
        }
        assert!(Limits { verbs: Limits::default().verbs.with_max_sge(129), ..Limits::default() }.check().is_err());
        let written = serde_json::to_value(Limits::default()).unwrap();
        for key in NAMES {
            assert!(written[key].is_u64(), "{key}");
        }
    }
}
