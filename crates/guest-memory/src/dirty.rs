//! Log of the pages that the device may have written, for a VMM that copies guest memory while the guest runs.
//!
//! A page counts as written when a part of it is lent for writing ([`DmaView::piece`](crate::DmaView::piece)), before
//! any byte is. A report takes the bits and then waits for all views: writes from before the bits were taken are
//! complete when the report is answered, and later writes are in the next report.
//!
//! The log is kept by bus address, so that it outlives a range that is removed and added again.

use std::sync::Arc;

use pvrdma_handover::DirtyBitmap;
use pvrdma_pages::PAGE_SIZE;
use thiserror::Error;

use super::{Charge, DmaRange, Kept, MemoryBudget, OverBudget};

/// Maximum number of accessible ranges of a space whose writes can be logged. A VMM maps a few dozen. More than that
/// come from a virtual IOMMU, which maps single pages: a log by bus address would not name the guest's pages.
const MAX_RANGES: usize = 512;

/// Reason why writes are not logged or not reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DirtyLogError {
    /// A log exists already.
    #[error("the log of written pages is already on")]
    On,
    /// There is no log.
    #[error("the log of written pages is off")]
    Off,
    /// A range is empty, extends past the end of the address space, overlaps another, or is not whole pages.
    #[error("{iova:#x}+{len:#x} cannot be logged")]
    Range {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A page size is no power of two, or is below 4 KiB.
    #[error("written pages are not reported in units of {0} bytes")]
    PageSize(u64),
    /// A report concerns addresses that are not logged.
    #[error("writes to {iova:#x}+{len:#x} are not logged")]
    NotLogged {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The memory map is that of a virtual IOMMU.
    #[error("the memory is mapped in {0} pieces, as by a virtual IOMMU: written pages cannot be logged")]
    Pieces(usize),
    /// The budget has no room for the bitmap.
    #[error(transparent)]
    Budget(#[from] OverBudget),
}

/// Range of bus addresses whose writes are logged.
#[derive(Debug)]
struct Logged {
    /// First bus address, page-aligned.
    iova: u64,
    /// Last bus address.
    last: u64,
    pages: DirtyBitmap,
}

/// The log.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    /// In the order of their addresses, neither overlapping nor adjacent.
    ranges: Vec<Logged>,
    _charge: Charge,
}

impl DirtyLog {
    /// Creates a log for these ranges (first address, bytes).
    pub(crate) fn new(ranges: &[(u64, u64)], budget: &Arc<MemoryBudget>) -> Result<Self, DirtyLogError> {
        let mut bounds =
            ranges.iter().map(|&(iova, len)| bounds(iova, len, PAGE_SIZE)).collect::<Result<Vec<_>, _>>()?;
        bounds.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (iova, last) in bounds {
            match merged.last_mut() {
                Some((_, before)) if *before >= iova => {
                    return Err(DirtyLogError::Range { iova, len: (last - iova).saturating_add(1) });
                }
                Some((_, before)) if before.checked_add(1) == Some(iova) => *before = last,
                _ => merged.push((iova, last)),
            }
        }
        let pages = |(iova, last): (u64, u64)| (last - iova) / PAGE_SIZE + 1;
        let bytes =
            merged.iter().map(|&range| DirtyBitmap::bytes(pages(range)).saturating_add(size_of::<Logged>() as u64));
        let bytes = bytes.fold(0, u64::saturating_add);
        let charge = budget.charge(Kept::Migration, bytes)?;
        // Fits: the bitmap is within the budget.
        let count = |range| usize::try_from(pages(range)).unwrap_or(0);
        let logged = |range: (u64, u64)| Logged { iova: range.0, last: range.1, pages: DirtyBitmap::new(count(range)) };
        Ok(Self { ranges: merged.into_iter().map(logged).collect(), _charge: charge })
    }

    /// Refuses the memory map of a virtual IOMMU.
    pub(crate) fn check(map: &[DmaRange]) -> Result<(), DirtyLogError> {
        let pieces = map.iter().filter(|range| range.backing.is_some()).count();
        if pieces > MAX_RANGES { Err(DirtyLogError::Pieces(pieces)) } else { Ok(()) }
    }

    /// Marks the pages of `addr..addr+len`, which is mapped and not empty. The caller holds a view.
    #[cold]
    #[inline(never)]
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let end = addr.saturating_add(len.saturating_sub(1));
        let first = self.ranges.partition_point(|range| range.last < addr);
        for range in self.ranges.iter().skip(first).take_while(|range| range.iova <= end) {
            let page = |addr: u64| usize::try_from((addr - range.iova) / PAGE_SIZE).unwrap_or(usize::MAX);
            range.pages.mark(page(addr.max(range.iova)), page(end.min(range.last)));
        }
    }

    /// Takes the bits of `iova..iova+len`, and returns them with one bit for each `page_size` bytes, the lowest bit
    /// first, in whole words of 64 bits. The caller waits for all views before it uses them.
    pub(crate) fn take(&self, iova: u64, len: u64, page_size: u64) -> Result<Vec<u64>, DirtyLogError> {
        if !page_size.is_power_of_two() || page_size < PAGE_SIZE {
            return Err(DirtyLogError::PageSize(page_size));
        }
        let (iova, last) = bounds(iova, len, page_size)?;
        let index = self.ranges.partition_point(|range| range.last < iova);
        let inside = self.ranges.get(index).filter(|range| range.iova <= iova && range.last >= last);
        let range = inside.ok_or(DirtyLogError::NotLogged { iova, len })?;
        let page = |addr: u64| (addr - range.iova) / PAGE_SIZE;
        let (first, end, scale) = (page(iova), page(last), page_size / PAGE_SIZE);
        let units = usize::try_from((end - first) / scale / 64).unwrap_or(usize::MAX);
        let mut bits = vec![0_u64; units.saturating_add(1)];
        for index in first / 64..=end / 64 {
            let base = index * 64;
            let (from, to) = (first.max(base) - base, end.min(base + 63) - base);
            // Pages beside the reported ones stay in the log.
            let wanted = u64::MAX << from & u64::MAX >> (63 - to);
            let mut taken = range.pages.take(usize::try_from(index).unwrap_or(usize::MAX), wanted);
            while taken != 0 {
                let unit = (base + u64::from(taken.trailing_zeros()) - first) / scale;
                if let Some(word) = usize::try_from(unit / 64).ok().and_then(|word| bits.get_mut(word)) {
                    *word |= 1 << (unit % 64);
                }
                taken &= taken - 1;
            }
        }
        Ok(bits)
    }
}

/// Returns the first and the last address of a range that consists of whole pages of `page_size` bytes, a power of two.
fn bounds(iova: u64, len: u64, page_size: u64) -> Result<(u64, u64), DirtyLogError> {
    let wrong = DirtyLogError::Range { iova, len };
    if (iova | len) & (page_size - 1) != 0 {
        return Err(wrong);
    }
    let last = len.checked_sub(1).and_then(|len| iova.checked_add(len)).ok_or(wrong)?;
    Ok((iova, last))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;
    use vm_memory::mmap::MmapRegion;

    use super::*;
    use crate::{Backing, Direction, DmaSpace, DmaView, PinPolicy};

    const BASE: u64 = 0x10_0000;
    const PAGES: u64 = 200;
    /// Adjacent ranges, which are logged as one.
    const MAP: [(u64, u64); 2] = [(BASE, 70 * PAGE_SIZE), (BASE + 70 * PAGE_SIZE, 130 * PAGE_SIZE)];

    fn budget() -> Arc<MemoryBudget> {
        MemoryBudget::new(1 << 20)
    }

    fn map(space: &DmaSpace, iova: u64, len: u64) {
        let mapping = Arc::new(MmapRegion::new(usize::try_from(len).unwrap()).unwrap());
        space.map(DmaRange { iova, len, writable: true, backing: Some(Backing { mapping, offset: 0 }) }).unwrap();
    }

    fn space() -> Arc<DmaSpace> {
        let space = DmaSpace::new(PinPolicy::Off);
        MAP.iter().for_each(|&(iova, len)| map(&space, iova, len));
        space
    }

    /// Copies the pages that a report names.
    fn copy(space: &DmaSpace, (first, count): (u64, u64), page_size: u64, to: &mut [u8]) {
        let (iova, len) = (BASE + first * page_size, count * page_size);
        let bits = space.report_dirty(iova, len, page_size).unwrap();
        assert_eq!(bits.len() as u64, count.div_ceil(64));
        let view = space.view();
        for unit in (0..bits.len() as u64 * 64).filter(|unit| bits[(unit / 64) as usize] >> (unit % 64) & 1 != 0) {
            assert!(unit < count);
            let from = iova + unit * page_size;
            let at = usize::try_from(from - BASE).unwrap();
            view.read(from, &mut to[at..at + usize::try_from(page_size).unwrap()]).unwrap();
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, Vec<u8>),
        Word(u64, u32),
        Atomic(u64, u64),
        /// A report of a part, in units of `4096 << shift` bytes.
        Report {
            shift: u32,
            first: u64,
            count: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let size = PAGES * PAGE_SIZE;
        prop_oneof![
            8 => (0..size - 20_000, prop::collection::vec(any::<u8>(), 1..20_000)).prop_map(|(at, data)| Step::Write(at, data)),
            4 => (0..size / 4, any::<u32>()).prop_map(|(at, value)| Step::Word(at * 4, value)),
            4 => (0..size / 8, any::<u64>()).prop_map(|(at, value)| Step::Atomic(at * 8, value)),
            4 => (0..4_u32, any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(|(shift, first, count)| {
                let units = usize::try_from(PAGES >> shift).unwrap();
                let first = first.index(units);
                Step::Report { shift, first: first as u64, count: 1 + count.index(units - first) as u64 }
            }),
        ]
    }

    fn run(view: &DmaView<'_>, step: &Step) {
        match step {
            Step::Write(at, data) => view.write(BASE + at, data).unwrap(),
            Step::Word(at, value) => view.store_u32(BASE + at, *value, Ordering::Relaxed).unwrap(),
            Step::Atomic(at, value) => _ = view.update_u64(BASE + at, |old| Some(old ^ value)).unwrap(),
            Step::Report { .. } => {}
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A VMM that copies the reported pages ends up with the exact memory of the guest.
        #[test]
        fn a_copy_by_the_log_is_exact(steps in prop::collection::vec(step(), 1..40)) {
            let space = space();
            let mut copied = vec![0; usize::try_from(PAGES * PAGE_SIZE).unwrap()];
            space.view().write(BASE, &[1; 100]).unwrap();
            space.start_dirty_log(&MAP, &budget()).unwrap();
            space.view().read(BASE, &mut copied).unwrap();
            for step in &steps {
                match *step {
                    Step::Report { shift, first, count } => copy(&space, (first, count), PAGE_SIZE << shift, &mut copied),
                    ref step => run(&space.view(), step),
                }
            }
            copy(&space, (0, PAGES), PAGE_SIZE, &mut copied);
            let mut now = vec![0; copied.len()];
            space.view().read(BASE, &mut now).unwrap();
            prop_assert!(copied == now);
            // Nothing was written since.
            prop_assert!(space.report_dirty(BASE, PAGES * PAGE_SIZE, PAGE_SIZE).unwrap().iter().all(|&word| word == 0));
        }
    }

    #[test]
    fn reading_marks_nothing_and_lending_marks_whole_pages() {
        let space = space();
        space.start_dirty_log(&MAP, &budget()).unwrap();
        let view = space.view();
        view.read(BASE, &mut [0; 9000]).unwrap();
        view.slice(BASE + 4 * PAGE_SIZE - 1, 2, Direction::Write).unwrap();
        drop(view);
        assert_eq!(space.report_dirty(BASE, 64 * PAGE_SIZE, PAGE_SIZE).unwrap(), [0b11000]);
    }

    #[test]
    fn the_log_outlives_a_range_and_covers_only_its_own_pages() {
        let space = space();
        space.start_dirty_log(&[(BASE + PAGE_SIZE, 2 * PAGE_SIZE)], &budget()).unwrap();
        space.view().write(BASE, &[1; 4 * 4096]).unwrap();
        space.unmap(MAP[0].0, MAP[0].1).unwrap();
        map(&space, MAP[0].0, MAP[0].1);
        let report = |iova, len| space.report_dirty(iova, len, PAGE_SIZE);
        assert_eq!(report(BASE + 2 * PAGE_SIZE, PAGE_SIZE), Ok(vec![1]));
        assert_eq!(report(BASE + PAGE_SIZE, 2 * PAGE_SIZE), Ok(vec![1]));
        for (iova, len) in [(BASE, PAGE_SIZE), (BASE + 2 * PAGE_SIZE, 2 * PAGE_SIZE), (0, PAGE_SIZE)] {
            assert_eq!(report(iova, len), Err(DirtyLogError::NotLogged { iova, len }));
        }
    }

    #[test]
    fn malformed_requests_are_refused_and_nothing_is_kept() {
        let (space, budget) = (space(), budget());
        let start = |ranges: &[(u64, u64)]| space.start_dirty_log(ranges, &budget);
        for (iova, len) in [(0, 0), (1, PAGE_SIZE), (0, 1), (u64::MAX - 4095, 8192)] {
            assert_eq!(start(&[(iova, len)]), Err(DirtyLogError::Range { iova, len }));
        }
        assert!(matches!(start(&[(0, 8192), (4096, 4096)]), Err(DirtyLogError::Range { .. })));
        assert!(matches!(start(&[(0, u64::MAX - 4095)]), Err(DirtyLogError::Budget(_))));
        assert!(matches!(start(&[(0, 1 << 40), (1 << 50, 1 << 40)]), Err(DirtyLogError::Budget(_))));
        assert_eq!((budget.used(), space.report_dirty(0, 4096, 4096)), (0, Err(DirtyLogError::Off)));
        // The last page of the address space.
        start(&[(u64::MAX - 4095, 4096), (0, 4096)]).unwrap();
        assert!(budget.used_for(Kept::Migration) > 0);
        assert_eq!(start(&MAP), Err(DirtyLogError::On));
        assert_eq!(space.report_dirty(u64::MAX - 4095, 4096, 4096), Ok(vec![0]));
        for page_size in [0, 1, 2048, 4097, 12288] {
            assert_eq!(space.report_dirty(0, 4096, page_size), Err(DirtyLogError::PageSize(page_size)));
        }
        for (iova, len, page_size) in [(0, 0, 4096), (0, 4096, 8192), (4096, 8192, 8192), (u64::MAX - 4095, 8192, 4096)]
        {
            assert_eq!(space.report_dirty(iova, len, page_size), Err(DirtyLogError::Range { iova, len }));
        }
        assert!(space.has_dirty_log());
        space.stop_dirty_log();
        assert!(!space.has_dirty_log() && budget.used() == 0);
    }

    /// A virtual IOMMU maps single pages, and the guest changes which.
    #[test]
    fn memory_behind_a_virtual_iommu_is_refused() {
        let space = DmaSpace::new(PinPolicy::Off);
        let mapping = Arc::new(MmapRegion::new(4096).unwrap());
        for page in 0..=MAX_RANGES as u64 {
            let backing = Some(Backing { mapping: Arc::clone(&mapping), offset: 0 });
            space.map(DmaRange { iova: page * 8192, len: 4096, writable: true, backing }).unwrap();
        }
        assert_eq!(space.start_dirty_log(&[(0, 4096)], &budget()), Err(DirtyLogError::Pieces(MAX_RANGES + 1)));
        space.unmap(0, 4096).unwrap();
        space.start_dirty_log(&[(0, 4096)], &budget()).unwrap();
    }
}
