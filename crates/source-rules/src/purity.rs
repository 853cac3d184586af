//! Keeps input, output and clocks out of the protocol crates.
//!
//! Their product files name nothing on the list of [`PureCrates::forbidden`], however the name is reached: `use`,
//! renames, globs, full paths, type aliases, re-exports of other crates of the workspace, macro bodies. They call no
//! method that reads a clock (`elapsed`) and no macro that prints. Their dependencies are on a list of crates known to
//! be equally pure. The same holds for items of other crates of the workspace that they reach through re-exports. A
//! `Duration`, an `Instant` that is passed in, and addresses as values are allowed.

use crate::Problem;
use crate::config::PureCrates;
use crate::dependencies::{self, Section};
use crate::imports::{self, Reference, Usage};
use crate::modules::{Modules, Target};
use crate::workspace::{Part, Workspace};

/// Returns forbidden names and dependencies of the pure crates, and unused exceptions.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let pure = &workspace.config.pure;
    let position = |folder: &&str| workspace.packages.iter().position(|package| package.folder == *folder);
    let packages: Vec<usize> = pure.folders.iter().filter_map(position).collect();
    if packages.is_empty() {
        return Vec::new();
    }
    let modules = Modules::of(workspace);
    let mut problems = Vec::new();
    let mut used = vec![false; pure.exceptions.len()];
    for reference in imports::references(workspace, &modules) {
        let file = &workspace.files[reference.file];
        if !packages.contains(&file.package) || file.part != Part::Product {
            continue;
        }
        let Some(name) = forbidden(pure, &reference).or_else(|| foreign(workspace, file.package, &reference)) else {
            continue;
        };
        let is_listed = |(exception, _): &(&crate::config::PurityException, &mut bool)| {
            exception.file == file.path && exception.name == name
        };
        if let Some((_, used)) = pure.exceptions.iter().zip(&mut used).find(is_listed) {
            *used = true;
            continue;
        }
        let written = if reference.name == name { String::new() } else { format!(" (as `{}`)", reference.name) };
        let folder = &workspace.packages[file.package].folder;
        let message = format!("`{name}`{written} in {folder}, which knows no input, output or clock");
        problems.push(Problem { file: file.path.clone(), line: reference.line, message });
    }
    for (exception, _) in pure.exceptions.iter().zip(used).filter(|(_, used)| !used) {
        let message = format!("the exception for `{}` is not needed: take it out of the table", exception.name);
        problems.push(Problem { file: exception.file.to_owned(), line: 1, message });
    }
    problems.extend(packages.iter().flat_map(|&package| check_dependencies(workspace, package)));
    problems.sort();
    problems.dedup();
    problems
}

fn check_dependencies(workspace: &Workspace, package: usize) -> Vec<Problem> {
    let package = &workspace.packages[package];
    let pure = &workspace.config.pure;
    dependencies::declared(&package.manifest)
        .into_iter()
        .filter(|dependency| {
            dependency.section != Section::Dev && !pure.dependencies.contains(&dependency.name.as_str())
        })
        .map(|dependency| Problem {
            file: package.manifest_path(),
            line: 1,
            message: format!(
                "`{}` is not on the list of dependencies that do no input or output and read no clock; if it is one of \
                 them, add it to the list",
                dependency.name
            ),
        })
        .collect()
}

/// Returns the full name of the referenced item if it is forbidden.
fn forbidden(pure: &PureCrates, reference: &Reference) -> Option<String> {
    match reference.usage {
        Usage::Method => pure.forbidden_methods.contains(&reference.name.as_str()).then(|| reference.name.clone()),
        Usage::MacroCall if pure.forbidden_macros.contains(&last(&reference.name)) => Some(reference.name.clone()),
        _ => reference.targets.iter().find_map(|target| match target {
            Target::External(path) => forbidden_path(pure, path),
            Target::Module(_) | Target::Item(_) => None,
        }),
    }
}

/// Returns the name of an item of another crate of the workspace that is not a dependency: the item is reached through
/// a re-export.
fn foreign(workspace: &Workspace, package: usize, reference: &Reference) -> Option<String> {
    reference.targets.iter().find_map(|target| {
        let Target::Item(item) = target else { return None };
        let owner = workspace.files[item.file].package;
        let name = workspace.packages[owner].name.as_str();
        let allowed = owner == package || workspace.config.pure.dependencies.contains(&name);
        (!allowed).then(|| format!("{}::{}", name.replace('-', "_"), item.name))
    })
}

fn last(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

/// Returns the path, with the name of the standard library as prefix, if it is at or below a forbidden one.
fn forbidden_path(pure: &PureCrates, path: &[String]) -> Option<String> {
    let mut path = path.to_vec();
    if let Some(first) = path.first_mut().filter(|first| matches!(first.as_str(), "core" | "alloc")) {
        "std".clone_into(first);
    }
    let name = path.join("::");
    let below = |root: &&&str| name.strip_prefix(**root).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
    pure.forbidden.iter().find(below).map(|_| name.clone())
}
