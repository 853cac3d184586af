//! Bitmap of written pages, for a VMM that copies guest memory while devices write to it.

use crate::sync::{AtomicU64, Ordering};

/// Pages per word of the bitmap.
const WORD: usize = 64;

/// One bit for each page of a part of guest memory: the page may have been written since the last report.
///
/// All accesses are relaxed. The caller orders them with a readers-writer lock:
///
/// - A writer locks it for reading, marks the pages, and then writes, all before it unlocks.
/// - A report takes the words, and then locks it for writing once, before it answers.
///
/// A writer that marked a page before the words were taken has written when the report is answered. A writer that marks
/// it later is in the next report.
#[derive(Debug)]
pub struct DirtyBitmap(Box<[AtomicU64]>);

impl DirtyBitmap {
    /// Creates a bitmap for `pages` pages, all of them clean.
    pub fn new(pages: usize) -> Self {
        Self((0..pages.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Returns the bytes of memory that the bitmap of this many pages takes.
    pub const fn bytes(pages: u64) -> u64 {
        pages.div_ceil(WORD as u64).saturating_mul(size_of::<u64>() as u64)
    }

    /// Marks the pages from `first` to `last`, both included. The caller writes to them afterwards. Pages outside the
    /// bitmap are ignored.
    pub fn mark(&self, first: usize, last: usize) {
        for index in first / WORD..=last / WORD {
            let Some(word) = self.0.get(index) else { return };
            let from = if index == first / WORD { first % WORD } else { 0 };
            let to = if index == last / WORD { last % WORD } else { WORD - 1 };
            let bits = u64::MAX << from & u64::MAX >> (WORD - 1 - to);
            // Most pages are marked already, and a load is cheaper than an update. A report that takes the bit found
            // here waits for this writer's lock before it answers, so the write is complete by then.
            if word.load(Ordering::Relaxed) & bits != bits {
                word.fetch_or(bits, Ordering::Relaxed);
            }
        }
    }

    /// Takes bits of the 64 pages from page 64 · `index` on: those of `wanted`, which are clean afterwards. Returns 0
    /// outside the bitmap.
    pub fn take(&self, index: usize, wanted: u64) -> u64 {
        self.0.get(index).map_or(0, |word| word.fetch_and(!wanted, Ordering::Relaxed) & wanted)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn marks_cross_words_and_end_with_the_bitmap() {
        let bitmap = DirtyBitmap::new(130);
        bitmap.mark(63, 129);
        let take = |index| bitmap.take(index, u64::MAX);
        assert_eq!([0, 1, 2, 3].map(take), [1 << 63, u64::MAX, 3, 0]);
        assert_eq!(take(1), 0);
        bitmap.mark(0, 0);
        bitmap.mark(63, 64);
        bitmap.mark(5, usize::MAX);
        assert_eq!((bitmap.take(0, 0xf0), bitmap.take(0, 0xff)), (0xe0, 1));
        assert_eq!(take(0), u64::MAX << 8);
        assert_eq!((DirtyBitmap::bytes(64), DirtyBitmap::bytes(65), DirtyBitmap::bytes(u64::MAX)), (8, 16, 1 << 61));
    }
}
