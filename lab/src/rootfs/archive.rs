//! The archive around an image: its files, found by name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::budget::{Budget, Limits};
use super::layer::unpacked;
use super::path::TreePath;
use super::refusal::Refused;
use super::tar::{Kind, TarReader};

/// Longest file with a description of the image.
const LONGEST_JSON: u64 = 4 << 20;

/// An archive, and the places of its files.
#[derive(Debug)]
pub(super) struct Archive {
    file: File,
    /// Start and length of each file.
    files: BTreeMap<TreePath, (u64, u64)>,
}

impl Archive {
    /// Opens an archive. A compressed one is unpacked into the folder first.
    ///
    /// # Errors
    /// It is no archive, or contains an entry that no image may have.
    pub(super) fn open(path: &Path, folder: &Path, limits: Limits) -> Result<Self> {
        let file = unpacked_file(path, folder, limits)?;
        let mut budget = Budget::new(limits);
        let mut reader = TarReader::new(BufReader::with_capacity(1 << 16, &file), &mut budget);
        let mut files = BTreeMap::new();
        while let Some(entry) = reader.next()? {
            if let Kind::File(size) = entry.kind
                && files.insert(entry.path, (reader.position(), size)).is_some()
            {
                return Err(reader.refusal(super::refusal::Reason::Duplicate).into());
            }
        }
        Ok(Self { file, files })
    }

    /// Returns a reader of a file, or `None` if there is no such file.
    ///
    /// # Errors
    /// The name is invalid, or the archive cannot be read.
    pub(super) fn find(&self, name: &str) -> Result<Option<impl Read>> {
        let path = TreePath::parse(name.as_bytes()).map_err(|reason| Refused::new(name.as_bytes(), reason))?;
        let Some(&(start, length)) = self.files.get(&path) else { return Ok(None) };
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start)).with_context(|| format!("cannot read '{name}'"))?;
        Ok(Some(file.take(length)))
    }

    /// Returns a reader of a file that must exist.
    ///
    /// # Errors
    /// The same, and there is no such file.
    pub(super) fn get(&self, name: &str) -> Result<impl Read> {
        self.find(name)?.with_context(|| format!("the archive has no file '{name}'"))
    }

    /// Parses a file with JSON.
    ///
    /// # Errors
    /// There is no such file, or it is too long or not of this form.
    pub(super) fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T> {
        let mut text = Vec::new();
        self.get(name)?.take(LONGEST_JSON).read_to_end(&mut text).with_context(|| format!("cannot read '{name}'"))?;
        serde_json::from_slice(&text).with_context(|| format!("'{name}' does not describe an image"))
    }
}

/// Opens an archive that may be compressed.
fn unpacked_file(path: &Path, folder: &Path, limits: Limits) -> Result<File> {
    let file = File::open(path).context("cannot be opened")?;
    let mut start = [0; 2];
    let mut reader = &file;
    if reader.read_exact(&mut start).is_err() {
        bail!("it is too short for an archive");
    }
    reader.seek(SeekFrom::Start(0)).context("cannot be read")?;
    if start != [0x1f, 0x8b] {
        return Ok(file);
    }
    let at = folder.join("archive");
    let copy = File::options().read(true).write(true).create_new(true).open(&at);
    let mut copy = copy.context("cannot create a file for the archive")?;
    // It is open, and needs no name any more.
    std::fs::remove_file(&at).context("cannot remove a file")?;
    // An archive that is cut here is refused by its reader, whose limit is the same.
    let mut unpacked = unpacked(reader).context("cannot be unpacked")?.take(limits.bytes.saturating_add(1));
    io::copy(&mut unpacked, &mut copy).context("cannot be unpacked")?;
    copy.seek(SeekFrom::Start(0)).context("cannot be read")?;
    Ok(copy)
}
