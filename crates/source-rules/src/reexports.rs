//! Forbids re-exports of other crates of the workspace.
//!
//! An import names the crate that owns an item, so that a manifest lists all crates that its package uses.

use std::collections::HashSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{ItemUse, UseTree, Visibility};

use crate::Problem;
use crate::workspace::{Part, Workspace};

/// Returns the public imports of items of another member, in all files except tests.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let members = workspace.packages.iter().filter(|package| package.member);
    let libraries: HashSet<String> = members.map(crate::workspace::Package::library).collect();
    let mut problems = Vec::new();
    for file in workspace.files.iter().filter(|file| file.part != Part::Test) {
        let mut found = Reexports { libraries: &libraries, lines: Vec::new() };
        found.visit_file(&file.whole);
        problems.extend(found.lines.into_iter().map(|(line, owner)| Problem {
            file: file.path.clone(),
            line,
            message: format!("re-export of `{owner}`: import the item from there where it is used"),
        }));
    }
    problems
}

/// Collects public imports of these libraries, by line.
struct Reexports<'a> {
    libraries: &'a HashSet<String>,
    lines: Vec<(usize, String)>,
}

impl<'ast> Visit<'ast> for Reexports<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let root = match &item.tree {
            UseTree::Path(path) => Some(&path.ident),
            UseTree::Name(name) => Some(&name.ident),
            UseTree::Rename(rename) => Some(&rename.ident),
            UseTree::Glob(_) | UseTree::Group(_) => None,
        };
        let owner = root.map(ToString::to_string).filter(|root| self.libraries.contains(root));
        if let (Visibility::Public(_), Some(owner)) = (&item.vis, owner) {
            self.lines.push((item.span().start().line, owner));
        }
        visit::visit_item_use(self, item);
    }
}
