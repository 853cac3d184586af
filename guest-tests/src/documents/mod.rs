//! What the documents say must hold: command lines parse, configuration loads, links lead somewhere, and the table of
//! what works is the one that the cases make.
//!
//! Fenced blocks of `sh`, `bash` and `toml` are checked, and the scripts of workflows in `yaml`. Any other info string,
//! as `text`, leaves a block out.

mod commands;
mod folders;
mod links;
mod markdown;
mod shell;
mod sources;
mod tests;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use markdown::Document;

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the repository").to_owned()
}

/// All Markdown files below a directory, without what is built or hidden.
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

/// What is wrong in all documents of a directory.
fn problems(directory: &Path) -> Result<Vec<String>> {
    let documents = documents(directory)?;
    let sources = sources::sources(directory);
    let mut problems = Vec::new();
    for document in &documents {
        problems.extend(commands::check(document)?);
        problems.extend(folders::check(document));
        problems.extend(links::check(document));
        problems.extend(sources::check(document, &sources));
    }
    Ok(problems)
}
