//! Which crates of this workspace depend on which, and the crates that a published one brings along.

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

/// The names of all crates that `package` is built from with its default features, as Cargo resolves them: itself and
/// procedural macros included.
fn crates_of(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .args(["--package", package])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// The crates that the protocol may be built from. Those of this workspace below it are `no_std`; the others open no
/// files or sockets, start no threads and read no clock.
const PURE: [&str; 16] = [
    "bitflags",
    "cfg-if",
    "crc32fast",
    "pvrdma-packet",
    "pvrdma-pages",
    "pvrdma-roce",
    "pvrdma-verbs-types",
    "serde",
    "serde_core",
    "thiserror",
    // They run in the compiler.
    "proc-macro2",
    "quote",
    "serde_derive",
    "syn",
    "thiserror-impl",
    "unicode-ident",
];

#[test]
fn the_protocol_is_built_from_crates_without_input_output_or_clocks() {
    let found = crates_of("pvrdma-roce");
    assert!(found.contains("pvrdma-roce"), "{found:?}");
    let allowed = BTreeSet::from(PURE.map(str::to_owned));
    let others: Vec<_> = found.difference(&allowed).collect();
    assert!(others.is_empty(), "pvrdma-roce is also built from {others:?}");
}
