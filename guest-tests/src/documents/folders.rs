//! No example names a folder in which everybody can write: who is there first listens in the place of the daemon.

use super::markdown::Document;

/// Folders of this kind.
const SHARED: [&str; 3] = ["/tmp/", "/var/tmp/", "/dev/shm/"];

/// What is wrong.
pub(super) fn check(document: &Document) -> Vec<String> {
    let blocks = document.blocks();
    let lines = blocks.iter().flat_map(|block| (block.line + 1..).zip(block.text.lines()));
    lines
        .filter_map(|(line, text)| {
            let folder = SHARED.iter().find(|folder| text.contains(**folder))?;
            let place = document.path.display();
            Some(format!("{place}:{line}: everybody can write to {folder}: take /run/pvrdmad or $XDG_RUNTIME_DIR"))
        })
        .collect()
}
