//! Scattered guest pages, side by side in our address space, for an adapter that wants one range.
#![expect(unsafe_code, reason = "mmap, mremap and munmap take addresses")]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pvrdma_guest_memory::HostPiece;
use pvrdma_verbs::LogLimit;
use vm_memory::mmap::MmapRegion;

use crate::limits::Share;

/// Guests decide how many mappings end.
static LOG: LogLimit = LogLimit::new();

/// A range of our address space with guest memory behind it.
#[derive(Debug)]
pub(crate) struct ContiguousMapping {
    start: NonNull<u8>,
    len: usize,
    /// What the pieces were mapped from. Without `owned` the range is a part of it.
    _mappings: Vec<Arc<MmapRegion>>,
    owned: bool,
    /// What its pieces count for.
    share: Option<Share>,
}

// SAFETY: the mapping only names the range; who accesses it is the adapter.
unsafe impl Send for ContiguousMapping {}
// SAFETY: likewise.
unsafe impl Sync for ContiguousMapping {}

impl ContiguousMapping {
    /// Maps the pieces in order. A single piece is used where it is.
    ///
    /// # Errors
    /// The memory is not shared, or the system's limit of mappings is reached (`vm.max_map_count`; one for each piece).
    pub(crate) fn map(pieces: &[HostPiece]) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut len = 0_usize;
        for piece in pieces {
            if piece.offset.checked_add(piece.len).is_none_or(|end| end > piece.mapping.size()) {
                return Err(invalid());
            }
            len = len.checked_add(piece.len).ok_or_else(invalid)?;
        }
        let mappings = pieces.iter().map(|piece| Arc::clone(&piece.mapping)).collect();
        if let [only] = pieces {
            let start = NonNull::new(only.mapping.as_ptr().wrapping_add(only.offset)).ok_or_else(invalid)?;
            return Ok(Self { start, len, _mappings: mappings, owned: false, share: None });
        }
        if len == 0 {
            return Err(invalid());
        }
        // SAFETY: a new range that nothing else uses.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(invalid)?;
        // From here on dropping it gives the whole range back, however far the loop came.
        let whole = Self { start, len, _mappings: mappings, owned: true, share: None };
        let mut done = 0;
        for piece in pieces {
            place(piece, whole.start.as_ptr().wrapping_add(done))?;
            done += piece.len;
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
        self.owned = false;
        std::mem::forget(std::mem::take(&mut self._mappings));
        std::mem::forget(self.share.take());
    }
}

/// Maps a piece a second time, at `to`.
fn place(piece: &HostPiece, to: *mut u8) -> io::Result<()> {
    let mapped = if let Some(file) = piece.mapping.file_offset() {
        let offset = file.start().checked_add(piece.offset as u64).and_then(|at| libc::off_t::try_from(at).ok());
        let offset = offset.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let protection = if piece.writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: `to` and the length are inside a range that the caller reserved and nobody else uses.
        unsafe { libc::mmap(to.cast(), piece.len, protection, flags, file.file().as_raw_fd(), offset) }
    } else {
        let from = piece.mapping.as_ptr().wrapping_add(piece.offset);
        // Without an old size, a shared mapping is mapped a second time.
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: likewise, and the old mapping stays as it is.
        unsafe { libc::mremap(from.cast(), 0, piece.len, flags, to.cast::<libc::c_void>()) }
    };
    if mapped == libc::MAP_FAILED { Err(explain(io::Error::last_os_error(), piece)) } else { Ok(()) }
}

/// Huge pages are mapped as a whole. A piece of one cannot lie beside a piece of another.
fn explain(error: io::Error, piece: &HostPiece) -> io::Error {
    let page =
        piece.mapping.file_offset().and_then(|file| file.file().metadata().ok()).map_or(0, |file| file.blksize());
    let cut = |at: usize| !(at as u64).is_multiple_of(page.max(1));
    if error.kind() == io::ErrorKind::InvalidInput && (cut(piece.offset) || cut(piece.len)) {
        let text =
            format!("the memory is scattered over huge pages of {page} bytes, which the host cannot put side by side");
        return io::Error::new(io::ErrorKind::Unsupported, text);
    }
    error
}

impl Drop for ContiguousMapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours and nothing uses it any more: the registration over it has ended.
        if self.owned && unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) } != 0 {
            LOG.error("host", format_args!("cannot unmap {} bytes: {}", self.len, io::Error::last_os_error()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
