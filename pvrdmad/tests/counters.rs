//! Each counter of the daemon has a name, a unit and a help text that satisfy the OpenMetrics rules.

use std::collections::BTreeMap;
use std::path::Path;

use pvrdma_base::{Counter, Kind};
use pvrdma_vfio_user_server::{ClientCounters, IrqCounters};

/// Returns the counters of a device that do not depend on its backend.
fn device() -> Vec<Counter> {
    [pvrdma_dev::all_counters(), ClientCounters::default().list(), IrqCounters::default().list()].concat()
}

/// Returns the counters of a software adapter with links of all kinds.
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

/// Head of the page `docs/counters.md`.
const HEAD: &str = "\
<!-- Generated from the code; a test of pvrdmad compares it. -->
# Counters

All counters of devices, by the part of the daemon that counts. They have these names in
`pvrdmad status --json` and `pvrdmad show device`. A [metric](looking-inside.md#metrics) has the
prefix `pvrdma_`, and the suffix `_total` if it is a total.
";

/// Sections of the reference page: title, first sentence, counters.
fn sections() -> [(&'static str, &'static str, Vec<Counter>); 5] {
    [
        ("RDMA function", "Commands, rings, events and clients of the RDMA function.", device()),
        (
            "Network function",
            "Rings and offloads. The network function also has the `client_` and `interrupts_` counters above.",
            pvrdma_vmxnet3::all_counters(),
        ),
        (
            "Software adapter",
            "Queue pairs, ports and switch of a network with the backend `rxe`.",
            pvrdma_rxe::all_counters(),
        ),
        ("Links", "Uplinks to other hosts.", pvrdma_ether_link::all_counters()),
        ("The host's adapter", "Devices with the backend `ibverbs`.", pvrdma_ibverbs::all_counters()),
    ]
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    for (title, about, mut counters) in sections() {
        counters.sort_by_key(|counter| counter.name);
        page += &format!("\n## {title}\n\n{about}\n\n| counter | kind | meaning |\n| --- | --- | --- |\n");
        for Counter { name, kind, help, .. } in counters {
            let kind = if kind == Kind::Gauge { "value" } else { "total" };
            page += &format!("| `{name}` | {kind} | {} |\n", help.trim());
        }
    }
    page
}

#[test]
fn the_page_of_counters_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/counters.md");
    if std::env::var_os("WRITE_DOCUMENTS").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page(),
        "docs/counters.md is stale: WRITE_DOCUMENTS=1 cargo test -p pvrdmad --test processes counters"
    );
}
