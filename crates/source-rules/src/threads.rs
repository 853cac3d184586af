//! Requires that all threads of the product start in one place, which confines each of them before it runs other code.
//!
//! No other product file may name a function that starts a thread, however the name is reached. An exception is a file
//! or a folder, and must be needed.

use crate::Problem;
use crate::imports;
use crate::modules::{Modules, Target};
use crate::workspace::{Part, Workspace};

/// Returns the places that start threads by themselves, and unused exceptions.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let rule = &workspace.config.threads;
    let modules = Modules::of(workspace);
    let mut used = vec![false; rule.exceptions.len()];
    let mut problems = Vec::new();
    for reference in imports::references(workspace, &modules) {
        let file = &workspace.files[reference.file];
        if file.part != Part::Product || file.path == rule.home {
            continue;
        }
        let Some(name) = reference.targets.iter().find_map(|target| forbidden(rule.forbidden, target)) else {
            continue;
        };
        let covers = |place: &str| file.path == place || place.ends_with('/') && file.path.starts_with(place);
        if let Some(index) = rule.exceptions.iter().position(|(place, _)| covers(place)) {
            used[index] = true;
            continue;
        }
        let message = format!("`{name}`: threads start by `spawn` of {}, which confines them", rule.home);
        problems.push(Problem { file: file.path.clone(), line: reference.line, message });
    }
    for ((place, _), _) in rule.exceptions.iter().zip(used).filter(|(_, used)| !used) {
        let message = "the exception for threads is not needed: take it out of the table".to_owned();
        problems.push(Problem { file: (*place).to_owned(), line: 1, message });
    }
    problems.sort();
    problems.dedup();
    problems
}

/// Returns the full name of a target at or below one of these paths.
fn forbidden(roots: &[&str], target: &Target) -> Option<String> {
    let Target::External(path) = target else { return None };
    let name = path.join("::");
    let below = |root: &&str| name.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
    roots.iter().any(below).then_some(name)
}
