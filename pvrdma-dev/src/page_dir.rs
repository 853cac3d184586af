//! Page directories: the driver's description of the pages of an object (spec §5).
//!
//! They consist of three levels of untrusted little-endian bus addresses. Each page of the directory and its tables is
//! copied once, and only as far as the stated page count requires, so the work is bounded by 513 page copies, whatever
//! the guest has written.

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_pages::{PAGE_SIZE, PageList, PageListBuilder};

use crate::abi::ring::{MAX_PAGES, TABLE_ENTRIES};

/// Size of an entry in bytes.
const ENTRY: usize = 8;

/// Size of a directory or table page in bytes.
const LEVEL: usize = TABLE_ENTRIES as usize * ENTRY;

/// Reads the page addresses of an object of `pages` pages.
///
/// # Errors
/// The page count is not in `1..=262144`, the directory or a table cannot be read, or a required entry is zero or not
/// page aligned. The data pages themselves are not checked, see [`check_mapped`].
pub(crate) fn read_page_directory(view: &DmaView<'_>, pdir_dma: u64, pages: u32) -> Result<PageList, DmaError> {
    if pages == 0 || pages > MAX_PAGES {
        return Err(DmaError::Unmapped { addr: pdir_dma, len: u64::from(pages).saturating_mul(PAGE_SIZE) });
    }
    let tables = Level::read(view, pdir_dma, pages.div_ceil(TABLE_ENTRIES))?;
    let mut builder = PageListBuilder::default();
    let mut left = pages;
    for table in tables.entries() {
        let count = left.min(TABLE_ENTRIES);
        let table = Level::read(view, table, count)?;
        for page in table.entries() {
            builder.push(page)?;
        }
        left = left.saturating_sub(count);
    }
    Ok(builder.finish())
}

/// Checks that the device can access every page of a list. Rings are checked when they are created, so a bad address
/// fails the command instead of breaking the queue later. Takes one look-up per contiguous piece.
///
/// # Errors
/// The first address that cannot be accessed.
pub(crate) fn check_mapped(view: &DmaView<'_>, pages: &PageList, direction: Direction) -> Result<(), DmaError> {
    for extent in pages.extents() {
        let (mut addr, mut left) = (extent.iova, extent.bytes());
        while left > 0 {
            let got = view.piece(addr, left, direction)?.len() as u64;
            left = left.saturating_sub(got);
            addr = addr.wrapping_add(got);
        }
    }
    Ok(())
}

/// Copy of the used entries of a directory or table page.
struct Level {
    bytes: [u8; LEVEL],
    used: usize,
}

impl Level {
    fn read(view: &DmaView<'_>, addr: u64, entries: u32) -> Result<Self, DmaError> {
        if addr == 0 || !addr.is_multiple_of(PAGE_SIZE) {
            return Err(DmaError::Misaligned { addr });
        }
        let mut level = Self { bytes: [0; LEVEL], used: entries.min(TABLE_ENTRIES) as usize * ENTRY };
        let (used, _) = level.bytes.split_at_mut(level.used);
        view.read(addr, used)?;
        Ok(level)
    }

    fn entries(&self) -> impl Iterator<Item = u64> + '_ {
        let (entries, _) = self.bytes.as_chunks::<ENTRY>();
        entries.iter().take(self.used / ENTRY).map(|entry| u64::from_le_bytes(*entry))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use pvrdma_guest_memory::{DmaSpace, PinPolicy};
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    const BASE: u64 = 0x10_0000;
    const SIZE: usize = 0x10_0000;

    fn space() -> Arc<DmaSpace> {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(BASE), SIZE)]).unwrap();
        DmaSpace::from_guest_memory(&memory, PinPolicy::Off).unwrap()
    }

    fn put(view: &DmaView<'_>, addr: u64, entries: &[u64]) {
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_le_bytes()).collect();
        view.write(addr, &bytes).unwrap();
    }

    /// Three levels, 513 pages: two tables, and entries past the count are never followed.
    #[test]
    fn two_tables() {
        let space = space();
        let view = space.view();
        let (dir, first, second) = (BASE, BASE + 0x1000, BASE + 0x2000);
        put(&view, dir, &[first, second, 0xdead]);
        put(&view, first, &(0..512).map(|i| BASE + 0x1000 * (i % 200 + 3)).collect::<Vec<_>>());
        put(&view, second, &[BASE + 0x3000, 0xdead]);
        let list = read_page_directory(&view, dir, 513).unwrap();
        assert_eq!(list.pages(), 513);
        assert_eq!(list.locate(511 * PAGE_SIZE).unwrap().0, BASE + 0x1000 * (511 % 200 + 3));
        assert_eq!(list.locate(512 * PAGE_SIZE).unwrap().0, BASE + 0x3000);
        assert!(check_mapped(&view, &list, Direction::Write).is_ok());
        assert!(read_page_directory(&view, dir, 514).is_err(), "the 514th entry is not an address");
        assert!(read_page_directory(&view, dir, 1025).is_err(), "the third table has no address");
    }

    #[test]
    fn bad_counts_and_addresses() {
        let space = space();
        let view = space.view();
        put(&view, BASE, &[BASE + 0x1000]);
        put(&view, BASE + 0x1000, &[0xffff_f000]);
        assert!(read_page_directory(&view, BASE, 0).is_err());
        assert!(read_page_directory(&view, BASE, MAX_PAGES + 1).is_err());
        assert!(read_page_directory(&view, BASE, u32::MAX).is_err());
        for dir in [0, BASE + 8, BASE - 0x1000, BASE + SIZE as u64, u64::MAX, !0xfff] {
            assert!(read_page_directory(&view, dir, 1).is_err(), "{dir:#x}");
        }
        let list = read_page_directory(&view, BASE, 1).unwrap();
        assert!(check_mapped(&view, &list, Direction::Read).is_err());
    }

    /// The largest object: a directory may name the same table, and a table the same page, any number of times.
    #[test]
    fn the_most_pages() {
        let space = space();
        let view = space.view();
        put(&view, BASE, &[BASE + 0x1000; 512]);
        put(&view, BASE + 0x1000, &[BASE + 0x2000; 512]);
        assert_eq!(read_page_directory(&view, BASE, MAX_PAGES).unwrap().pages(), MAX_PAGES);
        assert!(read_page_directory(&view, BASE, MAX_PAGES + 1).is_err());
    }

    /// An address that is not page aligned is refused, whatever is stored there.
    #[test]
    fn a_directory_is_a_page_and_not_the_first() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), SIZE)]).unwrap();
        let space = DmaSpace::from_guest_memory(&memory, PinPolicy::Off).unwrap();
        let view = space.view();
        for dir in [0, 0x1000, 0x1008] {
            put(&view, dir, &[0x2000]);
        }
        put(&view, 0x2000, &[0x3000]);
        assert!(read_page_directory(&view, 0x1000, 1).is_ok());
        for dir in [0, 0x1008] {
            let refused = read_page_directory(&view, dir, 1).unwrap_err();
            assert!(matches!(refused, DmaError::Misaligned { addr } if addr == dir), "{refused:?}");
        }
        // The same holds for a table.
        for table in [0, 0x1008] {
            put(&view, 0x1000, &[table]);
            put(&view, 0, &[0x3000]);
            put(&view, 0x1008, &[0x3000]);
            assert!(read_page_directory(&view, 0x1000, 1).is_err(), "{table:#x}");
        }
    }

    /// For every single invalid entry around the end of each table, the object is refused exactly if it needs that
    /// entry.
    #[test]
    fn every_entry_that_is_needed_is_checked() {
        let space = space();
        let view = space.view();
        let tables = [BASE + 0x1000, BASE + 0x2000, BASE + 0x3000];
        let page = |number: u32| BASE + PAGE_SIZE * u64::from(number % 200 + 4);
        put(&view, BASE, &tables);
        let entry = |number: u32| tables[(number / 512) as usize] + u64::from(number % 512) * 8;
        (0..1536).for_each(|number| put(&view, entry(number), &[page(number)]));
        for pages in [1, 2, 511, 512, 513, 1023, 1024, 1025] {
            for bad in 0..1536 {
                for address in [0, page(bad) + 1] {
                    put(&view, entry(bad), &[address]);
                    let list = read_page_directory(&view, BASE, pages);
                    assert_eq!(list.is_err(), bad < pages, "{pages} pages, entry {bad} is {address:#x}");
                }
                put(&view, entry(bad), &[page(bad)]);
            }
            let list = read_page_directory(&view, BASE, pages).unwrap();
            assert!((0..pages).all(|n| list.locate(u64::from(n) * PAGE_SIZE).unwrap().0 == page(n)));
            assert!(list.locate(u64::from(pages) * PAGE_SIZE).is_none());
        }
    }

    proptest! {
        /// Any content, including directories that name themselves, yields a list of the right length or an error.
        #[test]
        fn random_directories(
            entries in proptest::collection::vec(
                prop_oneof![(0u64..40).prop_map(|p| BASE + p * PAGE_SIZE), any::<u64>(), Just(0)], 512),
            dir in (0u64..4).prop_map(|p| BASE + p * PAGE_SIZE),
            pages in prop_oneof![1u32..1100, any::<u32>(), Just(MAX_PAGES)],
        ) {
            let space = space();
            let view = space.view();
            for page in 0..40 {
                put(&view, BASE + page * PAGE_SIZE, &entries);
            }
            if let Ok(list) = read_page_directory(&view, dir, pages) {
                prop_assert_eq!(list.pages(), pages);
                let _ = check_mapped(&view, &list, Direction::Write);
            }
        }
    }
}
