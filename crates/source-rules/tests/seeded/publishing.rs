use source_rules::{Problem, publishing};

use crate::{assert_one, parse};

const SHARED: &str = "[workspace.package]\nversion = \"0.1.0\"\nedition = \"2024\"\nlicense = \"MIT\"\n\
    keywords = [\"rdma\"]\ncategories = [\"virtualization\"]\nrust-version = \"1.95\"\n";
const READY: &str = "version.workspace = true\nedition.workspace = true\nlicense.workspace = true\n\
    keywords.workspace = true\ncategories.workspace = true\nrust-version.workspace = true\n\
    description = \"A crate\"\n[package.metadata.docs.rs]\ntargets = [\"x86_64-unknown-linux-gnu\"]\n";
const VERSION: &str = "version = \"0.1.0\", ";

/// Checks a workspace with the crate `a`, which depends on its neighbour `b`.
fn check(shared: &str, version: &str, a: &str, b: &str) -> Vec<Problem> {
    let dependencies = format!("[workspace.dependencies]\nb = {{ {version}path = \"crates/b\" }}\n");
    let root = format!("[workspace]\nmembers = [\"crates/*\"]\n{shared}{dependencies}");
    let a = format!("[package]\nname = \"a\"\n{a}[dependencies]\nb.workspace = true\n");
    let b = format!("[package]\nname = \"b\"\n{b}");
    publishing::check(&parse(&[("Cargo.toml", &root), ("crates/a/Cargo.toml", &a), ("crates/b/Cargo.toml", &b)]))
}

#[test]
fn required_keys_of_a_registry_are_present() {
    assert_eq!(check(SHARED, VERSION, READY, READY), []);
    for line in READY.lines() {
        let (key, _) = line.split_once(" =").unwrap_or((line, ""));
        if !line.starts_with('[') {
            let others: String = READY.split_inclusive('\n').filter(|other| other.trim_end() != line).collect();
            assert_one(&check(SHARED, VERSION, READY, &others), &["crates/b/", key]);
        }
    }
    let long = READY.replace("A crate", &"long ".repeat(40));
    assert_one(&check(SHARED, VERSION, READY, &long), &["crates/b/", "description of at most 150"]);
    let nowhere = READY.replace("[\"x86_64-unknown-linux-gnu\"]", "[]");
    assert_one(&check(SHARED, VERSION, READY, &nowhere), &["crates/b/", "docs.rs"]);
    assert_eq!(check(SHARED, VERSION, "publish = false\n", "publish = false\n"), []);
}

#[test]
fn published_crates_depend_on_published_crates() {
    assert_one(&check(SHARED, VERSION, READY, "publish = false\n"), &["crates/a/", "`b` is not published"]);
    for version in ["", "version = \"0.2.0\", "] {
        assert_one(&check(SHARED, version, READY, READY), &["crates/a/", "the version of the workspace"]);
    }
}

#[test]
fn shared_keys_are_present() {
    for line in SHARED.lines().skip(1) {
        let shared = SHARED.replace(&format!("{line}\n"), "");
        let key = line.split_once(" =").unwrap().0;
        let problems = check(&shared, VERSION, READY, READY);
        let found = problems.iter().filter(|problem| problem.message == format!("[workspace.package] has no {key}"));
        assert_eq!(found.count(), 1, "{problems:?}");
    }
    for keywords in ["[\"a\", \"b\", \"c\", \"d\", \"e\", \"f\"]", "[\"a-word-of-21-letters-x\"]", "[7]"] {
        let shared = SHARED.replace("[\"rdma\"]", keywords);
        assert_one(&check(&shared, VERSION, READY, READY), &["at most 5 keywords of at most 20 bytes"]);
    }
}

#[test]
fn a_library_has_an_example_on_its_front_page() {
    let root = format!("[workspace]\nmembers = [\"crates/*\"]\n{SHARED}");
    let manifest = format!("[package]\nname = \"a\"\n{READY}");
    let check = |library: &str| {
        let files = [("Cargo.toml", &*root), ("crates/a/Cargo.toml", &manifest), ("crates/a/src/lib.rs", library)];
        publishing::check(&parse(&files))
    };
    let example = |lines: usize| format!("//! A crate.\n//! ```\n{}//! ```\n", "//! x();\n".repeat(lines));
    assert_eq!(check(&example(30)), []);
    for library in
        ["//! A crate.\n", &example(31), "//! ```text\n//! no code\n//! ```\n", "//! ```\n//! # x();\n//! ```\n"]
    {
        assert_one(&check(library), &["crates/a/src/lib.rs", "no example of at most 30 lines"]);
    }
}
