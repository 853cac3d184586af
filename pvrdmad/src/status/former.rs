//! Counts of former processes of a device: its counters continue after a hand-over.

use std::collections::BTreeMap;

use pvrdma_base::{Counter, Kind};
use serde::{Deserialize, Serialize};

use super::report::by_name;

/// Most counters of a function. A device has about three hundred.
const MAX_COUNTERS: usize = 4096;

/// Counts of former processes of a function. Counters that the current process does not have are not shown.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct FormerCounts {
    own: BTreeMap<String, u64>,
    adapter: BTreeMap<String, u64>,
    port: BTreeMap<String, u64>,
}

impl FormerCounts {
    /// Returns the counts of a function for the next process, from those that include all former ones.
    pub(crate) fn of(own: &[Counter], adapter: &[Counter], port: &[Counter]) -> Self {
        let [own, adapter, port] = [own, adapter, port].map(by_name);
        Self { own, adapter, port }
    }

    /// Returns `true` if there are more counts than a function has.
    pub(crate) fn is_too_long(&self) -> bool {
        [&self.own, &self.adapter, &self.port].iter().any(|counts| counts.len() > MAX_COUNTERS)
    }

    /// Adds the counts of former processes. Gauges describe the present.
    pub(crate) fn add(&self, own: &mut [Counter], adapter: &mut [Counter], port: &mut [Counter]) {
        for (former, now) in [(&self.own, own), (&self.adapter, adapter), (&self.port, port)] {
            for counter in now.iter_mut().filter(|counter| counter.kind == Kind::Counter) {
                let before = former.get(counter.name).copied().unwrap_or(0);
                counter.value = counter.value.saturating_add(before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_base::Unit;

    use super::*;

    #[test]
    fn counters_continue_and_gauges_do_not() {
        let now = || [Counter::total("sent", Unit::None, "Sent.", 3), Counter::gauge("open", Unit::None, "Open.", 2)];
        let former = FormerCounts::of(&now(), &[], &now());
        let (mut own, mut adapter, mut port) = (now(), now(), now());
        former.add(&mut own, &mut adapter, &mut port);
        assert_eq!([own, adapter, port].map(|list| list.map(|counter| counter.value)), [[6, 2], [3, 2], [6, 2]]);
        // A count that has no place any more, and one that overflows.
        let former = FormerCounts { own: [("gone".to_owned(), 1), ("sent".to_owned(), u64::MAX)].into(), ..former };
        let mut own = now();
        former.add(&mut own, &mut [], &mut []);
        assert_eq!(own.map(|counter| counter.value), [u64::MAX, 2]);
    }
}
