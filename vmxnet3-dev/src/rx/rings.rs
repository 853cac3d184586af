//! Buffer rings of a receive queue.

use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::queue_desc::{DataRing, MAX_RING};
use crate::ring::{Position, RingShape};
use crate::saved_state::error::RestoreError;

/// A ring of receive buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct BufferRing {
    pub(super) shape: RingShape,
    pub(super) next: Position,
}

impl BufferRing {
    pub(super) const fn new(shape: RingShape) -> Self {
        Self { shape, next: Position::START }
    }

    pub(super) const fn save(self) -> saved::Ring {
        let Self { shape, next } = self;
        shape.save(next)
    }

    pub(super) fn restore(name: &'static str, ring: Option<saved::Ring>) -> Result<Self, RestoreError> {
        let (shape, next) = RingShape::restore(name, ring, MAX_RING)?;
        Ok(Self { shape, next })
    }
}

/// Ring numbers used in completions. A driver accepts no others.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingIds {
    pub(super) first: u16,
    pub(super) second: u16,
    pub(super) data: u16,
}

impl RingIds {
    /// Returns the numbers of queue `number` of `count`.
    pub(super) fn new(number: u8, count: u8) -> Self {
        let (number, count) = (u16::from(number), u16::from(count));
        Self { first: number, second: number + count, data: number + 2 * count }
    }
}

/// All buffers of a receive queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rings {
    pub(super) first: BufferRing,
    pub(super) second: Option<BufferRing>,
    pub(super) data: Option<DataRing>,
    pub(super) ids: RingIds,
    /// Maximum number of buffers per frame.
    pub(super) most: usize,
}
