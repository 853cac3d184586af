//! Entries of a tar archive, read from front to back.

use std::io::{Read, Write};

use super::budget::Budget;
use super::header::{BLOCK, Extended, Header, Meta};
use super::path::TreePath;
use super::refusal::{Reason, Refused};

/// Longest extended header in bytes.
const LONGEST_HEADER: u64 = 1 << 20;

/// An entry. Its content follows in the reader.
#[derive(Debug)]
pub(super) struct Entry {
    pub path: TreePath,
    pub kind: Kind,
    pub meta: Meta,
}

/// Kinds of entries that a tree may have.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Folder,
    /// A file with this much content.
    File(u64),
    /// A symbolic link, with its target as written.
    Symlink(Vec<u8>),
    /// A hard link to another entry.
    Link(TreePath),
    Pipe,
}

/// Reads the entries of an archive.
#[derive(Debug)]
pub(super) struct TarReader<'a, R> {
    input: R,
    budget: &'a mut Budget,
    /// Number of bytes read.
    at: u64,
    /// Content of the current entry that is not read yet, and the padding after it.
    content: u64,
    padding: u64,
    /// Name of the current entry, for errors.
    current: Vec<u8>,
}

impl<'a, R: Read> TarReader<'a, R> {
    pub(super) fn new(input: R, budget: &'a mut Budget) -> Self {
        Self { input, budget, at: 0, content: 0, padding: 0, current: b"(the first)".to_vec() }
    }

    /// Returns the position in the archive.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Returns the next entry, or `None` at the end of the archive.
    ///
    /// # Errors
    /// The archive is malformed, or contains an entry that no tree may have.
    pub(super) fn next(&mut self) -> Result<Option<Entry>, Refused> {
        let entry = self.read_entry();
        entry.map_err(|reason| self.refusal(reason))
    }

    /// Copies the content of the current entry.
    ///
    /// # Errors
    /// The archive ends too early, or the copy fails.
    pub(super) fn copy_content(&mut self, mut to: impl Write) -> Result<(), Refused> {
        let copied = self.pass(self.content, |piece| to.write_all(piece).map_err(Reason::Write));
        self.content = 0;
        copied.map_err(|reason| self.refusal(reason))
    }

    /// Returns a refusal of the current entry.
    pub(super) fn refusal(&self, reason: Reason) -> Refused {
        Refused::new(&self.current, reason)
    }

    fn read_entry(&mut self) -> Result<Option<Entry>, Reason> {
        self.pass(self.content, |_| Ok(()))?;
        self.pass(self.padding, |_| Ok(()))?;
        (self.content, self.padding) = (0, 0);
        let mut extended = Extended::default();
        loop {
            let mut block = [0; BLOCK];
            self.fill(&mut block)?;
            let Some(mut header) = Header::parse(&block)? else {
                self.end()?;
                return Ok(None);
            };
            match header.flag {
                b'x' => extended.add_records(&self.long_header(&header)?)?,
                b'L' => extended.name = Some(without_zero(self.long_header(&header)?)),
                b'K' => extended.link = Some(without_zero(self.long_header(&header)?)),
                // A header for all entries, in which archivers leave a comment. Values for entries are refused,
                // because they would be ignored.
                b'g' => {
                    let mut global = Extended::default();
                    global.add_records(&self.long_header(&header)?)?;
                    if !global.is_empty() {
                        return Err(Reason::Header("a header for all entries contains values for them"));
                    }
                }
                _ => {
                    extended.apply(&mut header);
                    self.current.clone_from(&header.name);
                    return self.entry(header).map(Some);
                }
            }
        }
    }

    fn entry(&mut self, header: Header) -> Result<Entry, Reason> {
        self.budget.entry(header.name.len().saturating_add(header.link.len()))?;
        let path = TreePath::parse(&header.name)?;
        let kind = match header.flag {
            // Old archivers mark a folder by its name alone.
            0 | b'0' if header.name.ends_with(b"/") => Kind::Folder,
            0 | b'0' | b'7' => Kind::File(header.size),
            b'1' => Kind::Link(TreePath::parse(&header.link).map_err(|reason| match reason {
                Reason::Absolute | Reason::Parent => Reason::LinkLeaves,
                other => other,
            })?),
            b'2' => Kind::Symlink(header.link),
            b'3' | b'4' => return Err(Reason::Device),
            b'5' => Kind::Folder,
            b'6' => Kind::Pipe,
            b'S' => return Err(Reason::Sparse),
            flag => return Err(Reason::Kind(flag.into())),
        };
        if let Kind::File(size) = kind {
            self.budget.check_bytes(size)?;
            self.content = size;
            self.padding = padding(size);
        } else if header.size != 0 {
            return Err(Reason::Content);
        }
        Ok(Entry { path, kind, meta: header.meta })
    }

    /// Reads the content of an extended header.
    fn long_header(&mut self, header: &Header) -> Result<Vec<u8>, Reason> {
        if header.size > LONGEST_HEADER {
            return Err(Reason::Header("its extended header is too long"));
        }
        let mut text = Vec::new();
        self.pass(header.size, |piece| {
            text.extend_from_slice(piece);
            Ok(())
        })?;
        self.pass(padding(header.size), |_| Ok(()))?;
        Ok(text)
    }

    /// Reads the second block of the end and everything after it, which must be zero. So the end of a compressed
    /// archive is checked, too.
    fn end(&mut self) -> Result<(), Reason> {
        self.current = b"(the end)".to_vec();
        let mut block = [0; BLOCK];
        self.fill(&mut block)?;
        let mut count = BLOCK;
        while count > 0 {
            if block.iter().take(count).any(|&byte| byte != 0) {
                return Err(Reason::Trailing);
            }
            count = self.input.read(&mut block)?;
            self.took(count)?;
        }
        Ok(())
    }

    /// Reads `length` bytes and passes them on in pieces.
    fn pass(&mut self, length: u64, mut to: impl FnMut(&[u8]) -> Result<(), Reason>) -> Result<(), Reason> {
        let mut buffer = [0; 1 << 14];
        let mut left = length;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let piece = buffer.get_mut(..count).unwrap_or_default();
            self.fill(piece)?;
            to(piece)?;
            left = left.saturating_sub(u64::try_from(count).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Reason> {
        self.took(buffer.len())?;
        Ok(self.input.read_exact(buffer)?)
    }

    fn took(&mut self, count: usize) -> Result<(), Reason> {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.at = self.at.saturating_add(count);
        self.budget.bytes(count)
    }
}

/// Returns the number of bytes from the end of content of this size to the next block.
fn padding(size: u64) -> u64 {
    const SIZE: u64 = 512;
    (SIZE - size % SIZE) % SIZE
}

/// Returns a name of GNU's format, which ends with a zero byte.
fn without_zero(mut name: Vec<u8>) -> Vec<u8> {
    while name.last() == Some(&0) {
        name.pop();
    }
    name
}
