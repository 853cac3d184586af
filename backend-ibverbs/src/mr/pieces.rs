//! Regions in pieces: memory that cannot be mapped side by side, because it is scattered over huge pages. Each piece is
//! registered in place, under a key of its own.
//!
//! The host's keys of the pieces are not given to the guest. A request that the guest posts names the region, and is
//! translated to the pieces that it covers. A peer's request names one key and reaches the host's adapter directly, so
//! it cannot be split: such memory is accessible only to its owner.

use std::sync::Arc;

use pvrdma_guest_memory::HostPiece;
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::Access;

use crate::adapter::Adapter;
use crate::contiguous_mapping::ContiguousMapping;
use crate::limits::Share;
use crate::sys;
use crate::verbs::{HostMr, HostPd};

/// Pieces of a region, in address order and without gaps.
#[derive(Debug)]
pub(super) struct Pieces {
    list: Vec<Piece>,
    _pinned: Share,
    _mappings: Share,
}

#[derive(Debug)]
struct Piece {
    /// Guest virtual address of the first byte, and of the byte after the last.
    start: u64,
    end: u64,
    host: HostMr,
}

impl Pieces {
    /// Registers whole pages, the first of which has the address `start`.
    ///
    /// # Errors
    /// The host refuses a page, or the device's limit is exceeded.
    pub(super) fn register(
        adapter: &Adapter,
        pd: &Arc<HostPd>,
        pieces: Vec<HostPiece>,
        start: u64,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let bytes = pieces.iter().map(|piece| piece.len as u64).sum();
        let (pinned, mappings) = (adapter.pinned.take(bytes)?, adapter.mappings.take(pieces.len() as u64)?);
        let mut list = Vec::with_capacity(pieces.len());
        let mut at = start;
        for piece in pieces {
            let len = piece.len;
            let end = at.checked_add(len as u64).ok_or(VerbsError::Invalid("memory region"))?;
            let mapping = ContiguousMapping::map(&[piece])?;
            let host = HostMr::register(pd, mapping, 0, len, at, access.bits())?;
            list.push(Piece { start: at, end, host });
            at = end;
        }
        Ok(Self { list, _pinned: pinned, _mappings: mappings })
    }

    /// Appends the pieces of `addr..addr+length`, a range inside the region. Returns `None` if a request of the host
    /// cannot name that many.
    pub(super) fn translate(&self, adapter: &Adapter, addr: u64, length: u32, out: &mut Vec<sys::Sge>) -> Option<()> {
        let most = adapter.limits.max_sge;
        let (mut at, end) = (addr, addr.checked_add(length.into())?);
        let first = self.list.partition_point(|piece| piece.end <= addr);
        for piece in self.list.get(first..)?.iter().take_while(|piece| piece.start < end) {
            if out.len() >= most as usize {
                let log = &adapter.log;
                log.warn(
                    module_path!(),
                    format_args!("a request reaches more than {most} pieces of memory on huge pages"),
                );
                return None;
            }
            let length = u32::try_from(piece.end.min(end) - at).ok()?;
            let addr = at.wrapping_add(piece.host.shift());
            out.push(sys::Sge { addr, length, lkey: piece.host.lkey() });
            at = piece.end;
        }
        (at >= end).then_some(())
    }
}
