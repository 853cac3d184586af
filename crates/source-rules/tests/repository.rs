//! The rules on this repository.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::Path;

use source_rules::config::REPOSITORY;
use source_rules::workspace::Workspace;
use source_rules::{Problem, circles, dependencies, module_style, purity, sizes, words};

/// Folders that still break a rule.
struct Known {
    circles: &'static [&'static str],
    sizes: &'static [&'static str],
    dependencies: &'static [&'static str],
    module_style: &'static [&'static str],
    words: &'static [&'static str],
}

/// **Temporary.** The lists only get shorter: an entry that excuses nothing any more fails the test. When they are all
/// empty, they go.
const KNOWN: Known = Known {
    circles: &[],
    sizes: &[],
    dependencies: &[],
    module_style: &[],
    words: &["crates/verbs/", "guest-tests/", "pvrdmad/"],
};

fn repository() -> Workspace {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Workspace::read(&root, REPOSITORY).unwrap()
}

/// Fails with the problems that are not excused, and with excuses that nobody needs.
fn judge(problems: &[Problem], known: &[&str]) {
    let excuses = |known: &&str, problem: &&Problem| problem.file.starts_with(known);
    let new: Vec<_> = problems.iter().filter(|problem| !known.iter().any(|known| excuses(known, problem))).collect();
    for problem in &new {
        println!("{problem}");
    }
    let unneeded: Vec<_> =
        known.iter().filter(|known| !problems.iter().any(|problem| excuses(known, &problem))).collect();
    for known in &unneeded {
        println!("`{known}` breaks this rule no more: take it out of KNOWN");
    }
    assert!(new.is_empty() && unneeded.is_empty(), "{} problems, {} needless entries", new.len(), unneeded.len());
}

#[test]
fn no_import_circle_of_more_than_two_files() {
    let workspace = repository();
    // A path that leads nowhere may hide an arrow.
    judge(&circles::unresolved(&workspace), &[]);
    judge(&circles::check(&workspace), KNOWN.circles);
}

#[test]
fn the_protocol_knows_no_input_output_or_clock() {
    let workspace = repository();
    let folder = workspace.config.pure.folder;
    assert!(workspace.packages.iter().any(|package| package.folder == folder), "there is no {folder}");
    judge(&purity::check(&workspace), &[]);
}

#[test]
fn files_and_functions_are_small_or_say_why() {
    judge(&sizes::check(&repository()), KNOWN.sizes);
}

#[test]
fn no_dependency_is_unused_or_declared_twice() {
    judge(&dependencies::check(&repository()), KNOWN.dependencies);
}

#[test]
fn modules_have_one_style() {
    judge(&module_style::check(&repository()), KNOWN.module_style);
}

#[test]
fn the_words_are_those_of_the_field() {
    judge(&words::check(&repository()), KNOWN.words);
}
