//! Descriptions of the counters in a status, as declared by the crates that count.

use std::collections::BTreeMap;

use pvrdma_base::{Counter, Kind, Unit};
use serde::{Deserialize, Serialize};

/// Counters by name.
pub type Catalogue = BTreeMap<String, CounterInfo>;

/// Description of a counter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CounterInfo {
    /// Type: whether it only grows.
    pub kind: Kind,
    /// Unit.
    pub unit: Unit,
    /// Meaning, in a sentence.
    pub help: String,
}

impl From<&Counter> for CounterInfo {
    fn from(&Counter { kind, unit, help, .. }: &Counter) -> Self {
        Self { kind, unit, help: help.to_owned() }
    }
}

/// Adds counters that are not known yet. Most counters of one device are also those of the next.
pub(crate) fn describe_counters<'a>(counters: impl IntoIterator<Item = &'a Counter>, known: &mut Catalogue) {
    for counter in counters {
        if !known.contains_key(counter.name) {
            known.insert(counter.name.to_owned(), counter.into());
        }
    }
}
