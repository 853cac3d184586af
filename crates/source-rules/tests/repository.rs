//! The rules on this repository.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::Path;

use source_rules::config::REPOSITORY;
use source_rules::workspace::Workspace;
use source_rules::{
    Problem, atomics, circles, deadlines, dependencies, logs, module_layers, module_style, publishing, purity,
    reexports, sizes, threads, words,
};

fn repository() -> Workspace {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Workspace::read(&root, REPOSITORY).unwrap()
}

/// Fails with the problems.
#[track_caller]
fn judge(problems: &[Problem]) {
    for problem in problems {
        println!("{problem}");
    }
    assert!(problems.is_empty(), "{} problems", problems.len());
}

#[test]
fn no_import_circle() {
    let workspace = repository();
    // An unresolved path could hide a dependency.
    judge(&circles::unresolved(&workspace));
    judge(&circles::check(&workspace));
}

#[test]
fn modules_of_the_daemon_import_downwards() {
    judge(&module_layers::check(&repository()));
}

#[test]
fn the_protocols_know_no_input_output_or_clock() {
    let workspace = repository();
    for folder in workspace.config.pure.folders {
        assert!(workspace.packages.iter().any(|package| package.folder == *folder), "there is no {folder}");
    }
    judge(&purity::check(&workspace));
}

#[test]
fn files_and_functions_are_small_or_have_a_reason() {
    judge(&sizes::check(&repository()));
}

#[test]
fn no_dependency_is_unused_or_declared_twice() {
    judge(&dependencies::check(&repository()));
}

#[test]
fn crates_are_ready_for_a_registry() {
    judge(&publishing::check(&repository()));
}

#[test]
fn modules_have_one_style() {
    judge(&module_style::check(&repository()));
}

#[test]
fn items_are_imported_from_their_owner() {
    judge(&reexports::check(&repository()));
}

#[test]
fn threads_start_in_one_place() {
    let workspace = repository();
    let home = workspace.config.threads.home;
    assert!(workspace.files.iter().any(|file| file.path == home), "there is no {home}");
    judge(&threads::check(&workspace));
}

#[test]
fn the_supervisor_waits_with_deadlines() {
    let workspace = repository();
    let folder = workspace.config.deadlines.folder;
    assert!(workspace.files.iter().any(|file| file.path.starts_with(folder)), "there is no {folder}");
    judge(&deadlines::check(&workspace));
}

#[test]
fn atomics_are_listed() {
    let workspace = repository();
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(workspace.config.atomics.document);
    judge(&atomics::check(&workspace, &fs::read_to_string(document).unwrap()));
}

#[test]
fn log_lines_that_others_can_cause_are_limited() {
    let workspace = repository();
    let home = workspace.config.logs.home;
    assert!(workspace.files.iter().any(|file| file.path == home), "there is no {home}");
    judge(&logs::check(&workspace));
}

#[test]
fn the_words_are_those_of_the_field() {
    judge(&words::check(&repository()));
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

/// `docs/limits.md` refers to the tables of tested systems and measured figures, and repeats nothing from them: a copy
/// contradicts them after the next run.
#[test]
fn the_limits_repeat_no_version_and_no_figure() {
    let limits = read("docs/limits.md");
    let words: Vec<_> = limits.split_whitespace().collect();
    let is_number = |word: &str| word.starts_with(|first: char| first.is_ascii_digit());
    for pair in words.windows(2) {
        let [name, number] = [pair[0], pair[1]];
        let system = ["Linux", "QEMU", "Debian", "Ubuntu", "Fedora", "KVM"].contains(&name);
        let figure = is_number(name) && ["Gb/s", "Gbit/s", "us", "µs"].iter().any(|unit| number.starts_with(unit));
        assert!(!(figure || system && is_number(number)), "docs/limits.md: {name} {number}");
    }
    for page in ["guests.md", "doorbells.md", "host-adapter.md", "troubleshooting.md"] {
        assert!(limits.contains(page), "docs/limits.md does not refer to {page}");
    }
}

/// Each promise about an attacker names a test or a fuzz target that tries to break it.
#[test]
fn each_promise_about_security_names_a_test() {
    let (security, workspace) = (read("SECURITY.md"), repository());
    let (_, attackers) = security.split_once("\n### 1. ").unwrap();
    let (attackers, _) = attackers.split_once("\n## ").unwrap();
    let is_function = |word: &str| {
        let function = format!("fn {word}(");
        word.matches('_').count() > 1 && workspace.files.iter().any(|file| file.text.contains(&function))
    };
    let is_test = |word: &str| word.contains("tests") || word.starts_with("fuzz_") || is_function(word);
    let promises = attackers.split("\n- ").skip(1).map(|item| item.split("\n\n").next().unwrap_or_default());
    let mut count = 0;
    for promise in promises.filter(|promise| !promise.starts_with("*Not")) {
        assert!(promise.split('`').skip(1).step_by(2).any(is_test), "no test is named for: {promise}");
        count += 1;
    }
    assert!(count > 40, "{count} promises");
}

/// Release builds have overflow checks, as tests have.
#[test]
fn release_builds_check_for_overflow() {
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let release = &manifest["profile"]["release"];
    assert_eq!(release.get("overflow-checks").and_then(toml::Value::as_bool), Some(true));
}

/// A tool of another version than in the last run, or a database that cannot be downloaded, is reported.
#[test]
fn ci_checks_advisories_and_names_the_versions_of_its_tools() {
    let scripts = [".ci/run", ".ci/extended"].map(read);
    let tools: Vec<_> = scripts
        .iter()
        .flat_map(|script| script.lines())
        .filter_map(|line| line.trim().strip_prefix("cargo_tool "))
        .collect();
    assert!(tools.len() >= 6, "{tools:?}");
    for tool in tools {
        let version = tool.split(' ').nth(1).unwrap_or_default();
        let parts: Vec<_> = version.split('.').map(str::parse::<u32>).collect();
        assert!(parts.len() == 3 && parts.iter().all(Result::is_ok), "cargo_tool {tool}: which version?");
    }
    assert!(scripts[0].contains("\n.ci/advisories\n") && read("deny.toml").contains("\n[advisories]\n"));
}
