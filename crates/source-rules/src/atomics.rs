//! Requires that all atomics are listed, each with the reason why its use is correct.
//!
//! A field or static of the product that is an atomic, or contains atomics, is in the table of one document, in the row
//! of its file; and the table contains no others. The home folder of the settings, whose types have models, is exempt.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::visit::{self, Visit};

use crate::Problem;
use crate::tokens;
use crate::workspace::Workspace;

/// Names of atomics by file.
type Words = BTreeMap<String, BTreeSet<String>>;

/// Returns atomics that the table lacks and entries without an atomic. `document` is the text of the file that the
/// settings name.
#[must_use]
pub fn check(workspace: &Workspace, document: &str) -> Vec<Problem> {
    let rule = &workspace.config.atomics;
    let (found, listed) = (declared(workspace), listed(document));
    let missing = difference(&found, &listed).map(|(file, word)| {
        let message = format!(
            "`{word}`: threads share it without a lock; {} needs the reason why that is correct",
            rule.document
        );
        Problem { file: file.to_owned(), line: 1, message }
    });
    let stale = difference(&listed, &found).map(|(file, word)| {
        let message = format!("`{word}` of {file}: there is no such atomic");
        Problem { file: rule.document.to_owned(), line: 1, message }
    });
    missing.chain(stale).collect()
}

/// Iterates over the names that only the first map contains.
fn difference<'a>(these: &'a Words, those: &'a Words) -> impl Iterator<Item = (&'a str, &'a str)> {
    let is_among = |file: &str, word: &str| those.get(file).is_some_and(|words| words.contains(word));
    let all = these.iter().flat_map(|(file, words)| words.iter().map(|word| (file.as_str(), word.as_str())));
    all.filter(move |(file, word)| !is_among(file, word))
}

/// Returns the atomics of the product.
fn declared(workspace: &Workspace) -> Words {
    let mut all = Words::new();
    for (_, file) in workspace.product() {
        if file.path.starts_with(workspace.config.atomics.home) {
            continue;
        }
        let mut declarations = Declarations::default();
        declarations.visit_file(&file.product);
        if !declarations.words.is_empty() {
            all.insert(file.path.clone(), declarations.words);
        }
    }
    all
}

/// Parses the rows of the document's tables whose first cell is a file; returns the names in the second cell.
fn listed(document: &str) -> Words {
    let rows = document.lines().filter_map(|line| {
        let mut cells = line.strip_prefix('|')?.split('|');
        let [file] = quoted(cells.next()?)[..] else { return None };
        Some((file, quoted(cells.next()?)))
    });
    let mut all = Words::new();
    for (file, words) in rows {
        all.entry(file.to_owned()).or_default().extend(words.into_iter().map(str::to_owned));
    }
    all
}

/// Returns the texts between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Returns `true` for the names of the standard library's atomics.
fn is_atomic(identifier: &str) -> bool {
    let Some(kind) = identifier.strip_prefix("Atomic") else { return false };
    let width = kind.strip_prefix(['U', 'I']);
    matches!(kind, "Bool" | "Ptr") || width.is_some_and(|width| matches!(width, "8" | "16" | "32" | "64" | "size"))
}

/// Collects the names of fields and statics.
#[derive(Default)]
struct Declarations {
    words: BTreeSet<String>,
    /// Type whose fields have no names.
    owner: String,
}

impl Declarations {
    fn add(&mut self, name: String, of: TokenStream) {
        let mut identifiers = HashSet::new();
        tokens::identifiers(&of, &mut identifiers);
        if identifiers.iter().any(|identifier| is_atomic(identifier)) {
            self.words.insert(name);
        }
    }
}

impl<'ast> Visit<'ast> for Declarations {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.owner = item.ident.to_string();
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.owner = item.ident.to_string();
        visit::visit_item_enum(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        let name = field.ident.as_ref().map_or_else(|| self.owner.clone(), ToString::to_string);
        self.add(name, field.ty.to_token_stream());
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.add(item.ident.to_string(), item.ty.to_token_stream());
    }
}
