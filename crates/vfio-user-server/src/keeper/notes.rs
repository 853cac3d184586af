//! Notes about a client: the state that the next worker needs to serve the client after a crash.
//!
//! The keeper stores notes without knowing their meaning; the worker keeps the same notes, for the case that the keeper
//! is replaced. [`recalled`](super::recalled) has the meaning of their contents.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use crate::message::MAX_MSG_FDS;

/// Maximum number of notes about a client. The ranges of guest memory take most of them.
pub(super) const MAX_NOTES: usize = 16_384;

/// Maximum number of descriptors in all notes about a client: 64 files of guest memory and the interrupts.
const MAX_DESCRIPTORS: usize = 256;

/// Maximum number of bytes of a note.
pub(super) const MAX_NOTE: usize = 512;

/// Size of an encoded key in bytes.
pub(super) const KEY: usize = 9;

/// Name of a note. The kinds are defined by the worker, except [`Key::PARTIAL`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    pub(crate) kind: u8,
    pub(crate) number: u64,
}

impl Key {
    /// Smallest key.
    pub(super) const FIRST: Self = Self { kind: 0, number: 0 };
    /// Largest key.
    pub(super) const LAST: Self = Self { kind: u8::MAX, number: u64::MAX };
    /// A message of the client may have been received in part, so the position of the next message is unknown. The
    /// keeper writes this note itself when it receives bytes.
    pub(crate) const PARTIAL: Self = Self { kind: 1, number: 0 };

    pub(super) const fn to_bytes(self) -> [u8; KEY] {
        let [a, b, c, d, e, f, g, h] = self.number.to_ne_bytes();
        [self.kind, a, b, c, d, e, f, g, h]
    }

    pub(super) const fn from_bytes(bytes: [u8; KEY]) -> Self {
        let [kind, a, b, c, d, e, f, g, h] = bytes;
        Self { kind, number: u64::from_ne_bytes([a, b, c, d, e, f, g, h]) }
    }

    /// Returns the next key, or `None` after the last one.
    pub(super) const fn next(self) -> Option<Self> {
        match (self.number.checked_add(1), self.kind.checked_add(1)) {
            (Some(number), _) => Some(Self { kind: self.kind, number }),
            (None, Some(kind)) => Some(Self { kind, number: 0 }),
            (None, None) => None,
        }
    }
}

/// A note: bytes and descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Note<F> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<F>,
}

/// Notes about a client.
#[derive(Debug)]
pub(super) struct Notes<F> {
    notes: BTreeMap<Key, Note<F>>,
    descriptors: usize,
}

impl<F> Default for Notes<F> {
    fn default() -> Self {
        Self { notes: BTreeMap::new(), descriptors: 0 }
    }
}

impl<F: AsFd> Notes<F> {
    /// Adds a note, or replaces the one of that key. Returns `false` if that would exceed a limit; the notes are
    /// unchanged then.
    pub(super) fn put(&mut self, key: Key, note: Note<F>) -> bool {
        let (known, replaced) = match self.notes.get(&key) {
            Some(old) => (1, old.fds.len()),
            None => (0, 0),
        };
        let descriptors = self.descriptors.saturating_sub(replaced).saturating_add(note.fds.len());
        let fits = self.notes.len().saturating_sub(known) < MAX_NOTES && descriptors <= MAX_DESCRIPTORS;
        if !fits || note.bytes.len() > MAX_NOTE || note.fds.len() > MAX_MSG_FDS {
            return false;
        }
        self.descriptors = descriptors;
        self.notes.insert(key, note);
        true
    }

    /// Removes the notes from `first` to `last`. Returns `true` if there were any.
    pub(super) fn remove(&mut self, first: Key, last: Key) -> bool {
        if first > last {
            return false;
        }
        let keys: Vec<Key> = self.notes.range(first..=last).map(|(&key, _)| key).collect();
        for note in keys.iter().filter_map(|key| self.notes.remove(key)) {
            self.descriptors = self.descriptors.saturating_sub(note.fds.len());
        }
        !keys.is_empty()
    }

    pub(super) fn get(&self, key: Key) -> Option<&Note<F>> {
        self.notes.get(&key)
    }

    /// Returns the first note whose key is at least `from`.
    pub(super) fn first_from(&self, from: Key) -> Option<(Key, &Note<F>)> {
        self.notes.range(from..).next().map(|(&key, note)| (key, note))
    }

    /// Returns all notes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, &Note<F>)> {
        self.notes.iter().map(|(&key, note)| (key, note))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn note(bytes: usize, fds: usize) -> Note<OwnedFd> {
        let fd = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Note { bytes: vec![0; bytes], fds: (0..fds).map(|_| fd()).collect() }
    }

    const fn key(number: u64) -> Key {
        Key { kind: 7, number }
    }

    #[test]
    fn limits_hold_and_replaced_notes_do_not_count() {
        let mut notes = Notes::default();
        assert!(!notes.put(key(0), note(MAX_NOTE + 1, 0)) && !notes.put(key(0), note(0, MAX_MSG_FDS + 1)));
        let full = (MAX_DESCRIPTORS / MAX_MSG_FDS) as u64;
        for round in 0..3 {
            assert!((0..full).all(|number| notes.put(key(number), note(1, MAX_MSG_FDS))), "{round}");
            assert!(!notes.put(key(full), note(1, 1)));
        }
        assert!(notes.remove(key(0), key(0)) && !notes.remove(key(0), key(0)) && !notes.remove(key(9), key(8)));
        assert!(notes.put(key(full), note(1, MAX_MSG_FDS)));
        let count = notes.iter().count();
        assert!((count..MAX_NOTES).all(|number| notes.put(key(1000 + number as u64), note(0, 0))));
        assert!(!notes.put(key(u64::MAX), note(0, 0)) && notes.put(key(1000 + count as u64), note(3, 0)));
        assert!(notes.remove(Key::FIRST, Key { kind: u8::MAX, number: u64::MAX }) && notes.iter().next().is_none());
        assert_eq!(notes.descriptors, 0);
    }

    #[test]
    fn keys_come_in_order_and_end() {
        let last = Key { kind: u8::MAX, number: u64::MAX };
        assert_eq!(key(u64::MAX).next(), Some(Key { kind: 8, number: 0 }));
        assert_eq!(last.next(), None);
        assert_eq!(Key::from_bytes(last.to_bytes()), last);
        let mut notes = Notes::default();
        for key in [Key::PARTIAL, last, key(3), key(1)] {
            assert!(notes.put(key, note(0, 0)));
        }
        let mut from = Some(Key::FIRST);
        let in_turn = std::iter::from_fn(|| {
            let (key, _) = notes.first_from(from?)?;
            from = key.next();
            Some(key)
        });
        assert_eq!(in_turn.collect::<Vec<_>>(), [Key::PARTIAL, key(1), key(3), last]);
    }
}
