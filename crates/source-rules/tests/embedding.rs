//! The complete integration in the documentation of `pvrdma-pci-slot`, built as a package outside this workspace.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use toml::{Table, Value};

/// Crates of this workspace that the integration uses, with the features that it needs.
const OURS: [(&str, &[&str]); 7] = [
    ("pvrdma-dev", &[]),
    ("pvrdma-guest-memory", &[]),
    ("pvrdma-link", &[]),
    ("pvrdma-packet", &[]),
    ("pvrdma-pci-slot", &["kvm"]),
    ("pvrdma-rxe", &[]),
    ("pvrdma-vmxnet3", &["link"]),
];

/// Crates of rust-vmm that it uses, in the versions of this workspace.
const RUST_VMM: [&str; 5] = ["event-manager", "kvm-ioctls", "vm-allocator", "vm-device", "vm-memory"];

/// Highest number of its lines.
const LINES: usize = 60;

/// Returns the longest example of a crate's documentation.
fn example(documentation: &str) -> String {
    let lines = documentation.lines().filter_map(|line| line.strip_prefix("//!"));
    let mut examples = vec![String::new()];
    let mut inside = false;
    for line in lines {
        if line.trim_start().starts_with("```") {
            inside = !inside;
            examples.push(String::new());
        } else if inside {
            writeln!(examples.last_mut().unwrap(), "{line}").unwrap();
        }
    }
    examples.into_iter().max_by_key(String::len).unwrap()
}

/// Writes the manifest of a package that depends on the crates of this workspace as a stranger's does.
fn manifest(root: &Path) -> String {
    let workspace: Table = fs::read_to_string(root.join("Cargo.toml")).unwrap().parse().unwrap();
    let known = workspace["workspace"]["dependencies"].as_table().unwrap();
    let mut dependencies = Table::new();
    for (name, features) in OURS {
        let path = root.join(known[name]["path"].as_str().unwrap());
        let mut dependency = Table::new();
        dependency.insert("path".to_owned(), path.to_str().unwrap().into());
        dependency.insert("features".to_owned(), Value::Array(features.iter().map(|&name| name.into()).collect()));
        dependencies.insert(name.to_owned(), dependency.into());
    }
    for name in RUST_VMM {
        dependencies.insert(name.to_owned(), known[name].clone());
    }
    let package = [("name", "embedding"), ("version", "0.0.0"), ("edition", "2024")];
    let package = package.map(|(key, value)| (key.to_owned(), Value::from(value)));
    let parts = [("package", Table::from_iter(package)), ("workspace", Table::new()), ("dependencies", dependencies)];
    Table::from_iter(parts.map(|(name, part)| (name.to_owned(), part.into()))).to_string()
}

#[test]
fn an_integration_compiles_outside_the_workspace() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let example = example(&fs::read_to_string(root.join("crates/pci-slot/src/lib.rs")).unwrap());
    let lines = example.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(example.contains("fn plug_in") && lines <= LINES, "{lines} lines:\n{example}");

    // The results stay in the target folder, so that another run builds only changed crates.
    let target = env::current_exe().unwrap().ancestors().nth(3).unwrap().join("embedding");
    let package = target.join("package");
    fs::create_dir_all(package.join("src")).unwrap();
    fs::write(package.join("src/lib.rs"), format!("#![allow(dead_code)]\n{example}")).unwrap();
    fs::write(package.join("Cargo.toml"), manifest(&root)).unwrap();
    fs::copy(root.join("Cargo.lock"), package.join("Cargo.lock")).unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["check", "--offline", "--quiet"])
        .current_dir(&package)
        .env("CARGO_TARGET_DIR", &target)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
