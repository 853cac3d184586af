//! Everything that a daemon can count has a name, a unit and a help text that an exporter takes as they are.

use std::collections::BTreeMap;

use pvrdma_verbs::Counter;
use pvrdmad::vfio_user::{ClientCounters, IrqCounters};

/// What a device counts, whatever its backend.
fn device() -> Vec<Counter> {
    [pvrdma_dev::all_counters(), ClientCounters::default().list(), IrqCounters::default().list()].concat()
}

/// What a software adapter counts, with links of all kinds.
fn software() -> Vec<Counter> {
    [pvrdma_rxe::all_counters(), pvrdma_ether_link::all_counters()].concat()
}

#[test]
fn an_exporter_takes_every_name() {
    let all = [device(), software(), pvrdma_ibverbs::all_counters()].concat();
    assert!(all.len() > 100);
    for counter in all {
        assert!(counter.is_exportable(), "{counter:?}");
        assert_eq!(counter.value, 0, "{counter:?}");
    }
}

#[test]
fn no_name_means_two_things() {
    for adapter in [software(), pvrdma_ibverbs::all_counters()] {
        let mut known = BTreeMap::new();
        for counter in [device(), adapter].concat() {
            assert_eq!(known.insert(counter.name, counter), None);
        }
    }
    let mut meanings = BTreeMap::new();
    for counter in [software(), pvrdma_ibverbs::all_counters()].concat() {
        assert_eq!(*meanings.entry(counter.name).or_insert(counter), counter, "the same name in both backends");
    }
}
