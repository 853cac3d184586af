//! Checks that no example uses a world-writable folder, where another user could listen in place of the daemon.

use super::markdown::Document;

/// World-writable folders.
const SHARED: [&str; 3] = ["/tmp/", "/var/tmp/", "/dev/shm/"];

/// Returns the problems of a document.
pub(super) fn check(document: &Document) -> Vec<String> {
    let blocks = document.blocks();
    let lines = blocks.iter().flat_map(|block| (block.line + 1..).zip(block.text.lines()));
    lines
        .filter_map(|(line, text)| {
            let folder = SHARED.iter().find(|folder| text.contains(**folder))?;
            let place = document.path.display();
            Some(format!("{place}:{line}: every user can write to {folder}: take /run/pvrdmad or $XDG_RUNTIME_DIR"))
        })
        .collect()
}
