//! Registration of guest pages as a region of the host.

use std::sync::Arc;

use pvrdma_guest_memory::{Direction, DmaView, HostPiece};
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::Access;
use vm_memory::mmap::MmapRegion;

use crate::adapter::Adapter;
use crate::contiguous_mapping::ContiguousMapping;
use crate::limits::Share;
use crate::verbs::{HostMr, HostPd};

/// Finds the host memory behind pages. It stays mapped while the view is held.
pub(super) fn host_pieces(view: &DmaView<'_>, pages: &PageList, access: Access) -> Result<Vec<HostPiece>, VerbsError> {
    let direction = if access.contains(Access::LOCAL_WRITE) { Direction::Write } else { Direction::Read };
    let mut pieces = Vec::new();
    for extent in pages.extents() {
        view.host_pieces(extent.iova, extent.bytes(), direction, &mut pieces)?;
    }
    Ok(pieces)
}

/// Registers pieces as one region of the host. The caller holds the view that the pieces come from.
pub(super) fn register(
    adapter: &Adapter,
    pd: &Arc<HostPd>,
    pieces: &[HostPiece],
    (start, length): (u64, u64),
    access: Access,
    more: u32,
) -> Result<(HostMr, Share), VerbsError> {
    let share = adapter.pinned.take(pieces.iter().map(|piece| piece.len as u64).sum())?;
    // A single piece is used in place and needs no mapping.
    let mappings = if pieces.len() > 1 { pieces.len() as u64 } else { 0 };
    let paid = adapter.mappings.take(mappings)?;
    let mapping = ContiguousMapping::map(pieces)?.paid_by(paid);
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| VerbsError::Invalid("memory region"));
    let host = HostMr::register(pd, mapping, size(start % PAGE_SIZE)?, size(length)?, start, access.bits() | more)?;
    Ok((host, share))
}

/// Registers one piece, which begins at `iova`, in place.
pub(super) fn register_part(
    adapter: &Adapter,
    pd: &Arc<HostPd>,
    iova: u64,
    piece: HostPiece,
    access: Access,
) -> Result<(HostMr, Share), VerbsError> {
    let len = piece.len;
    let share = adapter.pinned.take(len as u64)?;
    let mapping = ContiguousMapping::map(&[piece])?;
    Ok((HostMr::register(pd, mapping, 0, len, iova, access.bits())?, share))
}

/// Registers a page of the backend as an anchor, which only serves to reserve a unique key.
pub(super) fn anchor(pd: &Arc<HostPd>) -> Result<HostMr, VerbsError> {
    let len = 4096;
    let page = MmapRegion::new(len).map_err(|error| VerbsError::Host(std::io::Error::other(error)))?;
    let piece = HostPiece { mapping: Arc::new(page), offset: 0, len, writable: false };
    let mapping = ContiguousMapping::map(&[piece])?;
    Ok(HostMr::register(pd, mapping, 0, len, 0, 0)?)
}
