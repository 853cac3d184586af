//! Notes about a client at its keeper: the client's connection and the outline of its function, for the next worker.
//!
//! | kind | number | bytes | descriptors |
//! | --- | --- | --- | --- |
//! | [`Key::PARTIAL`] | 0 | | |
//! | client | 0 | two flags of [`Protocol`] | |
//! | function | 0 | [`Outline`] | |
//! | file | any | | a file of guest memory |
//! | range | bus address | size, offset in the file and number of the file, 8 bytes each; flags | |
//! | interrupts | 0, 1, … | a flag for each of the next 16 interrupts: error, line, vectors | those that are set |
//!
//! A note is written before the client gets the answer to the message that caused it. A client without the notes
//! *client* and *function* cannot be recovered.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pvrdma_pci_function::Outline;
use thiserror::Error;

use crate::client_connection::{ClientConnection, ClientInterrupts, ClientRange, FilePart};
use crate::endpoint::Endpoint;
use crate::keeper::client::{Recalled, Seat, Shared};
use crate::keeper::notes::{Key, Note};
use crate::message::MAX_MSG_FDS;
use crate::request::DmaMap;
use crate::session::Protocol;

const CLIENT: Key = Key { kind: 2, number: 0 };
const FUNCTION: Key = Key { kind: 3, number: 0 };
const FILE: u8 = 4;
const RANGE: u8 = 5;
const INTERRUPTS: u8 = 6;

/// Flags of a range.
const WRITABLE: u8 = 1;
const MEMORY: u8 = 2;

/// Reason why a client cannot be recovered from its notes.
#[derive(Debug, Error)]
pub(crate) enum KeptError {
    /// The position of the next message is unknown.
    #[error("the process ended in the middle of a message of the client")]
    Partial,
    /// The client was only partly described.
    #[error("the process ended before all of the client was noted")]
    Incomplete,
    /// The notes are not those of a worker.
    #[error("the {0} noted about the client is damaged")]
    Damaged(&'static str),
}

/// File of guest memory that backs a range.
pub(crate) struct RangeFile(pub(crate) Arc<File>);

impl Endpoint {
    /// Makes a change to the notes about the client, if there is a keeper.
    fn note(&self, change: impl FnOnce(&Seat) -> Option<String>) {
        if let Some(problem) = self.keeper.as_ref().and_then(change) {
            self.warn(
                module_path!(),
                format_args!("the client would lose its device by a crash of this process: {problem}"),
            );
        }
    }

    fn put(&self, key: Key, bytes: Vec<u8>, fds: Vec<Shared>) {
        self.note(|seat| seat.put(key, Note { bytes, fds }));
    }

    /// Notes that a message of the client is received, or answered, in several steps.
    pub(crate) fn note_begin(&self) {
        self.put(Key::PARTIAL, Vec::new(), Vec::new());
    }

    /// Notes that the stream is between two messages again.
    pub(crate) fn note_end(&self) {
        self.note(|seat| seat.forget(Key::PARTIAL, Key::PARTIAL));
    }

    /// Notes the result of the negotiation.
    pub(crate) fn note_protocol(&self, protocol: Protocol) {
        let Protocol { negotiated, impatient } = protocol;
        self.put(CLIENT, vec![negotiated.into(), impatient.into()], Vec::new());
    }

    /// Notes the outline of the function, if it has changed.
    pub(crate) fn note_function(&self) {
        let Some(seat) = &self.keeper else { return };
        let Some(outline) = self.function.outline().map(|outline| outline.to_bytes()) else { return };
        if seat.noted(FUNCTION).as_deref() != Some(&outline[..]) {
            self.put(FUNCTION, outline.to_vec(), Vec::new());
        }
    }

    /// Notes a range and its file.
    pub(crate) fn note_range(&self, map: &DmaMap, writable: bool, file: Option<RangeFile>) {
        if self.keeper.is_none() {
            return;
        }
        let (mut flags, mut number) = (if writable { WRITABLE } else { 0 }, 0);
        if let Some(RangeFile(file)) = file {
            flags |= MEMORY;
            // Unique as long as the note exists, because the note keeps the file open.
            number = Arc::as_ptr(&file).addr() as u64;
            self.note(|seat| {
                let key = Key { kind: FILE, number };
                let known = seat.noted(key).is_some();
                (!known).then(|| seat.put(key, Note { bytes: Vec::new(), fds: vec![file] })).flatten()
            });
        }
        let words = [map.size, map.offset, number].map(u64::to_ne_bytes);
        let bytes = words.into_iter().flatten().chain([flags]).collect();
        self.put(Key { kind: RANGE, number: map.address }, bytes, Vec::new());
    }

    /// Removes the notes about the ranges from `address` on. `size` 0: all ranges.
    pub(crate) fn forget_ranges(&self, address: u64, size: u64) {
        let last = size.checked_sub(1).map_or(u64::MAX, |size| address.saturating_add(size));
        self.note(|seat| seat.forget(Key { kind: RANGE, number: address }, Key { kind: RANGE, number: last }));
    }

    /// Removes the notes about files that are not used any more.
    pub(crate) fn forget_files(&self) {
        self.note(|seat| seat.forget_unused(FILE));
    }

    /// Notes the targets of all interrupts.
    pub(crate) fn note_interrupts(&self) {
        if self.keeper.is_none() {
            return;
        }
        let ClientInterrupts { vectors, error, line, asserted: _, masked: _ } = match self.irqs.describe() {
            Ok(interrupts) => interrupts,
            Err(error) => {
                return self.warn(module_path!(), format_args!("interrupts are not kept for a crash: {error}"));
            }
        };
        let mut chunks = 0;
        let mut interrupts = [error, line].into_iter().chain(vectors).peekable();
        while interrupts.peek().is_some() {
            let chunk: Vec<_> = interrupts.by_ref().take(MAX_MSG_FDS).collect();
            let flags = chunk.iter().map(|fd| fd.is_some().into()).collect();
            let fds = chunk.into_iter().flatten().map(|fd| Arc::new(fd) as Shared).collect();
            self.put(Key { kind: INTERRUPTS, number: chunks }, flags, fds);
            chunks = chunks.saturating_add(1);
        }
        self.note(|seat| {
            seat.forget(Key { kind: INTERRUPTS, number: chunks }, Key { kind: INTERRUPTS, number: u64::MAX })
        });
    }
}

/// Reads the notes about a client. They are not trusted: they may come from a worker that a guest has taken over.
///
/// # Errors
/// The client cannot be recovered.
pub(crate) fn read(recalled: Recalled) -> Result<(ClientConnection, Outline), KeptError> {
    let Recalled { stream, mut notes } = recalled;
    if notes.contains_key(&Key::PARTIAL) {
        return Err(KeptError::Partial);
    }
    let Note { bytes: client, .. } = notes.remove(&CLIENT).ok_or(KeptError::Incomplete)?;
    let Note { bytes: outline, .. } = notes.remove(&FUNCTION).ok_or(KeptError::Incomplete)?;
    let &[negotiated @ (0 | 1), impatient @ (0 | 1)] = &client[..] else { return Err(KeptError::Damaged("protocol")) };
    let outline = Outline::from_bytes(&outline).ok_or(KeptError::Damaged("function"))?;
    let (mut ranges, mut files, mut numbers) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut interrupts = Vec::new();
    for (Key { kind, number }, Note { bytes, mut fds }) in notes {
        match kind {
            // Files come before the ranges that refer to them.
            FILE => {
                numbers.insert(number, files.len());
                files.push(fds.pop().ok_or(KeptError::Damaged("file"))?);
            }
            RANGE => ranges.push(range(number, &bytes, &numbers).ok_or(KeptError::Damaged("range"))?),
            INTERRUPTS => interrupts.extend(chunk(&bytes, fds).ok_or(KeptError::Damaged("list of interrupts"))?),
            _ => return Err(KeptError::Damaged("kind of what was")),
        }
    }
    let mut interrupts = interrupts.into_iter();
    // The notes do not have the state of the line. The reset of the function deasserts it. It counts as unmasked, so a
    // client that has masked it may get an interrupt too early, but no client loses one.
    let (error, line) = (interrupts.next().flatten(), interrupts.next().flatten());
    let interrupts = ClientInterrupts { error, line, vectors: interrupts.collect(), asserted: false, masked: false };
    let (negotiated, impatient) = (negotiated == 1, impatient == 1);
    Ok((ClientConnection { stream, negotiated, impatient, ranges, files, interrupts }, outline))
}

fn range(address: u64, bytes: &[u8], files: &BTreeMap<u64, usize>) -> Option<ClientRange> {
    let (words, &[flags]) = bytes.as_chunks::<8>() else { return None };
    let &[size, offset, number] = words else { return None };
    let [size, offset, number] = [size, offset, number].map(u64::from_ne_bytes);
    let memory = match flags & MEMORY {
        0 => None,
        _ => Some(FilePart { file: *files.get(&number)?, offset }),
    };
    (flags & !(WRITABLE | MEMORY) == 0).then_some(ClientRange {
        address,
        size,
        writable: flags & WRITABLE != 0,
        memory,
    })
}

/// Assigns descriptors to the interrupts of one note.
fn chunk(flags: &[u8], fds: Vec<OwnedFd>) -> Option<Vec<Option<OwnedFd>>> {
    let mut fds = fds.into_iter();
    let interrupts = flags.iter().map(|flag| match flag {
        0 => Some(None),
        1 => fds.next().map(Some),
        _ => None,
    });
    let interrupts = interrupts.collect::<Option<Vec<_>>>()?;
    fds.next().is_none().then_some(interrupts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
    }

    fn range_note(flags: u8, file: u64) -> Note<OwnedFd> {
        let words = [4096, 8192, file].map(u64::to_ne_bytes);
        Note { bytes: words.into_iter().flatten().chain([flags]).collect(), fds: Vec::new() }
    }

    fn notes() -> BTreeMap<Key, Note<OwnedFd>> {
        let outline = Outline { config: [7; 256], interrupt_mask: 3, shared_region: 1 << 40 };
        let flags = (0..20).map(|at| u8::from(at != 1)).collect::<Vec<_>>();
        let [first, second] = [&flags[..16], &flags[16..]].map(|flags| {
            let fds = flags.iter().filter(|&&flag| flag == 1).map(|_| fd()).collect();
            Note { bytes: flags.to_vec(), fds }
        });
        BTreeMap::from([
            (CLIENT, Note { bytes: vec![1, 0], fds: Vec::new() }),
            (FUNCTION, Note { bytes: outline.to_bytes().to_vec(), fds: Vec::new() }),
            (Key { kind: FILE, number: 77 }, Note { bytes: Vec::new(), fds: vec![fd()] }),
            (Key { kind: FILE, number: 99 }, Note { bytes: Vec::new(), fds: vec![fd()] }),
            (Key { kind: RANGE, number: 1 << 32 }, range_note(WRITABLE | MEMORY, 99)),
            (Key { kind: RANGE, number: 0 }, range_note(0, 1)),
            (Key { kind: INTERRUPTS, number: 0 }, first),
            (Key { kind: INTERRUPTS, number: 1 }, second),
        ])
    }

    #[test]
    fn a_client_is_read_from_its_notes() {
        let (client, outline) = read(Recalled { stream: fd(), notes: notes() }).unwrap();
        assert_eq!((outline.config, outline.interrupt_mask, outline.shared_region), ([7; 256], 3, 1 << 40));
        assert!(client.negotiated && !client.impatient && client.files.len() == 2);
        let memory = Some(FilePart { file: 1, offset: 8192 });
        assert_eq!(
            client.ranges,
            [
                ClientRange { address: 0, size: 4096, writable: false, memory: None },
                ClientRange { address: 1 << 32, size: 4096, writable: true, memory },
            ]
        );
        let ClientInterrupts { vectors, error, line, .. } = client.interrupts;
        assert!(error.is_some() && line.is_none() && vectors.len() == 18 && vectors.iter().all(Option::is_some));
    }

    /// A worker may write any notes.
    #[test]
    fn other_notes_are_refused() {
        let refuse = |key: Key, note: Option<Note<OwnedFd>>| {
            let mut notes = notes();
            match note {
                Some(note) => notes.insert(key, note),
                None => notes.remove(&key),
            };
            read(Recalled { stream: fd(), notes }).unwrap_err().to_string()
        };
        let bytes = |bytes: Vec<u8>| Some(Note { bytes, fds: Vec::new() });
        assert!(refuse(Key::PARTIAL, bytes(Vec::new())).contains("in the middle of a message"));
        assert!(refuse(CLIENT, None).contains("before all"));
        assert!(refuse(FUNCTION, None).contains("before all"));
        assert!(refuse(CLIENT, bytes(vec![2, 0])).contains("protocol"));
        assert!(refuse(CLIENT, bytes(vec![1])).contains("protocol"));
        assert!(refuse(FUNCTION, bytes(vec![0; Outline::SIZE - 1])).contains("function"));
        assert!(refuse(Key { kind: FILE, number: 5 }, bytes(Vec::new())).contains("file"));
        let range = Key { kind: RANGE, number: 5 };
        for note in [range_note(WRITABLE | MEMORY, 98), range_note(4, 99), Note { bytes: vec![0; 24], fds: Vec::new() }]
        {
            assert!(refuse(range, Some(note)).contains("range"));
        }
        let interrupts = Key { kind: INTERRUPTS, number: 1 };
        for (flags, fds) in [(vec![1, 1], 1), (vec![1], 2), (vec![2], 1)] {
            let note = Note { bytes: flags, fds: (0..fds).map(|_| fd()).collect() };
            assert!(refuse(interrupts, Some(note)).contains("interrupts"));
        }
        assert!(refuse(Key { kind: 9, number: 0 }, bytes(Vec::new())).contains("kind"));
    }
}
