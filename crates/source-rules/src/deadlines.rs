//! Requires that the supervisor waits for no process, thread or message without a deadline.
//!
//! Its product files call no method that may wait forever: `child.wait()`, `thread.join()`, `receiver.recv()`,
//! `condvar.wait(&mut guard)`. Methods of the same name that take a timeout are allowed. An exception is a file and a
//! method, and must be needed.

use crate::Problem;
use crate::imports::{self, Usage};
use crate::modules::Modules;
use crate::workspace::{Part, Workspace};

/// Returns calls that may wait forever, and unused exceptions.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let rule = &workspace.config.deadlines;
    let modules = Modules::of(workspace);
    let mut used = vec![false; rule.exceptions.len()];
    let mut problems = Vec::new();
    for reference in imports::references(workspace, &modules) {
        let file = &workspace.files[reference.file];
        let name = reference.name.as_str();
        let checked = file.part == Part::Product && file.path.starts_with(rule.folder);
        if !checked || reference.usage != Usage::Method || !rule.methods.contains(&name) {
            continue;
        }
        let line = file.text.lines().nth(reference.line.saturating_sub(1)).unwrap_or_default();
        if ![format!("{name}()"), format!("{name}(&mut ")].iter().any(|call| line.contains(call.as_str())) {
            continue;
        }
        let is_listed = |(path, method, _): &(&str, &str, &str)| *path == file.path && *method == name;
        if let Some(index) = rule.exceptions.iter().position(is_listed) {
            used[index] = true;
            continue;
        }
        let message = format!("`{name}` waits forever: give it a deadline, or list it with the reason why it ends");
        problems.push(Problem { file: file.path.clone(), line: reference.line, message });
    }
    for ((path, method, _), _) in rule.exceptions.iter().zip(used).filter(|(_, used)| !used) {
        let message = format!("the exception for `{method}` is not needed: take it out of the table");
        problems.push(Problem { file: (*path).to_owned(), line: 1, message });
    }
    problems.sort();
    problems.dedup();
    problems
}
