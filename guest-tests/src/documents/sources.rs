//! Checks that source files in a document's inline code exist: `path/to/file.rs`, or its end.

use std::path::{Path, PathBuf};

use super::markdown::Document;

/// Returns the problems of a document. `sources` are all source files of the repository.
pub(super) fn check(document: &Document, sources: &[PathBuf]) -> Vec<String> {
    let place = document.path.display();
    let exists = |name: &str| sources.iter().any(|source| source.ends_with(Path::new(name)));
    let mut wrong = Vec::new();
    for (line, text) in document.prose() {
        for code in text.split('`').skip(1).step_by(2) {
            let is_file = code.ends_with(".rs") && !code.contains([' ', '*', '{', '<']);
            if is_file && !exists(code) {
                wrong.push(format!("{place}:{line}: {code}: there is no such source file"));
            }
        }
    }
    wrong
}

/// Returns all files with this extension below a directory, except build output and hidden files.
pub(super) fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(sources(&path));
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
    found
}
