//! Enforces that the modules of a crate import downwards only.
//!
//! [`Config::module_layers`](crate::config::Config::module_layers) lists the layers of a crate's top-level modules from
//! the bottom to the top. A product file imports from its own layer and from lower layers, except from those that its
//! layer is kept apart from. Unlike in [`crate::circles`], a re-export is an import in every file, because a `mod.rs`
//! could otherwise pass on an item of a higher layer, and so is a module that is imported as a whole. Calls of methods
//! are left out, as in [`crate::imports`]. An inherent `impl` therefore stays in the layer of its type: a file of that
//! layer could otherwise call a method of a higher one.

use std::collections::BTreeSet;

use crate::Problem;
use crate::config::ModuleLayer;
use crate::imports::{self, Usage};
use crate::modules::{Modules, Target};
use crate::workspace::{Part, Workspace};

/// Returns modules that are in no layer or in several, imports that do not go down, inherent `impl`s of another layer's
/// types, and names that match no module or no lower layer.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = check_names(workspace);
    let rule = &workspace.config.module_layers;
    let layer_of = |file: usize| {
        let module = module(&workspace.files[file].path, rule.folder)?;
        rule.layers.iter().position(|layer| layer.modules.contains(&module))
    };
    let modules = Modules::of(workspace);
    for reference in imports::references(workspace, &modules) {
        let Some(from) = layer_of(reference.file) else { continue };
        let own = &rule.layers[from];
        for target in &reference.targets {
            let file = match target {
                Target::Module(module) => modules.file(*module),
                Target::Item(item) => item.file,
                Target::External(_) => continue,
            };
            let Some(to) = layer_of(file) else { continue };
            let other = &rule.layers[to];
            let problem = if to > from {
                "is above"
            } else if own.apart_from.contains(&other.name) {
                "is kept apart from"
            } else if to < from && reference.usage == Usage::Impl {
                "defines the type of this inherent `impl` in"
            } else {
                continue;
            };
            let message = format!("`{}`: the layer `{}` {problem} `{}`", reference.name, other.name, own.name);
            let path = workspace.files[reference.file].path.clone();
            problems.push(Problem { file: path, line: reference.line, message });
        }
    }
    problems.sort();
    problems.dedup();
    problems
}

/// Checks that the table names each module of the folder once, and nothing else.
fn check_names(workspace: &Workspace) -> Vec<Problem> {
    let rule = &workspace.config.module_layers;
    let found: BTreeSet<_> = workspace
        .files
        .iter()
        .filter(|file| file.part == Part::Product)
        .filter_map(|file| module(&file.path, rule.folder))
        .collect();
    let all = || rule.layers.iter().flat_map(|layer| layer.modules);
    let mut problems = Vec::new();
    let mut problem = |message| problems.push(Problem { file: rule.folder.to_owned(), line: 1, message });
    for name in &found {
        let times = all().filter(|module| *module == name).count();
        if times != 1 {
            problem(format!("the module `{name}` is in the list of layers {times} times, not once"));
        }
    }
    for name in all().filter(|name| !found.contains(*name)) {
        problem(format!("`{name}` of the list of layers is no module"));
    }
    for (index, ModuleLayer { name, apart_from, .. }) in rule.layers.iter().enumerate() {
        let is_lower = |other: &str| rule.layers.iter().take(index).any(|lower| lower.name == other);
        for other in apart_from.iter().filter(|other| !is_lower(other)) {
            problem(format!("`{other}`, from which `{name}` is kept apart, is no lower layer"));
        }
    }
    problems
}

/// Returns the top-level module of a file of this folder: the name of its folder there, or its own.
fn module<'a>(path: &'a str, folder: &str) -> Option<&'a str> {
    let inside = path.strip_prefix(folder)?;
    Some(inside.split_once('/').map_or_else(|| inside.trim_end_matches(".rs"), |(module, _)| module))
}
