//! What the counters of a status mean: each as the crate that counts declares it.

use std::collections::BTreeMap;

use pvrdma_verbs::{Counter, Kind, Unit};
use serde::{Deserialize, Serialize};

/// Counters by name.
pub type Catalogue = BTreeMap<String, CounterInfo>;

/// What a counter is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CounterInfo {
    /// Whether it only grows.
    pub kind: Kind,
    /// What it measures.
    pub unit: Unit,
    /// What it means, in a sentence.
    pub help: String,
}

impl From<&Counter> for CounterInfo {
    fn from(&Counter { kind, unit, help, .. }: &Counter) -> Self {
        Self { kind, unit, help: help.to_owned() }
    }
}

/// Adds counters that are not known yet: those of one device are mostly those of the next.
pub(crate) fn describe_counters<'a>(counters: impl IntoIterator<Item = &'a Counter>, known: &mut Catalogue) {
    for counter in counters {
        if !known.contains_key(counter.name) {
            known.insert(counter.name.to_owned(), counter.into());
        }
    }
}
