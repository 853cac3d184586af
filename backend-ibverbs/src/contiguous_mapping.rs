//! Scattered guest pages, side by side in our address space, for an adapter that wants one range.
//!
//! Huge pages are mapped as a whole, so pieces of them lie side by side only where each ends where its huge page ends
//! and the next begins where its own begins.
#![expect(unsafe_code, reason = "mmap, mremap and munmap take addresses")]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pvrdma_guest_memory::HostPiece;
use pvrdma_verbs::LogLimit;
use vm_memory::mmap::MmapRegion;

use crate::limits::Share;

/// Guests decide how many mappings end.
static LOG: LogLimit = LogLimit::new();

/// Bytes of the host's ordinary pages.
const HOST_PAGE: usize = 4096;

/// A range of our address space with guest memory behind it.
#[derive(Debug)]
pub(crate) struct ContiguousMapping {
    start: NonNull<u8>,
    len: usize,
    /// What the pieces were mapped from. Without `reserved` the range is a part of it.
    _mappings: Vec<Arc<MmapRegion>>,
    /// What was mapped for it, start and bytes: the range, and what its first and last huge page have beside it.
    reserved: Option<(NonNull<u8>, usize)>,
    /// What its pieces count for.
    share: Option<Share>,
}

// SAFETY: the mapping only names the range; who accesses it is the adapter.
unsafe impl Send for ContiguousMapping {}
// SAFETY: likewise.
unsafe impl Sync for ContiguousMapping {}

/// Where pieces come to lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    /// Bytes of the first piece's page in front of it.
    lead: usize,
    /// Bytes of all pieces.
    len: usize,
    /// Bytes of the largest page behind them.
    page: usize,
}

impl Layout {
    fn of(pieces: &[HostPiece]) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let (mut layout, mut at) = (Self { lead: 0, len: 0, page: HOST_PAGE }, 0_usize);
        let mut sizes = PageSizes::default();
        for (number, piece) in pieces.iter().enumerate() {
            if piece.offset.checked_add(piece.len).is_none_or(|end| end > piece.mapping.size()) {
                return Err(invalid());
            }
            let page = sizes.of(piece);
            let from = file_offset(piece).ok_or_else(invalid)?;
            if number == 0 {
                layout.lead = from % page;
                at = layout.lead;
            }
            let end = at.checked_add(piece.len).ok_or_else(invalid)?;
            let begins = number == 0 || at.is_multiple_of(page) && from.is_multiple_of(page);
            let ends = number + 1 == pieces.len() || end.is_multiple_of(page);
            if !begins || !ends {
                let text = format!("the memory is scattered over pages of {page} bytes, which cannot lie side by side");
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            }
            at = end;
            layout.page = layout.page.max(page);
        }
        layout.len = at.checked_sub(layout.lead).filter(|&len| len > 0).ok_or_else(invalid)?;
        Ok(layout)
    }

    /// Bytes to reserve, so that the first piece can lie at its place in a page.
    fn reserved(&self) -> Option<usize> {
        let pages = self.lead.checked_add(self.len)?.checked_next_multiple_of(self.page)?;
        pages.checked_add(self.page - HOST_PAGE)
    }
}

/// Bytes of a page of the file behind a mapping.
pub(crate) fn page_size(mapping: &MmapRegion) -> usize {
    let stat = mapping.file_offset().and_then(|file| rustix::fs::fstatfs(file.file()).ok());
    let huge = stat.filter(|stat| stat.f_type == libc::HUGETLBFS_MAGIC);
    huge.and_then(|stat| usize::try_from(stat.f_bsize).ok()).unwrap_or(HOST_PAGE).max(HOST_PAGE)
}

/// Asks once for pieces of the same mapping that follow each other.
#[derive(Default)]
struct PageSizes<'a>(Option<(&'a Arc<MmapRegion>, usize)>);

impl<'a> PageSizes<'a> {
    fn of(&mut self, piece: &'a HostPiece) -> usize {
        let known = self.0.filter(|(mapping, _)| Arc::ptr_eq(mapping, &piece.mapping));
        let size = known.map_or_else(|| page_size(&piece.mapping), |(_, size)| size);
        self.0 = Some((&piece.mapping, size));
        size
    }
}

/// Where a piece begins in its file.
fn file_offset(piece: &HostPiece) -> Option<usize> {
    let start = piece.mapping.file_offset().map_or(0, |file| file.start());
    usize::try_from(start).ok()?.checked_add(piece.offset)
}

impl ContiguousMapping {
    /// Returns `true` if the pages behind the pieces allow that they lie side by side.
    pub(crate) fn is_possible(pieces: &[HostPiece]) -> bool {
        pieces.len() == 1 || Layout::of(pieces).is_ok()
    }

    /// Maps the pieces in order. A single piece is used where it is.
    ///
    /// # Errors
    /// The memory is not shared, huge pages stand in the way ([`Self::is_possible`]), or the system's limit of mappings
    /// is reached (`vm.max_map_count`; one for each piece).
    pub(crate) fn map(pieces: &[HostPiece]) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let mappings = pieces.iter().map(|piece| Arc::clone(&piece.mapping)).collect();
        if let [only] = pieces {
            if only.offset.checked_add(only.len).is_none_or(|end| end > only.mapping.size()) {
                return Err(invalid());
            }
            let start = NonNull::new(only.mapping.as_ptr().wrapping_add(only.offset)).ok_or_else(invalid)?;
            return Ok(Self { start, len: only.len, _mappings: mappings, reserved: None, share: None });
        }
        let layout = Layout::of(pieces)?;
        let size = layout.reserved().ok_or_else(invalid)?;
        // SAFETY: a new range that nothing else uses.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or_else(invalid)?;
        // Less than a page, so inside what was reserved.
        let skipped = reserved.as_ptr().addr().wrapping_neg() % layout.page + layout.lead;
        let start = NonNull::new(reserved.as_ptr().wrapping_add(skipped)).ok_or_else(invalid)?;
        // From here on dropping it gives the whole range back, however far the loop came.
        let reserved = Some((reserved, size));
        let whole = Self { start, len: layout.len, _mappings: mappings, reserved, share: None };
        let (mut to, mut sizes) = (whole.start.as_ptr(), PageSizes::default());
        for piece in pieces {
            place(piece, sizes.of(piece), to)?;
            to = to.wrapping_add(piece.len);
        }
        Ok(whole)
    }

    /// Keeps what its pieces count for until it is unmapped.
    pub(crate) fn paid_by(self, share: Share) -> Self {
        let mut mapping = self;
        mapping.share = Some(share);
        mapping
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Never gives the range back.
    pub(crate) fn leak(&mut self) {
        self.reserved = None;
        std::mem::forget(std::mem::take(&mut self._mappings));
        std::mem::forget(self.share.take());
    }
}

/// Maps a piece a second time, at `to`, with all of the pages (of `page` bytes) that it has a part of.
fn place(piece: &HostPiece, page: usize, to: *mut u8) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let mapped = if let Some(file) = piece.mapping.file_offset() {
        let offset = file_offset(piece).ok_or_else(invalid)?;
        let lead = offset % page;
        let len = piece.len.checked_add(lead).and_then(|len| len.checked_next_multiple_of(page)).ok_or_else(invalid)?;
        let offset = libc::off_t::try_from(offset - lead).map_err(|_| invalid())?;
        let protection = if piece.writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let to = to.wrapping_sub(lead);
        // SAFETY: only the first piece of a layout begins inside a page and only the last one ends there, so these
        // pages are inside a range that the caller reserved and nobody else uses.
        unsafe { libc::mmap(to.cast(), len, protection, flags, file.file().as_raw_fd(), offset) }
    } else {
        let from = piece.mapping.as_ptr().wrapping_add(piece.offset);
        // Without an old size, a shared mapping is mapped a second time.
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: likewise, and the old mapping stays as it is.
        unsafe { libc::mremap(from.cast(), 0, piece.len, flags, to.cast::<libc::c_void>()) }
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Drop for ContiguousMapping {
    fn drop(&mut self) {
        if let Some((start, size)) = self.reserved
            // SAFETY: the range is ours and nothing uses it any more: the registration over it has ended.
            && unsafe { libc::munmap(start.as_ptr().cast(), size) } != 0
        {
            LOG.error(
                module_path!(),
                "host",
                format_args!("cannot unmap {size} bytes: {}", io::Error::last_os_error()),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::huge_pages::HugeMemory;
    use pvrdma_verbs::testing::shared_memory;
    use vm_memory::{Bytes, VolatileMemory};

    #[test]
    fn pieces_lie_side_by_side_and_are_the_same_memory() {
        let mapping = shared_memory(8 * 4096);
        let piece = |page: usize, pages: usize| HostPiece {
            mapping: Arc::clone(&mapping),
            offset: page * 4096,
            len: pages * 4096,
            writable: true,
        };
        let whole = ContiguousMapping::map(&[piece(5, 1), piece(1, 2), piece(5, 1)]).unwrap();
        assert_eq!(whole.len(), 4 * 4096);
        mapping.as_volatile_slice().write_slice(b"guest", 5 * 4096 + 10).unwrap();
        // SAFETY: test only; the range is mapped and nobody writes now.
        let read = |at: usize| unsafe { std::slice::from_raw_parts(whole.as_ptr().add(at), 5) };
        assert_eq!((read(10), read(3 * 4096 + 10)), (&b"guest"[..], &b"guest"[..]));
        assert_eq!(read(4096 + 10), [0; 5]);
        let single = ContiguousMapping::map(&[piece(2, 3)]).unwrap();
        assert_eq!(single.as_ptr(), mapping.as_ptr().wrapping_add(2 * 4096));
        drop((whole, single));
        let mut back = [0; 5];
        mapping.as_volatile_slice().read_slice(&mut back, 5 * 4096 + 10).unwrap();
        assert_eq!(&back, b"guest");
    }

    #[test]
    fn pieces_outside_of_their_mapping_are_refused() {
        let mapping = shared_memory(4096);
        assert!(ContiguousMapping::map(&[HostPiece { mapping, offset: 4096, len: 4096, writable: true }]).is_err());
        assert!(ContiguousMapping::map(&[]).is_err());
    }

    /// Each byte of whole huge pages, and of parts at both ends.
    #[test]
    fn whole_huge_pages_lie_side_by_side() {
        let Some(memory) = HugeMemory::new(3) else { return };
        let mapping = &memory.mapping;
        for page in 0..mapping.size() / 4096 {
            mapping.as_volatile_slice().write_obj(page as u64, page * 4096).unwrap();
        }
        let piece = |page: usize, pages: usize| HostPiece {
            mapping: Arc::clone(mapping),
            offset: page * 4096,
            len: pages * 4096,
            writable: true,
        };
        for parts in [vec![(1024 + 100, 412), (0, 512), (512, 1)], vec![(1535, 1), (512, 512), (512, 512), (0, 7)]] {
            let pieces: Vec<_> = parts.iter().map(|&(page, pages)| piece(page, pages)).collect();
            let whole = ContiguousMapping::map(&pieces).unwrap();
            let pages: Vec<_> = parts.iter().flat_map(|&(page, pages)| page..page + pages).collect();
            assert_eq!(whole.len(), pages.len() * 4096);
            for (at, &page) in pages.iter().enumerate() {
                // SAFETY: test only; the range is mapped, a page is aligned, and nobody writes now.
                let first = unsafe { whole.as_ptr().add(at * 4096).cast::<u64>().read() };
                assert_eq!(first, page as u64, "{at}");
            }
        }
        // A gap at an end that is not the last, at a beginning that is not the first, and huge pages out of step.
        for parts in [[(0, 511), (512, 512)], [(0, 512), (513, 511)], [(3, 1), (700, 1)]] {
            let pieces = parts.map(|(page, pages)| piece(page, pages));
            assert!(!ContiguousMapping::is_possible(&pieces));
            assert_eq!(ContiguousMapping::map(&pieces).unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
        assert!(ContiguousMapping::is_possible(&[piece(3, 700)]));
    }
}
