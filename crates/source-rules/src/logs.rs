//! Keeps guests, peers and clients from filling the log.
//!
//! Product files log errors, warnings and information through the one file that limits the rate and reports the number
//! of suppressed lines. A direct call of a macro of `log` needs a comment directly above with `Log:` and the reason why
//! the line cannot come often. `debug!` and `trace!` are exempt: they are off until an operator enables them.

use crate::Problem;
use crate::imports::{self, Usage};
use crate::modules::{Modules, Target};
use crate::workspace::{Part, SourceFile, Workspace};

/// Marker before the reason for a line without a limit.
pub const MARKER: &str = "Log:";

/// Returns the lines that are logged without a limit and without a reason.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let rule = &workspace.config.logs;
    let modules = Modules::of(workspace);
    let mut problems = Vec::new();
    for reference in imports::references(workspace, &modules) {
        let file = &workspace.files[reference.file];
        let exempt = file.path == rule.home || rule.exceptions.iter().any(|(folder, _)| file.path.starts_with(folder));
        if file.part != Part::Product || exempt || reference.usage != Usage::MacroCall {
            continue;
        }
        let Some(name) = reference.targets.iter().find_map(|target| forbidden(rule.forbidden, target)) else {
            continue;
        };
        if !says_why(file, reference.line) {
            let message =
                format!("`{name}!`: log by {}, or say why not (`// {MARKER} reason` above the line)", rule.home);
            problems.push(Problem { file: file.path.clone(), line: reference.line, message });
        }
    }
    problems.sort();
    problems.dedup();
    problems
}

/// Returns the full name of a target that is one of these macros.
fn forbidden(names: &[&str], target: &Target) -> Option<String> {
    let Target::External(path) = target else { return None };
    let name = path.join("::");
    names.contains(&name.as_str()).then_some(name)
}

/// Returns `true` if a comment directly above the line gives a reason.
fn says_why(file: &SourceFile, line: usize) -> bool {
    let lines: Vec<_> = file.text.lines().take(line.saturating_sub(1)).map(str::trim).collect();
    let above = lines.iter().rev().take_while(|line| line.starts_with("//"));
    let gives_reason = |line: &&str| line.split_once(MARKER).is_some_and(|(_, reason)| !reason.trim().is_empty());
    above.copied().any(|line| gives_reason(&line))
}
