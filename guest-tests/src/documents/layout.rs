//! Checks the layout: prose fits in 100 columns, and headings descend by one level at a time.

use super::markdown::Document;

/// Maximum number of columns of prose. Tables, pictures and code may be wider.
const COLUMNS: usize = 100;

/// Returns the problems of a document.
pub(super) fn check(document: &Document) -> Vec<String> {
    let mut problems = Vec::new();
    let mut level = 0;
    for (line, text) in document.prose() {
        let mut report = |problem: &str| problems.push(format!("{}:{line}: {problem}", document.path.display()));
        let is_wide = !text.starts_with(['|', '<', '[', '!']) && text.trim().contains(' ');
        if is_wide && text.chars().count() > COLUMNS {
            report(&format!("prose beyond column {COLUMNS}"));
        }
        let marks = text.len() - text.trim_start_matches('#').len();
        if marks > 0 && text[marks..].starts_with(' ') {
            if marks > level + 1 {
                report(&format!("a heading of level {marks} below one of level {level}"));
            }
            level = marks;
        }
    }
    problems
}
