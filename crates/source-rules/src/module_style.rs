//! Enforces one style of modules and one place for their tests.
//!
//! A module with children is `name/mod.rs`, not `name.rs` beside `name/`. `#[path]` is not allowed. Longer unit tests
//! are in `tests.rs` in the folder of their module, not in `name_tests.rs`.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::Problem;
use crate::workspace::{Workspace, path_attribute};

/// Returns the files and module declarations in another style.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut folders = BTreeSet::new();
    for file in &workspace.files {
        let mut path = file.path.as_str();
        while let Some((folder, _)) = path.rsplit_once('/') {
            folders.insert(folder);
            path = folder;
        }
    }
    let mut problems = Vec::new();
    for file in &workspace.files {
        let mut report = |line, message: String| problems.push(Problem { file: file.path.clone(), line, message });
        let stem = file.path.strip_suffix(".rs").unwrap_or(&file.path);
        if folders.contains(stem) {
            report(1, format!("stands beside the folder {stem}/: make it {stem}/mod.rs"));
        }
        if stem.ends_with("_tests") {
            report(1, "make it tests.rs in the folder of its module".to_owned());
        }
        let mut lines = PathAttributes::default();
        lines.visit_file(&file.whole);
        for line in lines.0 {
            report(line, "`#[path]`: put the file where its module is looked for".to_owned());
        }
    }
    problems
}

/// Collects the lines of modules with `#[path]`.
#[derive(Default)]
struct PathAttributes(Vec<usize>);

impl<'ast> Visit<'ast> for PathAttributes {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if path_attribute(&item.attrs).is_some() {
            self.0.push(item.span().start().line);
        }
        visit::visit_item_mod(self, item);
    }
}
