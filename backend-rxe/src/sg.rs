//! Guest memory that is held, and scatter/gather lists in it: checking them and copying between two of them.

use std::sync::atomic::{Ordering, fence};

use pvrdma_guest_memory::{Direction, DmaView};
use pvrdma_roce::AccessError;
use pvrdma_verbs::{Access, Sge};
use vm_memory::{Bytes, VolatileSlice};

use crate::adapter::Adapter;
use crate::mr::{MrTable, MrTableGuard, RegionRef};

/// Held guest memory of one adapter: its map and its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'h> {
    pub(crate) view: &'h DmaView<'h>,
    pub(crate) mrs: &'h MrTable,
}

/// Which list of a copy could not be accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultyList {
    Source,
    Target,
}

/// A list of memory, with what is needed to reach it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgList<'a> {
    pub(crate) memory: Memory<'a>,
    pub(crate) sges: &'a [Sge],
    pub(crate) pd: u64,
    /// Right needed in each region. Nothing is needed to read one's own memory.
    pub(crate) need: Access,
}

impl<'a> SgList<'a> {
    /// Returns `true` if every non-empty element may be accessed.
    #[inline]
    pub(crate) fn allowed(&self) -> bool {
        self.sges.iter().all(|sge| {
            sge.length == 0
                || self.memory.mrs.lookup(sge.lkey, self.pd, sge.addr, sge.length.into(), self.need).is_some()
        })
    }

    /// A position `offset` bytes into the list.
    #[inline]
    fn cursor(self, offset: u64) -> Cursor<'a> {
        Cursor { list: self, next: 0, skip: offset, addr: 0, left: 0, region: None }
    }

    /// Copies from the list at `offset` into `out`.
    pub(crate) fn read(self, offset: u64, mut out: &mut [u8]) -> Result<(), AccessError> {
        let mut cursor = self.cursor(offset);
        while !out.is_empty() {
            let (addr, len) = cursor.piece(out.len() as u64).ok_or(AccessError)?;
            let piece = self.memory.view.piece(addr, len, Direction::Read).map_err(|_| AccessError)?;
            piece.copy_to(out);
            cursor.advance(piece.len() as u64);
            out = out.get_mut(piece.len()..).unwrap_or_default();
        }
        Ok(())
    }

    /// Copies `data` into the list at `offset`.
    pub(crate) fn write(self, offset: u64, mut data: &[u8]) -> Result<(), AccessError> {
        let mut cursor = self.cursor(offset);
        while !data.is_empty() {
            let (addr, len) = cursor.piece(data.len() as u64).ok_or(AccessError)?;
            let piece = self.memory.view.piece(addr, len, Direction::Write).map_err(|_| AccessError)?;
            piece.copy_from(data);
            cursor.advance(piece.len() as u64);
            data = data.get(piece.len()..).unwrap_or_default();
        }
        Ok(())
    }
}

/// A position in a list.
struct Cursor<'a> {
    list: SgList<'a>,
    /// The element after the current one.
    next: usize,
    /// Bytes to leave out before the next piece.
    skip: u64,
    /// Where we are in the current element, and what is left of it.
    addr: u64,
    left: u64,
    region: Option<RegionRef<'a>>,
}

impl Cursor<'_> {
    /// Bus address and length of the next piece, at most `max` bytes. `None`: the list is at its end or may not be
    /// used.
    // Always inline: otherwise both cursors of a copy live in memory.
    #[inline(always)]
    fn piece(&mut self, max: u64) -> Option<(u64, u64)> {
        while self.left == 0 {
            let sge = self.list.sges.get(self.next)?;
            self.next += 1;
            let length = u64::from(sge.length);
            if length <= self.skip {
                self.skip -= length;
                continue;
            }
            // The last element's lock, if it has one, goes before the next is taken.
            self.region = None;
            let memory = self.list.memory;
            self.region = Some(memory.mrs.lookup(sge.lkey, self.list.pd, sge.addr, length, self.list.need)?);
            self.addr = sge.addr + self.skip;
            self.left = length - self.skip;
            self.skip = 0;
        }
        let (bus, contiguous) = self.region.as_ref()?.locate(self.addr)?;
        Some((bus, contiguous.min(self.left).min(max)))
    }

    #[inline]
    fn advance(&mut self, by: u64) {
        // `piece` gave at most `left`, and the region does not wrap.
        self.addr = self.addr.wrapping_add(by);
        self.left = self.left.saturating_sub(by);
    }
}

/// Copies `len` bytes from one list to another, each from its offset on. With `ordered`, the last bytes become visible
/// after all others, as pollers of a written buffer expect.
///
/// The caller has checked both lists; a fault here means that memory or a fast registration went away since then.
#[inline]
pub(crate) fn transfer(
    (from, from_offset): (SgList<'_>, u64),
    (to, to_offset): (SgList<'_>, u64),
    len: u64,
    ordered: bool,
) -> Result<(), FaultyList> {
    let (mut source, mut target) = (from.cursor(from_offset), to.cursor(to_offset));
    let mut left = len;
    while left > 0 {
        let (from_addr, from_len) = source.piece(left).ok_or(FaultyList::Source)?;
        let (to_addr, count) = target.piece(from_len).ok_or(FaultyList::Target)?;
        let read = from.memory.view.piece(from_addr, count, Direction::Read).map_err(|_| FaultyList::Source)?;
        let write =
            to.memory.view.piece(to_addr, read.len() as u64, Direction::Write).map_err(|_| FaultyList::Target)?;
        let count = write.len() as u64;
        if ordered && count == left {
            copy_ordered(&read, &write);
        } else {
            read.copy_to_volatile_slice(write);
        }
        source.advance(count);
        target.advance(count);
        left -= count;
    }
    Ok(())
}

/// Copies, the last word in one access after everything else. A program that polls the end of a buffer then sees the
/// rest. `from` is at least as long as `to`.
#[inline]
fn copy_ordered(from: &VolatileSlice<'_>, to: &VolatileSlice<'_>) {
    let len = to.len();
    if !(tail::<8>(from, to, len) || tail::<4>(from, to, len) || tail::<1>(from, to, len)) {
        from.copy_to_volatile_slice(*to);
    }
}

/// Copies with an ordered tail of `N` bytes if the end of the target is aligned to that.
#[inline]
fn tail<const N: usize>(from: &VolatileSlice<'_>, to: &VolatileSlice<'_>, len: usize) -> bool {
    let Some(body) = len.checked_sub(N) else { return false };
    let end = to.ptr_guard().as_ptr() as usize + len;
    if !end.is_multiple_of(N) {
        return false;
    }
    let mut word = [0; 8];
    let Some(bytes) = word.get_mut(..N) else { return false };
    // The tail is read first: source and target may overlap.
    let Ok(last) = from.subslice(body, N) else { return false };
    last.copy_to(bytes);
    if body > 0 {
        let Ok(start) = to.subslice(0, body) else { return false };
        from.copy_to_volatile_slice(start);
    }
    fence(Ordering::Release);
    match N {
        8 => to.store(u64::from_ne_bytes(word), body, Ordering::Release),
        4 => to.store(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]), body, Ordering::Release),
        _ => to.store(word[0], body, Ordering::Release),
    }
    .is_ok()
}

/// Guest memory of one or two adapters, held: maps in the order of their spaces, then region tables in the order of
/// their adapters (see the crate documentation). Adapters on the same space share one view.
#[derive(Debug)]
pub(crate) struct MemoryGuard<'a> {
    own_view: DmaView<'a>,
    own_mrs: MrTableGuard<'a>,
    /// `None` when the space is ours.
    peer_view: Option<DmaView<'a>>,
    /// `None` when the adapter is ours, or there is no peer.
    peer_mrs: Option<MrTableGuard<'a>>,
}

impl<'a> MemoryGuard<'a> {
    pub(crate) fn open(own: &'a Adapter, peer: Option<&'a Adapter>) -> Self {
        let peer = peer.filter(|peer| peer.id != own.id);
        let (own_view, peer_view) = match peer.filter(|peer| peer.memory.id() != own.memory.id()) {
            None => (own.memory.view(), None),
            Some(peer) if own.memory.id() < peer.memory.id() => {
                let view = own.memory.view();
                (view, Some(peer.memory.view()))
            }
            Some(peer) => {
                let view = peer.memory.view();
                (own.memory.view(), Some(view))
            }
        };
        let (own_mrs, peer_mrs) = match peer {
            None => (own.mrs.read(), None),
            Some(peer) if own.id < peer.id => {
                let mrs = own.mrs.read();
                (mrs, Some(peer.mrs.read()))
            }
            Some(peer) => {
                let mrs = peer.mrs.read();
                (own.mrs.read(), Some(mrs))
            }
        };
        Self { own_view, own_mrs, peer_view, peer_mrs }
    }

    /// The adapter's own memory.
    #[inline]
    pub(crate) fn own(&self) -> Memory<'_> {
        Memory { view: &self.own_view, mrs: &self.own_mrs }
    }

    /// The peer's memory, which may be our own.
    #[inline]
    pub(crate) fn peer(&self) -> Memory<'_> {
        Memory {
            view: self.peer_view.as_ref().unwrap_or(&self.own_view),
            mrs: self.peer_mrs.as_ref().unwrap_or(&self.own_mrs),
        }
    }
}
