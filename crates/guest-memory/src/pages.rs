//! Lists of guest pages, stored as merged extents.

use super::DmaError;

/// Bytes per guest page.
pub const PAGE_SIZE: u64 = 4096;

/// Adjacent pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Index of the first page in the list.
    first: u32,
    /// How many pages.
    count: u32,
    /// Bus address of the first page.
    pub iova: u64,
}

impl Extent {
    /// Bytes.
    pub const fn bytes(&self) -> u64 {
        self.count as u64 * PAGE_SIZE
    }
}

/// The pages of one object in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PageList {
    extents: Box<[Extent]>,
    pages: u32,
}

impl PageList {
    /// Number of pages.
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes.
    pub const fn bytes(&self) -> u64 {
        self.pages as u64 * PAGE_SIZE
    }

    /// The merged extents.
    pub const fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Bus address of byte `offset` and how many bytes from there on are contiguous in bus space.
    #[inline]
    pub fn locate(&self, offset: u64) -> Option<(u64, u64)> {
        let extent = match &*self.extents {
            [only] => only,
            extents => {
                let after = extents.partition_point(|e| u64::from(e.first) * PAGE_SIZE <= offset);
                extents.get(after.checked_sub(1)?)?
            }
        };
        let into = offset - u64::from(extent.first) * PAGE_SIZE;
        (into < extent.bytes()).then(|| (extent.iova + into, extent.bytes() - into))
    }
}

/// Collects page addresses.
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
    pub fn push(&mut self, iova: u64) -> Result<(), DmaError> {
        if iova == 0 || !iova.is_multiple_of(PAGE_SIZE) {
            return Err(DmaError::Misaligned { addr: iova });
        }
        // An extent may not reach past the top of the address space, so sums below cannot overflow.
        if iova.checked_add(PAGE_SIZE).is_none() {
            return Err(DmaError::Unmapped { addr: iova, len: PAGE_SIZE });
        }
        let index = self.pages;
        self.pages = index.checked_add(1).ok_or(DmaError::Unmapped { addr: iova, len: PAGE_SIZE })?;
        match self.extents.last_mut() {
            Some(last) if last.iova + last.bytes() == iova => last.count += 1,
            _ => self.extents.push(Extent { first: index, count: 1, iova }),
        }
        Ok(())
    }

    /// Ends the list.
    pub fn finish(self) -> PageList {
        PageList { extents: self.extents.into_boxed_slice(), pages: self.pages }
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
            // Piece after piece, the list is as long as it says.
            let (mut offset, end) = (5, list.bytes());
            while let Some((_, contiguous)) = list.locate(offset) {
                offset += contiguous;
            }
            prop_assert_eq!(offset, end);
        }
    }
}
