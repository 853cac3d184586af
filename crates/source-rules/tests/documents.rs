//! Fenced commands of the pages in `docs/` run in a test, or say why not.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};

/// Start of the reason in the info string of a block that no test runs.
const NO_RUN: &str = "norun: ";

/// Fewest words of a reason.
const WORDS: usize = 2;

/// Findings of the rule in a page.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Blocks that no test runs: line of the fence, and reason.
    not_run: Vec<(usize, String)>,
    /// Markers of blocks that tests run.
    run: Vec<String>,
    /// Problems: line of the fence, and description.
    problems: Vec<(usize, &'static str)>,
}

/// Returns the text between the signs of a comment in Markdown.
fn marker(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- ")?.strip_suffix(" -->")
}

fn judge(text: &str) -> Found {
    let mut found = Found::default();
    let (mut is_open, mut before) = (false, "");
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if let Some(info) = line.strip_prefix("```") {
            let (language, rest) = info.split_once(' ').unwrap_or((info, ""));
            if !is_open && matches!(language, "sh" | "bash" | "console") {
                match (rest.strip_prefix(NO_RUN), marker(before)) {
                    (Some(_), Some(_)) => found.problems.push((number, "a test runs it, and it has norun")),
                    (Some(reason), None) if reason.split(' ').count() >= WORDS => {
                        found.not_run.push((number, reason.to_owned()));
                    }
                    (Some(_), None) => found.problems.push((number, "norun without a reason")),
                    (None, Some(name)) => found.run.push(name.to_owned()),
                    (None, None) => found.problems.push((number, "neither a marker of a test nor norun with a reason")),
                }
            }
            is_open = !is_open;
        }
        before = line;
    }
    found
}

/// Returns the files below a folder that have this extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|this| this == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Lists the commands that no test runs, with the reasons, and checks that tests name the markers of the others.
#[test]
fn each_command_runs_in_a_test_or_has_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tests = ["guest-tests/src", "lab/src"].into_iter().flat_map(|folder| files(&root.join(folder), "rs"));
    let tests: String = tests.map(|path| fs::read_to_string(path).unwrap()).collect();
    let (mut problems, mut listed) = (Vec::new(), 0);
    for path in files(&root.join("docs"), "md") {
        let page = path.strip_prefix(&root).unwrap().display();
        let found = judge(&fs::read_to_string(&path).unwrap());
        for (line, reason) in found.not_run {
            println!("{page}:{line}: {reason}");
            listed += 1;
        }
        problems.extend(found.problems.into_iter().map(|(line, problem)| format!("{page}:{line}: {problem}")));
        let unknown = found.run.into_iter().filter(|name| !tests.contains(&format!("\"{name}\"")));
        problems.extend(unknown.map(|name| format!("{page}: no test runs the block '{name}'")));
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert!(listed > 0, "the list is empty: are the pages still there?");
}

#[test]
fn blocks_are_distinguished() {
    let found = judge(
        "```sh norun: needs root\na\n```\n<!-- recipe -->\n```bash\nb\n```\n```text\n```\n  ```sh\nc\n  ```\n\
         ```bash norun:\nd\n```\n```sh norun: no\ne\n```\n<!-- recipe -->\n```sh norun: needs root\nf\n```\n",
    );
    assert_eq!(found.not_run, [(1, "needs root".to_owned())]);
    assert_eq!(found.run, ["recipe"]);
    let lines: Vec<_> = found.problems.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, [10, 13, 16, 20]);
}
