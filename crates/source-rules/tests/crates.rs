//! Dependencies between the crates of this workspace, and the number of crates behind each published one.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use source_rules::config::REPOSITORY;
use source_rules::layers;
use source_rules::workspace::Workspace;

#[test]
fn crates_depend_downwards() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let problems = layers::check(&Workspace::read(&root, REPOSITORY).unwrap());
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Returns the names of all crates from which `package` is built with its default features, including itself and
/// procedural macros, as Cargo resolves them.
fn crates_of(package: &str) -> BTreeSet<String> {
    crates_with(package, "")
}

/// Same as [`crates_of`], with these features, separated by commas.
fn crates_with(package: &str, features: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .args(["--package", package, "--features", features])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// Crates that run in the compiler only.
const COMPILER: [&str; 10] = [
    "anyhow",
    "either",
    "itertools",
    "proc-macro2",
    "prost-derive",
    "quote",
    "serde_derive",
    "syn",
    "thiserror-impl",
    "unicode-ident",
];

/// Crates that the network function is linked from by default, besides its own, each with the reason. Another crate
/// needs a reason as well; there are at most twelve.
const LINKED_WITH_VMXNET3: [(&str, &str); 11] = [
    ("libc", "mlock; vm-memory"),
    ("log", "messages to the VMM"),
    ("pvrdma-base", "counters, limited logs, locks, snapshots"),
    ("pvrdma-guest-memory", "bus addresses, mappings, DMA"),
    ("pvrdma-handover", "signals between threads, with models"),
    ("pvrdma-packet", "parsers of headers"),
    ("pvrdma-pages", "lists of guest pages, for pinning"),
    ("pvrdma-pci-function", "the traits of a PCI function"),
    ("pvrdma-saved-state", "the state of the device as a value"),
    ("thiserror", "error types; vm-memory"),
    ("vm-memory", "guest memory of rust-vmm"),
];

/// Crates that a device which is saved as a stream of bytes is also linked from.
const LINKED_WITH_STREAMS: [&str; 4] = ["bytes", "cfg-if", "crc32fast", "prost"];

#[test]
fn the_network_card_is_built_from_few_crates() {
    let linked = |features| -> Vec<_> {
        let found = crates_with("pvrdma-vmxnet3", features);
        found.into_iter().filter(|name| !COMPILER.contains(&name.as_str()) && name != "pvrdma-vmxnet3").collect()
    };
    assert_eq!(linked(""), LINKED_WITH_VMXNET3.map(|(name, _)| name));
    let mut with_streams: Vec<_> =
        LINKED_WITH_VMXNET3.map(|(name, _)| name).into_iter().chain(LINKED_WITH_STREAMS).collect();
    with_streams.sort_unstable();
    assert_eq!(linked("saved-state"), with_streams);
}

#[test]
fn the_network_card_as_a_link_brings_no_sockets_encryption_or_rdma() {
    let found = crates_with("pvrdma-vmxnet3", "link");
    assert!(found.contains("pvrdma-vmxnet3") && found.contains("pvrdma-link"), "{found:?}");
    let forbidden = ["nix", "ring", "serde", "pvrdma-ether-link", "pvrdma-roce", "pvrdma-verbs", "pvrdma-verbs-types"];
    let refused =
        |name: &String| forbidden.contains(&name.as_str()) || name.starts_with("rustls") || name.starts_with("netlink");
    let others: Vec<_> = found.iter().filter(|name| refused(name)).collect();
    assert!(others.is_empty(), "pvrdma-vmxnet3 is also built from {others:?}");
}

#[test]
fn the_example_of_a_vmm_has_no_tls() {
    let found = crates_of("pvrdma-vmm");
    let others: Vec<_> = found.iter().filter(|name| *name == "ring" || name.starts_with("rustls")).collect();
    assert!(found.contains("pvrdma-ether-link") && others.is_empty(), "pvrdma-vmm is also built from {others:?}");
}

/// Crates of this workspace from which the lab and the demo may be built. They start the daemon as a program.
const OF_THE_LAB: [&str; 5] = ["guest-tests", "pvrdma-lab", "pvrdma-packet", "pvrdma-pages", "pvrdma-verbs-types"];

/// Crates that only benchmarks, captures, checks of documents, or TLS need.
const OF_THE_SUITE: [&str; 7] = ["nix", "pcap-file", "plotters", "rcgen", "ring", "roxmltree", "rustls"];

/// Maximum number of crates from which the lab is linked besides its own, and of those that the demo adds.
const LINKED_WITH_LAB: usize = 60;

#[test]
fn lab_and_demo_are_built_without_device_charts_certificates_and_captures() {
    let (lab, demo) = (crates_of("pvrdma-lab"), crates_with("guest-tests", "demo"));
    assert!(demo.is_superset(&lab) && lab.contains("pvrdma-verbs-types"), "{demo:?}");
    let of_the_device = |name: &str| name.starts_with("pvrdma") && !OF_THE_LAB.contains(&name);
    let others: Vec<_> =
        demo.iter().filter(|name| of_the_device(name) || OF_THE_SUITE.contains(&name.as_str())).collect();
    assert!(others.is_empty(), "the demo is also built from {others:?}");
    let linked: Vec<_> = demo.iter().filter(|name| !COMPILER.contains(&name.as_str())).collect();
    assert!(linked.len() <= LINKED_WITH_LAB, "{} crates: {linked:?}", linked.len());
    // The suite has each of them, so the names are correct.
    let suite = crates_with("guest-tests", "suite");
    assert!(suite.contains("plotters") && suite.contains("pvrdmad") && suite.contains("rcgen"), "{suite:?}");
}

#[test]
fn the_command_guest_tests_is_built_from_nothing_else() {
    assert_eq!(crates_of("guest-tests").into_iter().collect::<Vec<_>>(), ["guest-tests"]);
}

/// Crates from which the protocols may be built. Those of this workspace are `no_std`; the others open no files or
/// sockets, start no threads and read no clock.
const PURE: [&str; 16] = [
    "bitflags",
    "bytes",
    "cfg-if",
    "crc32c",
    "crc32fast",
    "prost",
    "pvrdma-ib-cm",
    "pvrdma-iwarp",
    "pvrdma-packet",
    "pvrdma-pages",
    "pvrdma-roce",
    "pvrdma-saved-state",
    "pvrdma-verbs-types",
    "serde",
    "serde_core",
    "thiserror",
];

#[test]
fn the_protocols_are_built_from_crates_without_input_output_or_clocks() {
    for protocol in ["pvrdma-ib-cm", "pvrdma-iwarp", "pvrdma-roce"] {
        let found = crates_of(protocol);
        assert!(found.contains(protocol), "{found:?}");
        let allowed = PURE.iter().chain(&COMPILER).map(|&name| name.to_owned()).collect::<BTreeSet<_>>();
        let others: Vec<_> = found.difference(&allowed).collect();
        assert!(others.is_empty(), "{protocol} is also built from {others:?}");
    }
}
