//! Limits the size of product files and functions, unless a reason is given.
//!
//! The lines of a file are counted without its tests, those of a function from `fn` to its closing brace. A longer one
//! needs a comment with `Long:` and the reason: for a function directly above it or in its documentation, for a file
//! before its first item.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Signature};

use crate::Problem;
use crate::workspace::{SourceFile, Workspace};

/// Marker before the reason of a long file or function.
pub const MARKER: &str = "Long:";

/// Returns the files and functions that are too long.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (_, file) in workspace.product() {
        let lines = (1..=file.text.lines().count()).filter(|line| file.is_product_line(*line)).count();
        let limit = workspace.config.file_lines;
        if lines > limit && !file_says_why(file) {
            let message =
                format!("{lines} lines, more than {limit}; split it or say why (`// {MARKER} reason` at the top)");
            problems.push(Problem { file: file.path.clone(), line: 1, message });
        }
        let limit = workspace.config.function_lines;
        let lines: Vec<_> = file.text.lines().collect();
        Functions { file, lines, limit, problems: &mut problems }.visit_file(&file.product);
    }
    problems
}

/// Returns `true` if a comment before the first item gives a reason.
fn file_says_why(file: &SourceFile) -> bool {
    let is_head = |line: &&str| line.is_empty() || line.starts_with("//") || line.starts_with("#!");
    file.text.lines().map(str::trim).take_while(is_head).any(gives_reason)
}

/// Returns `true` for a comment line that has the marker followed by text.
fn gives_reason(line: &str) -> bool {
    line.starts_with("//") && line.split_once(MARKER).is_some_and(|(_, reason)| !reason.trim().is_empty())
}

struct Functions<'a> {
    file: &'a SourceFile,
    lines: Vec<&'a str>,
    limit: usize,
    problems: &'a mut Vec<Problem>,
}

impl Functions<'_> {
    fn measure(&mut self, attributes: &[Attribute], signature: &Signature, block: &Block) {
        let start = signature.fn_token.span.start().line;
        let end = block.brace_token.span.close().end().line;
        let length = end + 1 - start;
        if length > self.limit && !self.says_why(attributes, start) {
            let message = format!(
                "`{}` has {length} lines, more than {}; split it or say why (`// {MARKER} reason` above it)",
                signature.ident, self.limit
            );
            self.problems.push(Problem { file: self.file.path.clone(), line: start, message });
        }
    }

    /// Returns `true` if a comment above the function, or between its attributes, gives a reason.
    fn says_why(&self, attributes: &[Attribute], start: usize) -> bool {
        let first = attributes.iter().map(|attribute| attribute.span().start().line).min().unwrap_or(start).min(start);
        let (above, rest) = self.lines.split_at((first - 1).min(self.lines.len()));
        let between = rest.iter().take(start - first);
        let above = above.iter().rev().take_while(|line| line.trim_start().starts_with("//"));
        above.chain(between).any(|line| gives_reason(line.trim()))
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.attrs, &item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.attrs, &item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.attrs, &item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}
