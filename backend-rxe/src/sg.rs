//! Locked guest memory, and scatter/gather lists in it: checks them and copies between two of them.

use std::sync::atomic::{Ordering, fence};

use pvrdma_guest_memory::{Direction, DmaSpace, DmaView};
use pvrdma_verbs_types::{Access, AccessError, Sge};
use vm_memory::{Bytes, VolatileSlice};

use crate::adapter::Adapter;
use crate::mr::{MrTable, MrTableGuard, RegionRef};

/// Locked guest memory of one adapter: its map and its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'h> {
    pub(crate) view: &'h DmaView<'h>,
    pub(crate) mrs: &'h MrTable,
}

impl<'m> Memory<'m> {
    /// Checks that `pd` has the right `need` for every element of a list. Returns the first `len` bytes of the list if
    /// they are contiguous, so that a copy does not look them up again.
    ///
    /// # Errors
    /// A key, a range or a right is invalid.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(crate) fn check(
        self,
        sges: &[Sge],
        (pd, need): (u64, Access),
        len: u64,
        direction: Direction,
    ) -> Result<Option<VolatileSlice<'m>>, AccessError> {
        if let [sge] = sges
            && let Some(found) = self.contiguous(sge, (pd, need), (0, len), direction)
        {
            return Ok(Some(found));
        }
        let list = SgList { memory: self, sges, pd, need };
        if list.allowed() { Ok(None) } else { Err(AccessError) }
    }

    /// Returns `len` bytes of an element from `offset` on, if they are contiguous and their region needs no lock. This
    /// is the case for most messages, and takes a fraction of the time that a cursor takes.
    #[inline(always)]
    fn contiguous(
        self,
        sge: &Sge,
        (pd, need): (u64, Access),
        (offset, len): (u64, u64),
        direction: Direction,
    ) -> Option<VolatileSlice<'m>> {
        let length = u64::from(sge.length);
        let left = length.checked_sub(offset)?;
        let region = self.mrs.lookup_fixed(sge.lkey, pd, sge.addr, length, need)?;
        let (bus, contiguous) = region.locate(sge.addr.checked_add(offset)?)?;
        if contiguous.min(left) < len {
            return None;
        }
        self.view.slice(bus, usize::try_from(len).ok()?, direction).ok()
    }
}

/// The list of a copy that could not be accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultyList {
    Source,
    Target,
}

/// A scatter/gather list, with the context that is needed to access it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgList<'a> {
    pub(crate) memory: Memory<'a>,
    pub(crate) sges: &'a [Sge],
    pub(crate) pd: u64,
    /// Right that is needed in each region. Reading local memory needs none.
    pub(crate) need: Access,
}

impl<'a> SgList<'a> {
    /// Returns `true` if every non-empty element can be accessed.
    #[inline]
    pub(crate) fn allowed(&self) -> bool {
        self.sges.iter().all(|sge| {
            sge.length == 0
                || self.memory.mrs.lookup(sge.lkey, self.pd, sge.addr, sge.length.into(), self.need).is_some()
        })
    }

    /// Returns a cursor that is `offset` bytes into the list.
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

/// A list, and the beginning of its memory if a check has found it: see [`Memory::check`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Located<'a> {
    pub(crate) list: SgList<'a>,
    pub(crate) memory: Option<VolatileSlice<'a>>,
}

impl<'a> From<SgList<'a>> for Located<'a> {
    #[inline]
    fn from(list: SgList<'a>) -> Self {
        Self { list, memory: None }
    }
}

impl<'a> Located<'a> {
    /// Returns `len` bytes from `offset` on, if they are contiguous.
    #[inline(always)]
    fn contiguous(&self, (offset, len): (u64, u64), direction: Direction) -> Option<VolatileSlice<'a>> {
        if let Some(memory) = self.memory {
            return memory.subslice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?).ok();
        }
        let SgList { memory, sges: [sge], pd, need } = self.list else { return None };
        memory.contiguous(sge, (pd, need), (offset, len), direction)
    }
}

/// A position in a list.
struct Cursor<'a> {
    list: SgList<'a>,
    /// Index of the element after the current one.
    next: usize,
    /// Bytes to skip before the next piece.
    skip: u64,
    /// Position in the current element, and the bytes left of it.
    addr: u64,
    left: u64,
    region: Option<RegionRef<'a>>,
}

impl Cursor<'_> {
    /// Returns bus address and length of the next piece, at most `max` bytes. `None`: the list has ended or cannot be
    /// accessed.
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
            // The lock of the last element's region, if any, is released before the next one is taken.
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
        // `piece` returned at most `left` bytes, and the region does not wrap.
        self.addr = self.addr.wrapping_add(by);
        self.left = self.left.saturating_sub(by);
    }
}

/// Copies `len` bytes from one list to another, each from its own offset. With `ordered`, the last bytes become visible
/// after all others, which programs that poll a written buffer rely on.
///
/// The caller has checked both lists. A fault here means that memory or a fast registration has been removed since.
// Always inline: see `Requester::end_with_success`.
#[inline(always)]
pub(crate) fn transfer(
    (from, from_offset): (Located<'_>, u64),
    (to, to_offset): (Located<'_>, u64),
    len: u64,
    ordered: bool,
) -> Result<(), FaultyList> {
    if let Some(read) = from.contiguous((from_offset, len), Direction::Read)
        && let Some(write) = to.contiguous((to_offset, len), Direction::Write)
    {
        copy(&read, &write, ordered);
        return Ok(());
    }
    transfer_pieces((from.list, from_offset), (to.list, to_offset), len, ordered)
}

/// Copies between lists of any shape, piece by piece.
#[inline(never)]
fn transfer_pieces(
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
        copy(&read, &write, ordered && count == left);
        source.advance(count);
        target.advance(count);
        left -= count;
    }
    Ok(())
}

/// Copies a piece. `from` is at least as long as `to`.
// Always inline, with its parts: small messages pass through here, and a call costs as much as their copy.
#[inline(always)]
fn copy(from: &VolatileSlice<'_>, to: &VolatileSlice<'_>, ordered: bool) {
    if ordered {
        copy_ordered(from, to);
    } else {
        from.copy_to_volatile_slice(*to);
    }
}

/// Copies with the last word written in one access after all other bytes, for programs that poll the end of a buffer.
/// `from` is at least as long as `to`.
#[inline(always)]
fn copy_ordered(from: &VolatileSlice<'_>, to: &VolatileSlice<'_>) {
    let len = to.len();
    if !(tail::<8>(from, to, len) || tail::<4>(from, to, len) || tail::<1>(from, to, len)) {
        from.copy_to_volatile_slice(*to);
    }
}

/// Copies with an ordered tail of `N` bytes, if the end of the target is aligned to `N`. Returns `false` otherwise.
#[inline]
fn tail<const N: usize>(from: &VolatileSlice<'_>, to: &VolatileSlice<'_>, len: usize) -> bool {
    let Some(body) = len.checked_sub(N) else { return false };
    let end = to.ptr_guard().as_ptr() as usize + len;
    if !end.is_multiple_of(N) {
        return false;
    }
    let mut word = [0; 8];
    let Some(bytes) = word.get_mut(..N) else { return false };
    // The tail is read first, because source and target may overlap.
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

/// Guard for the guest memory of one or two adapters. Locks memory maps in the order of their spaces, then region
/// tables in the order of their adapters (see the crate documentation). Adapters on the same space share one view.
#[derive(Debug)]
pub(crate) struct MemoryGuard<'a> {
    own_view: DmaView<'a>,
    own_mrs: MrTableGuard<'a>,
    /// `None` if the peer uses the same space.
    peer_view: Option<DmaView<'a>>,
    /// `None` if the peer is the same adapter, or there is no peer.
    peer_mrs: Option<MrTableGuard<'a>>,
}

impl<'a> MemoryGuard<'a> {
    pub(crate) fn open(own: &'a Adapter, peer: Option<&'a Adapter>) -> Self {
        let peer = peer.filter(|peer| peer.id != own.id);
        let (own_view, peer_view) = match peer.filter(|peer| peer.memory.id() != own.memory.id()) {
            None => (own.memory.view(), None),
            Some(peer) => {
                let (own, peer) = DmaSpace::view_pair(&own.memory, &peer.memory);
                (own, Some(peer))
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

    /// Returns the adapter's own memory.
    #[inline]
    pub(crate) fn own(&self) -> Memory<'_> {
        Memory { view: &self.own_view, mrs: &self.own_mrs }
    }

    /// Returns the peer's memory, which may be the same.
    #[inline]
    pub(crate) fn peer(&self) -> Memory<'_> {
        Memory {
            view: self.peer_view.as_ref().unwrap_or(&self.own_view),
            mrs: self.peer_mrs.as_ref().unwrap_or(&self.own_mrs),
        }
    }
}
