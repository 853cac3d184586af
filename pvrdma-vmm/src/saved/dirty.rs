//! Written pages of guest memory.

use anyhow::Result;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// A log of the pages that are written while a machine runs.
pub(crate) trait WriteLog {
    /// Returns the pages that were written since the log started or since the last call. Each of these writes is
    /// complete.
    fn take(&self) -> Result<Dirty>;
}

/// Set of pages: a bit for each page of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dirty(Vec<Region>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    pages: u64,
    words: Vec<u64>,
}

impl Dirty {
    /// Creates an empty set with room for the pages of this memory.
    pub(crate) fn none_of(memory: &GuestMemoryMmap) -> Self {
        let region = |(start, bytes): (u64, u64)| {
            let pages = bytes / PAGE as u64;
            Region { start, pages, words: vec![0; usize::try_from(pages.div_ceil(64)).unwrap_or(0)] }
        };
        Self(memory.iter().map(|region| (region.start_addr().0, region.len())).map(region).collect())
    }

    /// Adds the pages from `start` on that have a bit in these words, the lowest bit first.
    pub(crate) fn add_bits(&mut self, start: u64, bits: &[u64]) {
        for region in self.0.iter_mut().filter(|region| region.start == start) {
            region.words.iter_mut().zip(bits).for_each(|(word, bits)| *word |= bits);
        }
    }

    /// Adds all pages of a set.
    pub(crate) fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|region| self.add_bits(region.start, &region.words));
    }

    /// Adds the pages of a range, as far as there is memory.
    pub(crate) fn add_range(&mut self, start: u64, bytes: u64) {
        let Some(last) = bytes.checked_sub(1).map(|more| start.saturating_add(more)) else { return };
        for region in &mut self.0 {
            let page = |address: u64| address.saturating_sub(region.start) / PAGE as u64;
            let first = page(start);
            let after = if last < region.start { 0 } else { page(last).saturating_add(1).min(region.pages) };
            for page in first..after {
                let word = usize::try_from(page / 64).ok().and_then(|word| region.words.get_mut(word));
                word.into_iter().for_each(|word| *word |= 1 << (page % 64));
            }
        }
    }

    /// Returns the number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.0.iter().flat_map(|region| &region.words).map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns the runs of pages in the order of their addresses, each of at most `longest` pages: address and number.
    pub(crate) fn runs(&self, longest: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for address in self.addresses() {
            match runs.last_mut() {
                Some((start, pages)) if *pages < longest && *start + *pages * PAGE as u64 == address => *pages += 1,
                _ => runs.push((address, 1)),
            }
        }
        runs
    }

    fn addresses(&self) -> impl Iterator<Item = u64> {
        let page = PAGE as u64;
        let words = self.0.iter().flat_map(move |region| (region.start..).step_by(64 * PAGE).zip(&region.words));
        words.flat_map(move |(start, word)| {
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| start + bit * page)
        })
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    const HIGH: u64 = 1 << 32;

    fn none() -> Dirty {
        let ranges = [(GuestAddress(0), 130 * PAGE), (GuestAddress(HIGH), 64 * PAGE)];
        Dirty::none_of(&GuestMemoryMmap::from_ranges(&ranges).unwrap())
    }

    #[test]
    fn runs_are_the_pages_of_all_reports() {
        let mut dirty = none();
        dirty.add_bits(0, &[1 << 63, 0b111, 0]);
        let mut other = none();
        other.add_bits(HIGH, &[1]);
        other.add_bits(0, &[0, 0b1_0000]);
        dirty.add(&other);
        assert_eq!(dirty.pages(), 6);
        let page = |number: u64| number * 4096;
        assert_eq!(dirty.runs(3), [(page(63), 3), (page(66), 1), (page(68), 1), (HIGH, 1)]);
        assert_eq!(dirty.runs(256), [(page(63), 4), (page(68), 1), (HIGH, 1)]);
        dirty.add_bits(4096, &[u64::MAX]);
        assert_eq!(dirty.pages(), 6, "there is no such region");
    }

    #[test]
    fn a_range_may_be_outside_of_memory() {
        for (start, bytes, runs) in [
            (0, 1, vec![(0, 1)]),
            (4095, 2, vec![(0, 2)]),
            (4096, 4096, vec![(4096, 1)]),
            (129 * 4096, 8192, vec![(129 * 4096, 1)]),
            (5, 0, vec![]),
            (HIGH - 1, 2, vec![(HIGH, 1)]),
            (HIGH + 63 * 4096, u64::MAX, vec![(HIGH + 63 * 4096, 1)]),
            (HIGH + 64 * 4096, 4096, vec![]),
            (u64::MAX, 1, vec![]),
            (1 << 31, 4096, vec![]),
        ] {
            let mut dirty = none();
            dirty.add_range(start, bytes);
            assert_eq!(dirty.runs(1000), runs, "{bytes} at {start:#x}");
        }
    }
}
