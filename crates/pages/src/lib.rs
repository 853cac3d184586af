//! Lists of guest pages, stored as merged extents.
//!
//! A guest describes a ring or a memory region as a list of page addresses. [`PageListBuilder`] checks each address and
//! merges adjacent pages; [`PageList`] maps an offset in the object to a bus address. The list holds numbers only: the
//! memory at an address, and the permission to access it, are checked with each access.
//!
//! The crate is `no_std`, so that protocol code can use page lists without depending on guest memory.
//!
//! # Example
//!
//! ```
//! use pvrdma_pages::{PAGE_SIZE, PageListBuilder};
//!
//! let mut builder = PageListBuilder::default();
//! for page in [0x1000, 0x2000, 0x8000] {
//!     builder.push(page)?;
//! }
//! let list = builder.finish();
//! assert_eq!((list.pages(), list.extents().len()), (3, 2));
//! // The bus address of a byte, and how many bytes follow it without a gap.
//! assert_eq!(list.locate(0x1800), Some((0x2800, 0x800)));
//! assert_eq!(list.locate(3 * PAGE_SIZE), None);
//! # Ok::<(), pvrdma_pages::PageError>(())
//! ```

#![cfg_attr(not(test), no_std)]

extern crate alloc;

use alloc::boxed::Box;
use alloc::vec::Vec;

use thiserror::Error;

/// Bytes per guest page.
pub const PAGE_SIZE: u64 = 4096;

/// Reason why an address cannot be part of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PageError {
    /// The address is 0 or not aligned to [`PAGE_SIZE`].
    #[error("page address {addr:#x} is not aligned")]
    Misaligned {
        /// The address.
        addr: u64,
    },
    /// The page reaches the end of the address space, or the list has its maximum number of pages.
    #[error("page address {addr:#x} is out of range")]
    OutOfRange {
        /// The address.
        addr: u64,
    },
}

/// A run of adjacent pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Index of the first page in the list.
    first: u32,
    /// Number of pages.
    count: u32,
    /// Bus address of the first page.
    pub iova: u64,
}

impl Extent {
    /// Length in bytes.
    pub const fn bytes(&self) -> u64 {
        self.count as u64 * PAGE_SIZE
    }

    /// Number of pages.
    pub const fn pages(&self) -> u32 {
        self.count
    }

    /// Returns the index in the list of the first page after the extent.
    const fn end(&self) -> u32 {
        // This cannot wrap: the builder counts the pages of a list in a u32.
        self.first.wrapping_add(self.count)
    }
}

/// The pages of one object, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageList(Extents);

/// Storage of the extents. A single extent needs no allocation: most objects are small or contiguous, and a guest may
/// have tens of thousands of them.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Extents {
    One(Extent),
    Other(Box<[Extent]>),
}

impl Default for PageList {
    fn default() -> Self {
        Self(Extents::Other(Box::default()))
    }
}

impl PageList {
    fn new(extents: Vec<Extent>) -> Self {
        match *extents {
            [only] => Self(Extents::One(only)),
            _ => Self(Extents::Other(extents.into_boxed_slice())),
        }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.extents().last().map_or(0, Extent::end)
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages()) * PAGE_SIZE
    }

    /// Returns the merged extents.
    pub const fn extents(&self) -> &[Extent] {
        match &self.0 {
            Extents::One(only) => core::slice::from_ref(only),
            Extents::Other(extents) => extents,
        }
    }

    /// Returns the size in bytes of the list's heap allocation.
    pub const fn heap_bytes(&self) -> usize {
        match &self.0 {
            Extents::One(_) => 0,
            Extents::Other(extents) => size_of_val::<[Extent]>(extents),
        }
    }

    /// Returns a list of `count` of the pages, starting at index `first`. `None` if the list has fewer.
    pub fn part(&self, first: u32, count: u32) -> Option<Self> {
        let end = first.checked_add(count).filter(|&end| end <= self.pages())?;
        let inside = self.extents().iter().filter_map(|extent| {
            let (from, to) = (extent.first.max(first), extent.end().min(end));
            let skipped = u64::from(from.wrapping_sub(extent.first)) * PAGE_SIZE;
            (from < to).then(|| Extent { first: from - first, count: to - from, iova: extent.iova + skipped })
        });
        Some(Self::new(inside.collect()))
    }

    /// Returns the bus address of byte `offset` and the number of bytes from there on that are contiguous in bus space.
    // Always inline: every copy calls this for each list, and almost all lists are one extent.
    #[inline(always)]
    pub fn locate(&self, offset: u64) -> Option<(u64, u64)> {
        let extent = match &self.0 {
            Extents::One(only) => only,
            Extents::Other(extents) => Self::extent_at(extents, offset)?,
        };
        let into = offset - u64::from(extent.first) * PAGE_SIZE;
        let left = extent.bytes().checked_sub(into).filter(|&left| left > 0)?;
        Some((extent.iova + into, left))
    }

    /// Returns the last extent that begins at or before byte `offset`.
    #[inline(never)]
    fn extent_at(extents: &[Extent], offset: u64) -> Option<&Extent> {
        let after = extents.partition_point(|e| u64::from(e.first) * PAGE_SIZE <= offset);
        extents.get(after.checked_sub(1)?)
    }
}

/// Builds a [`PageList`] from page addresses.
#[derive(Debug, Default)]
pub struct PageListBuilder {
    extents: Vec<Extent>,
    pages: u32,
}

impl PageListBuilder {
    /// Appends one page.
    ///
    /// # Errors
    /// The address is 0, not page aligned or at the very end of the address space.
    pub fn push(&mut self, iova: u64) -> Result<(), PageError> {
        self.push_run(iova, 1)
    }

    /// Appends all pages of another list.
    ///
    /// # Errors
    /// The list would have more than its maximum number of pages.
    pub fn append(&mut self, list: &PageList) -> Result<(), PageError> {
        list.extents().iter().try_for_each(|extent| self.push_run(extent.iova, extent.count))
    }

    /// Appends `count` adjacent pages.
    ///
    /// # Errors
    /// As for [`Self::push`], for any of the pages; or there is none. The list is unchanged then.
    pub fn push_run(&mut self, iova: u64, count: u32) -> Result<(), PageError> {
        if iova == 0 || !iova.is_multiple_of(PAGE_SIZE) {
            return Err(PageError::Misaligned { addr: iova });
        }
        // An extent must not reach past the top of the address space, so that the sums below cannot overflow.
        let out_of_range = PageError::OutOfRange { addr: iova };
        let bytes = u64::from(count).checked_mul(PAGE_SIZE).filter(|&bytes| bytes > 0).ok_or(out_of_range)?;
        iova.checked_add(bytes).ok_or(out_of_range)?;
        let index = self.pages;
        self.pages = index.checked_add(count).ok_or(out_of_range)?;
        match self.extents.last_mut() {
            Some(last) if last.iova + last.bytes() == iova => last.count += count,
            _ => self.extents.push(Extent { first: index, count, iova }),
        }
        Ok(())
    }

    /// Returns the number of pages so far.
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the size in bytes of the list's heap allocation so far.
    pub const fn heap_bytes(&self) -> usize {
        self.extents.capacity() * size_of::<Extent>()
    }

    /// Finishes the list.
    pub fn finish(self) -> PageList {
        PageList::new(self.extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(pages: &[u64]) -> PageList {
        let mut builder = PageListBuilder::default();
        for &page in pages {
            builder.push(page).unwrap();
        }
        builder.finish()
    }

    #[test]
    fn neighbours_merge() {
        let list = list(&[0x3000, 0x4000, 0x1000, 0x2000, 0x3000]);
        assert_eq!(list.extents().len(), 2);
        assert_eq!(list.locate(0x1fff), Some((0x4fff, 1)));
        assert_eq!(list.locate(0x2000), Some((0x1000, 0x3000)));
        assert_eq!(list.locate(0x5000), None);
        assert_eq!((list.locate(0x1800), list.locate(0x2000)), (Some((0x4800, 0x800)), Some((0x1000, 0x3000))));
    }

    #[test]
    fn bad_addresses_are_refused() {
        for bad in [0, 1, 0x1001, u64::MAX, u64::MAX - 4095] {
            assert!(PageListBuilder::default().push(bad).is_err(), "{bad:#x}");
        }
    }

    proptest! {
        /// A part equals the list built from its pages alone.
        #[test]
        fn parts_have_the_pages_of_their_range(
            pages in proptest::collection::vec(1u64..8, 1..40), first in 0u32..44, count in 0u32..44,
        ) {
            let addresses: Vec<u64> = pages.iter().map(|p| p * PAGE_SIZE).collect();
            let range = first as usize..(first + count) as usize;
            let expected = addresses.get(range).map(list);
            prop_assert_eq!(list(&addresses).part(first, count), expected);
        }

        /// Every byte resolves to its page, however pages merge.
        #[test]
        fn locates_every_page(pages in proptest::collection::vec(1u64..64, 1..100)) {
            let addresses: Vec<u64> = pages.iter().map(|p| p * PAGE_SIZE).collect();
            let list = list(&addresses);
            for (i, &page) in addresses.iter().enumerate() {
                let (addr, left) = list.locate(i as u64 * PAGE_SIZE + 7).unwrap();
                prop_assert_eq!(addr, page + 7);
                prop_assert!(left >= PAGE_SIZE - 7);
            }
            prop_assert_eq!(list.locate(list.bytes()), None);
            // The pieces add up to the length of the list.
            let (mut offset, end) = (5, list.bytes());
            while let Some((_, contiguous)) = list.locate(offset) {
                offset += contiguous;
            }
            prop_assert_eq!(offset, end);
        }
    }
}
