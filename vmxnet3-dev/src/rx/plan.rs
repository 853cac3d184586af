//! Selection of buffers for a frame. Descriptors are only read here, so a frame that does not fit leaves the rings
//! unchanged.
//!
//! The start of a frame goes to a HEAD buffer of ring 1, or, if it is the whole frame and small, to the corresponding
//! slot of the data ring. The continuation goes to the BODY buffers that follow in ring 1, and then to those of ring 2.

use pvrdma_guest_memory::DmaView;

use super::rings::{BufferRing, Rings};
use crate::abi::rx_desc::{MIN_HEAD, RxDesc};
use crate::error::QueueError;
use crate::ring::{Position, load_rx};

/// A buffer, or its used part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) address: u64,
    pub(super) len: u16,
    pub(super) index: u32,
    pub(super) ring_id: u16,
}

/// Positions in the rings.
#[derive(Clone, Copy, Debug)]
pub(super) struct After {
    pub(super) first: Position,
    pub(super) second: Option<Position>,
}

/// Result of planning a frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum Planned {
    Fits(After),
    NoBuffers,
    TooLong,
}

/// Buffers of a frame.
#[derive(Debug, Default)]
pub(super) struct Plan {
    buffers: Vec<Buffer>,
}

/// Finds the next buffer of a kind in a ring, skipping those of the other kind. Returns its position and descriptor.
fn find(
    view: &DmaView<'_>,
    ring: BufferRing,
    from: Position,
    body: bool,
) -> Result<Option<(Position, RxDesc)>, QueueError> {
    let mut at = from;
    for _ in 0..ring.shape.entries() {
        match load_rx(view, ring.shape, at)? {
            None => return Ok(None),
            Some(desc) if desc.body == body => return Ok(Some((at, desc))),
            Some(_) => at = at.next(ring.shape),
        }
    }
    Ok(None)
}

impl Plan {
    /// Returns the buffers.
    pub(super) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Finds buffers for a frame of `len` bytes, starting at the given positions.
    pub(super) fn make(
        &mut self,
        rings: &Rings,
        view: &DmaView<'_>,
        from: After,
        len: usize,
    ) -> Result<Planned, QueueError> {
        self.buffers.clear();
        let second = from.second;
        let Some((at, head)) = find(view, rings.first, from.first, false)? else { return Ok(Planned::NoBuffers) };
        if head.len < MIN_HEAD {
            return Err(QueueError::SmallBuffer(head.len));
        }
        let first = at.next(rings.first.shape);
        let index = at.index();
        if let (Some(data), Ok(small)) = (rings.data, u16::try_from(len))
            && small <= data.slot
        {
            let (address, ring_id) = (data.slot_address(index), rings.ids.data);
            self.buffers.push(Buffer { address, len: small, index, ring_id });
            return Ok(Planned::Fits(After { first, second }));
        }
        let rest = self.push(&head, index, rings.ids.first, len);
        self.follow(rings, view, After { first, second }, rest)
    }

    /// Uses a buffer for as many of `len` bytes as fit, and returns the number left.
    fn push(&mut self, desc: &RxDesc, index: u32, ring_id: u16, len: usize) -> usize {
        let used = u16::try_from(len).unwrap_or(u16::MAX).min(desc.len);
        self.buffers.push(Buffer { address: desc.address, len: used, index, ring_id });
        len.saturating_sub(used.into())
    }

    /// Finds buffers for the continuation of a frame.
    fn follow(
        &mut self,
        rings: &Rings,
        view: &DmaView<'_>,
        mut after: After,
        mut rest: usize,
    ) -> Result<Planned, QueueError> {
        while rest > 0 {
            if self.buffers.len() >= rings.most {
                return Ok(Planned::TooLong);
            }
            let next = load_rx(view, rings.first.shape, after.first)?;
            let (desc, index, ring_id) = if let Some(body) = next.filter(|desc| desc.body) {
                let index = after.first.index();
                after.first = after.first.next(rings.first.shape);
                (body, index, rings.ids.first)
            } else if let (Some(ring), Some(from)) = (rings.second, after.second) {
                let Some((at, body)) = find(view, ring, from, true)? else { return Ok(Planned::NoBuffers) };
                after.second = Some(at.next(ring.shape));
                (body, at.index(), rings.ids.second)
            } else if next.is_some() {
                // A HEAD buffer starts the next frame, so no further buffer for this continuation can follow.
                return Ok(Planned::TooLong);
            } else {
                return Ok(Planned::NoBuffers);
            };
            if desc.len == 0 {
                return Err(QueueError::SmallBuffer(0));
            }
            rest = self.push(&desc, index, ring_id, rest);
        }
        Ok(Planned::Fits(after))
    }
}
