//! Applies a layer of an image to the tree below it.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

use super::budget::Budget;
use super::path::Target;
use super::refusal::{Reason, Refused};
use super::store::Store;
use super::tar::{Entry, Kind, TarReader};
use super::tree::{Content, Tree};
use crate::interrupt;

/// Prefix of an entry that removes the entry of this name from lower layers.
const WHITEOUT: &[u8] = b".wh.";
/// Entry that removes the whole content of its folder from lower layers.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Applies a layer, which may be compressed.
///
/// # Errors
/// It is malformed, or contains an entry that no layer may have.
pub(super) fn apply(layer: impl Read, tree: &mut Tree, store: &mut Store, budget: &mut Budget) -> Result<(), Refused> {
    let layer = unpacked(layer).map_err(|error| Refused::new(b"(the first)", error.into()))?;
    tree.next_layer();
    let mut reader = TarReader::new(layer, budget);
    while let Some(entry) = reader.next()? {
        if interrupt::is_requested() {
            return Err(reader.refusal(Reason::Interrupted));
        }
        let added = add(&entry, tree, store);
        if let Some(mut file) = added.map_err(|reason| reader.refusal(reason))? {
            reader.copy_content(&mut file)?;
        }
    }
    Ok(())
}

/// Returns a reader of the content of a file that may be compressed by gzip.
///
/// # Errors
/// It is compressed by another program.
pub(super) fn unpacked<'a>(packed: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut packed = BufReader::with_capacity(1 << 16, packed);
    let start = packed.fill_buf()?;
    for (magic, name) in [(b"\x28\xb5\x2f\xfd".as_slice(), "zstd"), (b"\xfd7zXZ", "xz"), (b"BZh", "bzip2")] {
        if start.starts_with(magic) {
            return Err(io::Error::other(format!("it is compressed by {name}: save the image with gzip or without")));
        }
    }
    if start.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(MultiGzDecoder::new(packed)));
    }
    Ok(Box::new(packed))
}

/// Adds an entry to the tree; returns the file that receives its content.
fn add(entry: &Entry, tree: &mut Tree, store: &mut Store) -> Result<Option<std::fs::File>, Reason> {
    let place = tree.place(&entry.path)?;
    if let Some((folder, name)) = place.split_last()
        && let Some(hidden) = name.strip_prefix(WHITEOUT)
    {
        if name == OPAQUE {
            tree.white_out_content(&folder);
        } else {
            tree.white_out(&folder.join(hidden)?);
        }
        return Ok(None);
    }
    let meta = entry.meta;
    match &entry.kind {
        Kind::Folder => tree.add(place, Content::Folder, meta)?,
        Kind::Pipe => tree.add(place, Content::Pipe, meta)?,
        Kind::Symlink(target) => {
            let target = Target::parse(&place, target)?;
            tree.add(place, Content::Symlink(target), meta)?;
        }
        Kind::Link(to) => tree.add_link(place, to)?,
        Kind::File(_) => {
            let (id, file) = store.create().map_err(Reason::Write)?;
            tree.add(place, Content::File(id), meta)?;
            return Ok(Some(file));
        }
    }
    Ok(None)
}
