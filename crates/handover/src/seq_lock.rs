//! A group of words for a reader that must not block, such as a signal handler.

use crate::sync::{AtomicUsize, Ordering, fence};

/// `N` words with one writer at a time. A reader never blocks: it gets all words of one write, or none.
#[derive(Debug)]
pub struct SeqLock<const N: usize> {
    /// Odd while there is nothing to read. Changes with every write.
    version: AtomicUsize,
    words: [AtomicUsize; N],
}

impl<const N: usize> SeqLock<N> {
    /// Creates an empty lock.
    #[cfg(not(loom))]
    pub const fn empty() -> Self {
        Self { version: AtomicUsize::new(1), words: [const { AtomicUsize::new(0) }; N] }
    }

    /// Creates an empty lock.
    #[cfg(loom)]
    pub fn empty() -> Self {
        Self { version: AtomicUsize::new(1), words: std::array::from_fn(|_| AtomicUsize::new(0)) }
    }

    /// Returns the words of one write. `None` if there are none, or while they are being written.
    #[inline]
    pub fn read(&self) -> Option<[usize; N]> {
        let version = self.version.load(Ordering::Acquire);
        let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        // A load above that has seen a word of a later write makes the load below see that write's odd version, or a
        // newer one.
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version).then_some(words)
    }

    /// Writes all words, or removes them. The caller must be the only writer.
    pub fn write(&self, words: Option<[usize; N]>) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        // The counterpart of the fence in `read`: the odd version is visible before any of the words.
        fence(Ordering::Release);
        let next = if words.is_some() { version.wrapping_add(1) } else { version.wrapping_add(2) };
        for (word, value) in self.words.iter().zip(words.unwrap_or([0; N])) {
            word.store(value, Ordering::Relaxed);
        }
        self.version.store(next, Ordering::Release);
    }
}
