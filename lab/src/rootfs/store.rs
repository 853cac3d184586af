//! Content of files, stored under numbers until the tree is complete. No name of an archive reaches this machine before
//! the whole archive is accepted.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rustix::fs::{CWD, FileType, Mode};

use super::tree::{Content, FileId, Node, Tree};

/// A folder with contents.
#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    next: u64,
}

impl Store {
    /// Creates an empty store in a new folder.
    pub(super) fn new(folder: PathBuf) -> Result<Self> {
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self { folder, next: 0 })
    }

    /// Creates a file for the next content.
    pub(super) fn create(&mut self) -> io::Result<(FileId, File)> {
        let id = FileId(self.next);
        self.next = self.next.saturating_add(1);
        Ok((id, File::create_new(self.path(id))?))
    }

    fn path(&self, id: FileId) -> PathBuf {
        self.folder.join(id.0.to_string())
    }

    /// Creates the tree in a new folder, and removes the store. Owners, and the permissions of others, are set later in
    /// the file system.
    ///
    /// # Errors
    /// This machine cannot store it.
    pub(super) fn build(self, tree: &Tree, root: &Path) -> Result<()> {
        let mut placed = std::collections::HashMap::new();
        // Symbolic links come last: while there are none, no path can lead out of the folder.
        for (path, node) in tree.iter() {
            let at = root.join(path.as_path());
            let made = match node.content {
                Content::Folder => fs::create_dir(&at),
                Content::File(id) => match placed.get(&id) {
                    Some(first) => fs::hard_link(first, &at),
                    None => {
                        placed.insert(id, at.clone());
                        place(&self.path(id), &at, node)
                    }
                },
                Content::Pipe => {
                    rustix::fs::mknodat(CWD, &at, FileType::Fifo, Mode::from_raw_mode(0o600), 0).map_err(Into::into)
                }
                Content::Symlink(_) => Ok(()),
            };
            made.with_context(|| format!("cannot create {}", at.display()))?;
        }
        for (path, node) in tree.iter() {
            if let Content::Symlink(target) = &node.content {
                let at = root.join(path.as_path());
                let made = std::os::unix::fs::symlink(target.as_path(), &at);
                made.with_context(|| format!("cannot create the link {}", at.display()))?;
            }
        }
        fs::remove_dir_all(&self.folder).with_context(|| format!("cannot remove {}", self.folder.display()))
    }
}

/// Moves a content to its place, and sets its time.
fn place(content: &Path, at: &Path, node: &Node) -> io::Result<()> {
    // A time that the file system cannot store stays as it is.
    if let Some(time) = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(node.meta.modified)) {
        let _ = File::options().write(true).open(content)?.set_modified(time);
    }
    fs::set_permissions(content, Permissions::from_mode(staged_mode(node).into()))?;
    fs::rename(content, at)
}

/// Permissions of a file until they are set in the file system: readable by the user of this program, and never those
/// of another user's program.
pub(super) const fn staged_mode(node: &Node) -> u16 {
    node.meta.mode & 0o777 | 0o600
}
