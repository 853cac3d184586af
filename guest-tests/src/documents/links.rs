//! Checks that relative links lead to files that exist, and to headings in them.

use super::markdown::Document;

/// Returns the problems of a document.
pub(super) fn check(document: &Document) -> Vec<String> {
    let place = document.path.display();
    document
        .links()
        .into_iter()
        .filter_map(|(line, target)| wrong(document, &target).map(|why| format!("{place}:{line}: {target}: {why}")))
        .collect()
}

fn wrong(document: &Document, target: &str) -> Option<&'static str> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let path = if file.is_empty() { document.path.clone() } else { document.path.parent()?.join(file) };
    if !path.exists() {
        return Some("there is no such file");
    }
    let anchor = anchor?;
    if path.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    match Document::read(&path) {
        Ok(other) if other.anchors().iter().any(|known| known == anchor) => None,
        _ => Some("there is no such heading"),
    }
}
