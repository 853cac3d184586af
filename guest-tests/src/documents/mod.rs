//! Checks of the documents: command lines parse, configuration loads, links lead to existing targets, prose is wrapped,
//! and the table of supported features is the one that the cases generate.
//!
//! Fenced blocks of `sh`, `bash` and `toml` are checked, and the scripts of workflows in `yaml`. Any other info string,
//! such as `text`, excludes a block.

mod commands;
mod folders;
mod layout;
mod links;
mod markdown;
mod shell;
mod sources;
mod tests;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use markdown::Document;

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the repository").to_owned()
}

/// Returns all Markdown files below a directory, except build output and hidden files.
fn documents(directory: &Path) -> Result<Vec<Document>> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(documents(&path)?);
        } else if name.ends_with(".md") {
            found.push(Document::read(&path)?);
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Returns the problems of all documents of a directory.
fn problems(directory: &Path) -> Result<Vec<String>> {
    let documents = documents(directory)?;
    let sources = sources::sources(directory);
    let mut problems = Vec::new();
    for document in &documents {
        problems.extend(commands::check(document)?);
        problems.extend(folders::check(document));
        problems.extend(layout::check(document));
        problems.extend(links::check(document));
        problems.extend(sources::check(document, &sources));
    }
    Ok(problems)
}
