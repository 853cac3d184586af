//! Contiguous mapping of scattered guest pages in the process's address space, for an adapter that needs one range.
//!
//! Huge pages are mapped as a whole, so two pieces can lie side by side only if the first ends at the end of its huge
//! page and the second begins at the start of its own.
#![expect(unsafe_code, reason = "mmap, mremap and munmap take addresses")]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pvrdma_base::LogLimit;
use pvrdma_guest_memory::HostPiece;
use vm_memory::mmap::MmapRegion;

use crate::limits::Share;

/// Limited, because guests decide how often a mapping ends.
static LOG: LogLimit = LogLimit::new();

/// Size of the host's base pages, in bytes.
const HOST_PAGE: usize = 4096;

/// A range of the process's address space that is backed by guest memory.
#[derive(Debug)]
pub(crate) struct ContiguousMapping {
    start: NonNull<u8>,
    len: usize,
    /// The mappings that contain the pieces. Without `reserved`, the range is part of such a mapping.
    _mappings: Vec<Arc<MmapRegion>>,
    /// Start and length of the reserved range: the pieces, and the remainder of its first and last huge page.
    reserved: Option<(NonNull<u8>, usize)>,
    /// The pieces' share of the limit on mappings.
    share: Option<Share>,
}

// SAFETY: the mapping only names the range; only the adapter accesses it.
unsafe impl Send for ContiguousMapping {}
// SAFETY: likewise.
unsafe impl Sync for ContiguousMapping {}

/// Layout of pieces in the reserved range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    /// Bytes of the first piece's page that precede the piece.
    lead: usize,
    /// Length of all pieces, in bytes.
    len: usize,
    /// Size of the largest page among the pieces, in bytes.
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

    /// Returns the number of bytes to reserve, so that the first piece can keep its offset in its page.
    fn reserved(&self) -> Option<usize> {
        let pages = self.lead.checked_add(self.len)?.checked_next_multiple_of(self.page)?;
        pages.checked_add(self.page - HOST_PAGE)
    }
}

/// Returns the page size of the file behind a mapping, in bytes.
pub(crate) fn page_size(mapping: &MmapRegion) -> usize {
    let stat = mapping.file_offset().and_then(|file| rustix::fs::fstatfs(file.file()).ok());
    let huge = stat.filter(|stat| stat.f_type == libc::HUGETLBFS_MAGIC);
    huge.and_then(|stat| usize::try_from(stat.f_bsize).ok()).unwrap_or(HOST_PAGE).max(HOST_PAGE)
}

/// Caches the page size, so that consecutive pieces of one mapping query it once.
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

/// Returns the offset of a piece in its file.
fn file_offset(piece: &HostPiece) -> Option<usize> {
    let start = piece.mapping.file_offset().map_or(0, |file| file.start());
    usize::try_from(start).ok()?.checked_add(piece.offset)
}

impl ContiguousMapping {
    /// Returns `true` if the page sizes behind the pieces allow mapping them side by side.
    pub(crate) fn is_possible(pieces: &[HostPiece]) -> bool {
        pieces.len() == 1 || Layout::of(pieces).is_ok()
    }

    /// Maps the pieces in order. A single piece is used in place.
    ///
    /// # Errors
    /// The memory is not shared, huge pages prevent it ([`Self::is_possible`]), or the system's limit on mappings is
    /// reached (`vm.max_map_count`; one for each piece).
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
        // Less than a page, so inside the reserved range.
        let skipped = reserved.as_ptr().addr().wrapping_neg() % layout.page + layout.lead;
        let start = NonNull::new(reserved.as_ptr().wrapping_add(skipped)).ok_or_else(invalid)?;
        // From here on, dropping the value unmaps the whole range, even if the loop ends early.
        let reserved = Some((reserved, size));
        let whole = Self { start, len: layout.len, _mappings: mappings, reserved, share: None };
        let (mut to, mut sizes) = (whole.start.as_ptr(), PageSizes::default());
        for piece in pieces {
            place(piece, sizes.of(piece), to)?;
            to = to.wrapping_add(piece.len);
        }
        Ok(whole)
    }

    /// Keeps the pieces' share of the limit until the range is unmapped.
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

    /// Leaks the range, so that it is never unmapped.
    pub(crate) fn leak(&mut self) {
        self.reserved = None;
        std::mem::forget(std::mem::take(&mut self._mappings));
        std::mem::forget(self.share.take());
    }
}

/// Maps a piece a second time, at `to`, including all pages (of `page` bytes) that contain a part of it.
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
        // SAFETY: only the first piece of a layout begins inside a page, and only the last one ends inside one, so
        // these pages are inside a range that the caller reserved and that is not used otherwise.
        unsafe { libc::mmap(to.cast(), len, protection, flags, file.file().as_raw_fd(), offset) }
    } else {
        let from = piece.mapping.as_ptr().wrapping_add(piece.offset);
        // With an old size of 0, `mremap` maps a shared mapping a second time.
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: likewise, and the old mapping stays as it is.
        unsafe { libc::mremap(from.cast(), 0, piece.len, flags, to.cast::<libc::c_void>()) }
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Drop for ContiguousMapping {
    fn drop(&mut self) {
        if let Some((start, size)) = self.reserved
            // SAFETY: the range belongs to this value and nothing uses it any more: the registration over it has ended.
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
        // SAFETY: test only; the range is mapped and no thread writes now.
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

    /// Every byte of whole huge pages, and of partial ones at both ends, is mapped at its place.
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
                // SAFETY: test only; the range is mapped, a page is aligned, and no thread writes now.
                let first = unsafe { whole.as_ptr().add(at * 4096).cast::<u64>().read() };
                assert_eq!(first, page as u64, "{at}");
            }
        }
        // A gap at an end that is not the last, a gap at a start that is not the first, and misaligned huge pages.
        for parts in [[(0, 511), (512, 512)], [(0, 512), (513, 511)], [(3, 1), (700, 1)]] {
            let pieces = parts.map(|(page, pages)| piece(page, pages));
            assert!(!ContiguousMapping::is_possible(&pieces));
            assert_eq!(ContiguousMapping::map(&pieces).unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
        assert!(ContiguousMapping::is_possible(&[piece(3, 700)]));
    }
}
