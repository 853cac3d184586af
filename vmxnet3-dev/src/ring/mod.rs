//! Rings in guest memory: an index, and a generation bit that changes with each round.
//!
//! A descriptor belongs to the device while its generation bit is that of the round. The device never writes to a
//! command ring. The generation bit of a completion is written last, so that a driver that sees it also sees the rest
//! of the completion.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_saved_state::vmxnet3 as saved;
use thiserror::Error;

use crate::abi::completion::Completion;
use crate::abi::rx_desc::RxDesc;
use crate::abi::tx_desc::{DESC_LEN, TxDesc};
use crate::saved_state::error::{RestoreError, present, require};

/// Alignment of a ring, in bytes.
const RING_ALIGN: u64 = 512;
/// The number of descriptors is a multiple of this.
const ENTRIES_ALIGN: u32 = 32;

/// Reason a ring is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum RingShapeError {
    /// The number of descriptors is zero, too large, or not a multiple of 32.
    #[error("{0} of {1} descriptors")]
    Entries(&'static str, u32),
    /// The address is not aligned, or the ring extends past the end of the address space.
    #[error("{0} at {1:#x}")]
    Base(&'static str, u64),
}

impl From<RingShapeError> for RestoreError {
    fn from(error: RingShapeError) -> Self {
        match error {
            RingShapeError::Entries(field, entries) => Self::Invalid { field, value: entries.into() },
            RingShapeError::Base(field, value) => Self::Invalid { field, value },
        }
    }
}

/// Location and size of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RingShape {
    base: u64,
    entries: u32,
}

impl RingShape {
    /// Checks a ring of at most `most` descriptors. `name` is for the error.
    ///
    /// # Errors
    /// The number of descriptors or the address is invalid.
    pub(crate) fn new(name: &'static str, base: u64, entries: u32, most: u32) -> Result<Self, RingShapeError> {
        if entries == 0 || entries > most || !entries.is_multiple_of(ENTRIES_ALIGN) {
            return Err(RingShapeError::Entries(name, entries));
        }
        if !base.is_multiple_of(RING_ALIGN) || base.checked_add(u64::from(entries) * DESC_LEN).is_none() {
            return Err(RingShapeError::Base(name, base));
        }
        Ok(Self { base, entries })
    }

    /// Returns the number of descriptors.
    pub(crate) const fn entries(self) -> u32 {
        self.entries
    }

    /// Checks that the device can access the whole ring.
    ///
    /// # Errors
    /// Part of the ring cannot be accessed.
    pub(crate) fn check(self, view: &DmaView<'_>, direction: Direction) -> Result<(), DmaError> {
        check_range(view, self.base, u64::from(self.entries) * DESC_LEN, direction)
    }

    /// Returns the saved form of the ring, with the position at which the device continues.
    pub(crate) const fn save(self, next: Position) -> saved::Ring {
        let (Self { base, entries }, Position { index, generation }) = (self, next);
        saved::Ring { base, entries, index, generation }
    }

    /// Restores a ring of at most `most` descriptors. `name` is for the error.
    ///
    /// # Errors
    /// There is no ring, its shape is invalid, or the position is outside it.
    pub(crate) fn restore(
        name: &'static str,
        ring: Option<saved::Ring>,
        most: u32,
    ) -> Result<(Self, Position), RestoreError> {
        let saved::Ring { base, entries, index, generation } = present(name, ring)?;
        let shape = Self::new(name, base, entries, most)?;
        require(name, index, index < entries)?;
        Ok((shape, Position { index, generation }))
    }

    /// Returns the bus address of a descriptor. It cannot wrap, because the end of the ring was checked.
    const fn address(self, index: u32) -> u64 {
        self.base.wrapping_add(index as u64 * DESC_LEN)
    }
}

/// Checks that the device can access a whole range.
///
/// # Errors
/// Part of the range cannot be accessed.
pub(crate) fn check_range(view: &DmaView<'_>, base: u64, len: u64, direction: Direction) -> Result<(), DmaError> {
    let mut done = 0;
    while done < len {
        let at = base.checked_add(done).ok_or(DmaError::Unmapped { addr: base, len })?;
        done += view.piece(at, len - done, direction)?.len() as u64;
    }
    Ok(())
}

/// Position in a ring: an index and the generation of its round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Position {
    index: u32,
    generation: bool,
}

impl Position {
    /// Position at which drivers and devices start.
    pub(crate) const START: Self = Self { index: 0, generation: true };

    /// Returns the index.
    pub(crate) const fn index(self) -> u32 {
        self.index
    }

    /// Returns the position `count` further, at most one round.
    pub(crate) const fn ahead(self, shape: RingShape, count: u32) -> Self {
        let index = self.index.saturating_add(count);
        match index.checked_sub(shape.entries) {
            Some(index) => Self { index, generation: !self.generation },
            None => Self { index, generation: self.generation },
        }
    }

    /// Returns the next position in a ring.
    pub(crate) const fn next(self, shape: RingShape) -> Self {
        self.ahead(shape, 1)
    }
}

/// Loads the words of a descriptor, each once. The word with the generation is loaded first, with acquire ordering,
/// because the other words are valid only once the generation bit has been seen.
fn load(
    view: &DmaView<'_>,
    shape: RingShape,
    at: Position,
    is_ready: impl Fn(u32, bool) -> bool,
) -> Result<Option<(u64, u32, u32)>, DmaError> {
    let address = shape.address(at.index);
    let word2 = view.load_u32(address + 8, Ordering::Acquire)?;
    if !is_ready(word2, at.generation) {
        return Ok(None);
    }
    let low = view.load_u32(address, Ordering::Relaxed)?;
    let high = view.load_u32(address + 4, Ordering::Relaxed)?;
    let word3 = view.load_u32(address + 12, Ordering::Relaxed)?;
    Ok(Some((u64::from(high) << 32 | u64::from(low), word2, word3)))
}

/// Loads the transmit descriptor at a position, if it belongs to the device.
///
/// # Errors
/// The ring cannot be read.
pub(crate) fn load_tx(view: &DmaView<'_>, shape: RingShape, at: Position) -> Result<Option<TxDesc>, DmaError> {
    let words = load(view, shape, at, TxDesc::is_ready)?;
    Ok(words.map(|(address, word2, word3)| TxDesc::parse(address, word2, word3)))
}

/// Loads the receive descriptor at a position, if it belongs to the device.
///
/// # Errors
/// The ring cannot be read.
pub(crate) fn load_rx(view: &DmaView<'_>, shape: RingShape, at: Position) -> Result<Option<RxDesc>, DmaError> {
    let words = load(view, shape, at, RxDesc::is_ready)?;
    Ok(words.map(|(address, word2, _)| RxDesc::parse(address, word2)))
}

/// A completion ring, which the device fills. It needs no consumer index: a driver posts no more commands than
/// completions fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CompletionRing {
    shape: RingShape,
    next: Position,
}

impl CompletionRing {
    /// Creates a ring at its first entry, in the first generation.
    pub(crate) const fn new(shape: RingShape) -> Self {
        Self { shape, next: Position::START }
    }

    /// Returns the saved form of the ring.
    pub(crate) const fn save(self) -> saved::Ring {
        let Self { shape, next } = self;
        shape.save(next)
    }

    /// Restores a ring of at most `most` completions.
    ///
    /// # Errors
    /// As [`RingShape::restore`].
    pub(crate) fn restore(ring: Option<saved::Ring>, most: u32) -> Result<Self, RestoreError> {
        let (shape, next) = RingShape::restore("completion ring", ring, most)?;
        Ok(Self { shape, next })
    }

    /// Checks that the device can access the whole ring.
    ///
    /// # Errors
    /// Part of the ring cannot be accessed.
    pub(crate) fn check(self, view: &DmaView<'_>) -> Result<(), DmaError> {
        self.shape.check(view, Direction::Write)
    }

    /// Writes the next completion, with the generation word last.
    ///
    /// # Errors
    /// The ring cannot be written.
    pub(crate) fn push(&mut self, view: &DmaView<'_>, completion: Completion) -> Result<(), DmaError> {
        let address = self.shape.address(self.next.index);
        let [first, second, third, last] = completion;
        for (word, at) in [(first, 0), (second, 4), (third, 8)] {
            view.store_u32(address + at, word, Ordering::Relaxed)?;
        }
        let last = last & !(1 << 31) | u32::from(self.next.generation) << 31;
        view.store_u32(address + 12, last, Ordering::Release)?;
        self.next = self.next.next(self.shape);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
