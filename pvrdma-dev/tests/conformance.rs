//! Compares the conformance list (section 15 of the interface specification) with the tests.
//!
//! A test that covers numbers of the list says so in its documentation: the word "Conformance", the numbers separated
//! by commas, and a period or a colon. `docs/conformance.md` has a row for each number: either the most important
//! tests, or the reason why there is none.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Number of entries of the list.
const NUMBERS: u32 = 75;

/// Beginning of the last cell of a row without tests.
const NO_TEST: &str = "No test: ";

/// Cases of virtual machines are listed by the name of their function, and need not name numbers.
const VM_CASES: &str = "guest-tests/";

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Documentation by `file::function` for all functions of the workspace.
fn functions() -> BTreeMap<String, String> {
    let workspace = workspace();
    let mut files = Vec::new();
    for folder in [workspace.clone(), workspace.join("crates")] {
        for member in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if member.join("Cargo.toml").is_file() {
                sources(&member.join("src"), &mut files);
                sources(&member.join("tests"), &mut files);
            }
        }
    }
    let mut functions = BTreeMap::new();
    for file in files {
        let name = file.strip_prefix(&workspace).unwrap().to_str().unwrap().to_owned();
        let mut comment = String::new();
        for line in fs::read_to_string(&file).unwrap().lines().map(str::trim) {
            if let Some(text) = line.strip_prefix("///") {
                comment.push_str(text);
            } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| !line.starts_with("//")) {
                let function = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
                functions.insert(format!("{name}::{function}"), std::mem::take(&mut comment));
            } else if !line.starts_with("#[") {
                comment.clear();
            }
        }
    }
    functions
}

/// The numbers that a comment names.
fn numbers(comment: &str) -> Result<BTreeSet<u32>, &str> {
    let mut found = BTreeSet::new();
    for text in comment.split("Conformance ").skip(1).filter(|text| text.starts_with(|c: char| c.is_ascii_digit())) {
        let end = text.find(['.', ':']).ok_or(text)?;
        for number in text[..end].split(", ") {
            found.insert(number.parse().ok().filter(|number| (1..=NUMBERS).contains(number)).ok_or(text)?);
        }
    }
    Ok(found)
}

/// Returns the rows of the table: number, tests, and the whole last cell.
fn rows() -> Vec<(u32, Vec<String>, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/conformance.md");
    let text = fs::read_to_string(path).unwrap();
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows = text.lines().filter(|line| line.starts_with("| ")).map(cells);
    rows.filter_map(|cells| {
        let number = cells[0].parse().ok()?;
        let [_, _, last] = &cells[..] else { panic!("row {number} has {} cells", cells.len()) };
        let tests = last.split('`').skip(1).step_by(2).filter(|name| name.contains("::")).map(str::to_owned).collect();
        Some((number, tests, last.clone()))
    })
    .collect()
}

/// Every number is covered by a test, or its row gives a reason. Every test in the table exists and names its number.
#[test]
fn every_number_is_covered() {
    let functions = functions();
    let mut named: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for (function, comment) in &functions {
        let numbers = numbers(comment).unwrap_or_else(|text| panic!("{function}: cannot read \"Conformance {text}\""));
        numbers.into_iter().for_each(|number| named.entry(number).or_default().push(function));
    }
    let rows = rows();
    assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), (1..=NUMBERS).collect::<Vec<_>>(), "one row a number");
    let mut wrong = Vec::new();
    for (number, tests, cell) in rows {
        for test in &tests {
            match functions.get(test) {
                None => wrong.push(format!("{number}: there is no {test}")),
                Some(_) if test.starts_with(VM_CASES) => {}
                Some(_) if named.get(&number).is_some_and(|named| named.contains(&test.as_str())) => {}
                Some(_) => wrong.push(format!("{number}: {test} does not name it")),
            }
        }
        match (cell.strip_prefix(NO_TEST), named.get(&number)) {
            (Some(_), Some(named)) => wrong.push(format!("{number}: there is a test: {}", named[0])),
            (Some(reason), None) if reason.len() < 10 => wrong.push(format!("{number}: no reason")),
            (None, None) if tests.is_empty() => wrong.push(format!("{number}: neither a test nor a reason")),
            (None, Some(named)) if tests.is_empty() => wrong.push(format!("{number}: not in the table: {}", named[0])),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Each bug of QEMU's device that section 14.3 lists has a test that names it.
#[test]
fn every_qemu_bug_is_tested() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/interface.md");
    let text = fs::read_to_string(path).unwrap();
    let section = text.split("### 14.3").nth(1).unwrap().split("\n## ").next().unwrap();
    let (cves, defects) = section.split_once("Further defects").unwrap();
    let first_cell =
        |line: &str| line.strip_prefix("| ").map(|rest| rest.split(" |").next().unwrap_or(rest).to_owned());
    let mut bugs: Vec<String> = cves.lines().filter_map(first_cell).filter(|cell| cell.starts_with("CVE-")).collect();
    assert_eq!(bugs.len(), 11);
    let count = defects.lines().filter_map(first_cell).filter(|cell| cell != "Defect").count();
    assert_eq!(count, 7);
    bugs.extend((1..=count).map(|number| format!("defect {number}")));
    let comments: Vec<String> = functions().into_values().collect();
    for bug in bugs {
        let name = format!("QEMU {bug}:");
        assert!(comments.iter().any(|comment| comment.contains(&name)), "no test of {bug}");
    }
}

/// Comments in a form that this parser does not support are reported, not ignored.
#[test]
fn forms_of_comments() {
    assert_eq!(numbers(" Conformance 5, 6: text 7."), Ok([5, 6].into()));
    assert_eq!(numbers(" Text. Conformance 75."), Ok([75].into()));
    assert_eq!(numbers(" Conformance of the device."), Ok([].into()));
    for bad in [" Conformance 5 and 6.", " Conformance 76.", " Conformance 0:", " Conformance 5", " Conformance 5,6."] {
        assert!(numbers(bad).is_err(), "{bad}");
    }
}
