//! Reasons to refuse an archive.

use std::io;

use thiserror::Error;

/// Longest part of a name that an error shows, in characters.
const SHOWN: usize = 200;

/// A refused archive: the entry, and the reason.
#[derive(Debug, Error)]
#[error("entry '{entry}': {reason}")]
pub(super) struct Refused {
    entry: String,
    reason: Reason,
}

impl Refused {
    /// Creates one for the entry with this name.
    pub(super) fn new(entry: &[u8], reason: Reason) -> Self {
        let entry = String::from_utf8_lossy(entry).chars().flat_map(char::escape_debug).take(SHOWN).collect();
        Self { entry, reason }
    }
}

/// Reason to refuse an entry.
#[derive(Debug, Error)]
pub(super) enum Reason {
    /// The path starts at the root.
    #[error("its path is absolute")]
    Absolute,
    /// The path has a parent component.
    #[error("its path contains '..'")]
    Parent,
    /// The path cannot be the name of a file here.
    #[error("its path {0}")]
    Path(&'static str),
    /// The target of a symbolic link cannot be one.
    #[error("its target is empty, too long, or contains a zero byte")]
    Target,
    /// A link leads out of the tree.
    #[error("the link leaves the tree")]
    LinkLeaves,
    /// A hard link to no file.
    #[error("it is a hard link to '{0}', which is no file of the tree")]
    NoFile(String),
    /// Symbolic links in its path lead to themselves.
    #[error("its path leads through cyclic symbolic links")]
    Cyclic,
    /// Its parent is a file.
    #[error("its path leads through something that is no folder")]
    NoFolder,
    /// A device node.
    #[error("it is a device node")]
    Device,
    /// A file with holes.
    #[error("it is a sparse file: a few bytes can stand for any size")]
    Sparse,
    /// A kind that no layer has.
    #[error("its kind '{0}' is not supported")]
    Kind(char),
    /// A folder or a link with data.
    #[error("it has content, but is no file")]
    Content,
    /// The same path twice in a layer, or in the archive around the layers.
    #[error("the archive contains it twice")]
    Duplicate,
    /// Too much content.
    #[error("with it, the archive unpacks to more than {0} bytes")]
    TooLarge(u64),
    /// Too many entries.
    #[error("with it, the archive has more than {0} entries")]
    TooMany(u64),
    /// Names that fill the memory.
    #[error("with it, the names of the archive have more than {0} bytes")]
    NamesTooLarge(u64),
    /// A header with a wrong checksum or an invalid number.
    #[error("{0}")]
    Header(&'static str),
    /// The archive ends too early.
    #[error("the archive is truncated in it or after it")]
    Truncated,
    /// Bytes after the end.
    #[error("the archive has content after its end")]
    Trailing,
    /// The caller wants to stop.
    #[error("interrupted")]
    Interrupted,
    /// A failure of this machine, or of the decompressor.
    #[error("cannot be read: {0}")]
    Read(io::Error),
    /// A failure of this machine.
    #[error("cannot be stored: {0}")]
    Write(io::Error),
}

impl From<io::Error> for Reason {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { Self::Truncated } else { Self::Read(error) }
    }
}
