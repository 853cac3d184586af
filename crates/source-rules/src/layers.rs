//! Enforces that crates depend downwards only.
//!
//! [`Config::layers`](crate::config::Config::layers) lists the layers from the bottom to the top. A member of the
//! workspace may depend only on members of lower layers, so two crates of one layer cannot depend on each other.
//! Dependencies of tests do not count.

use crate::Problem;
use crate::dependencies::{Section, declared};
use crate::workspace::Workspace;

/// Returns members that are in no layer or in several, dependencies that do not go down, and names that match no
/// member.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let layers = workspace.config.layers;
    let layer_of = |name: &str| layers.iter().position(|layer| layer.contains(&name));
    let mut problems = Vec::new();
    for package in workspace.packages.iter().filter(|package| package.member) {
        let mut problem = |message| problems.push(Problem { file: package.manifest_path(), line: 1, message });
        let times = layers.iter().flat_map(|layer| layer.iter()).filter(|name| **name == package.name).count();
        if times != 1 {
            problem(format!("`{}` is in the list of layers {times} times, not once", package.name));
        }
        let Some(own) = layer_of(&package.name) else { continue };
        for dependency in declared(&package.manifest).iter().filter(|dependency| dependency.section != Section::Dev) {
            if layer_of(&dependency.name).is_some_and(|layer| layer >= own) {
                problem(format!("`{}` is not on a lower layer than `{}`", dependency.name, package.name));
            }
        }
    }
    let is_member = |name: &str| workspace.packages.iter().any(|package| package.member && package.name == name);
    for name in layers.iter().flat_map(|layer| layer.iter()).filter(|name| !is_member(name)) {
        let message = format!("`{name}` of the list of layers is no member");
        problems.push(Problem { file: "Cargo.toml".to_owned(), line: 1, message });
    }
    problems
}
