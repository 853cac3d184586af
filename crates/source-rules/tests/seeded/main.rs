//! Tests each rule on small source trees: with a deliberate violation, and without it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod atomics;
mod circles;
mod deadlines;
mod dependencies;
mod layers;
mod logs;
mod module_layers;
mod module_style;
mod publishing;
mod purity;
mod reexports;
mod sizes;
mod threads;
mod words;

use source_rules::Problem;
use source_rules::config::{Config, REPOSITORY};
use source_rules::workspace::{Tree, Workspace};

/// Manifest of a workspace whose members are the folders of `crates/`.
const ROOT: (&str, &str) = ("Cargo.toml", "[workspace]\nmembers = [\"crates/*\"]\n");
/// Manifest of a crate `a` without dependencies.
const A: (&str, &str) = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n");

/// Parses a tree of these files, with the repository's settings but without its exceptions.
fn parse(files: &[(&str, &str)]) -> Workspace {
    let mut config: Config = REPOSITORY;
    config.pure.exceptions = &[];
    config.threads.exceptions = &[];
    config.logs.exceptions = &[];
    Workspace::parse(Tree::of(files), config).unwrap()
}

/// A tree with the crate `a` and these files.
fn crate_a(files: &[(&str, &str)]) -> Workspace {
    parse(&[&[ROOT, A], files].concat())
}

/// Problems as lines.
fn lines(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// Fails unless there is exactly one problem, whose text contains all of these parts.
#[track_caller]
fn assert_one(problems: &[Problem], parts: &[&str]) {
    let lines = lines(problems);
    let [line] = lines.as_slice() else { panic!("not one problem: {lines:#?}") };
    for part in parts {
        assert!(line.contains(part), "no `{part}` in: {line}");
    }
}
