//! Queue descriptors: locations of a queue's rings, and the fields that the device writes.

use thiserror::Error;

use super::{byte, le16, le32, le64};
use crate::ring::{RingShape, RingShapeError};
use crate::saved_state::error::RestoreError;

/// Size of a descriptor of either kind, in bytes.
pub(crate) const QUEUE_DESC_SIZE: usize = 256;
/// [`QUEUE_DESC_SIZE`] as a bus length.
pub(crate) const QUEUE_DESC_LEN: u64 = QUEUE_DESC_SIZE as u64;
/// Alignment of the first descriptor, in bytes.
pub(crate) const QUEUE_DESC_ALIGN: u64 = 128;
/// Offset of `txThreshold`, in bytes.
pub(crate) const TX_THRESHOLD_AT: u64 = 4;
/// Offset of `updateRxProd`, in bytes.
pub(crate) const UPDATE_RX_PRODUCER_AT: u64 = 0;
/// Offset of the status, in bytes.
pub(crate) const STATUS_AT: u64 = 80;
/// Offset of the statistics, in bytes.
pub(crate) const STATS_AT: u64 = 88;

/// Maximum number of descriptors in a command ring.
pub(crate) const MAX_RING: u32 = 4096;
/// Maximum number of descriptors in the completion ring of a receive queue: two command rings.
pub(crate) const MAX_RX_COMPLETIONS: u32 = 8192;
/// Maximum size of a slot of the receive data ring, in bytes.
const MAX_DATA_SLOT: u16 = 2048;
/// The slot size of the receive data ring is a multiple of this, in bytes.
const DATA_SLOT_ALIGN: u16 = 64;

/// Reason a queue descriptor is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum QueueDescError {
    /// The shape of a ring is invalid.
    #[error(transparent)]
    Ring(#[from] RingShapeError),
    /// The data ring extends past the end of the address space.
    #[error("data ring at {0:#x}")]
    DataRing(u64),
    /// The slot size of the data ring is invalid.
    #[error("data ring with slots of {0} bytes")]
    DataSlot(u16),
    /// The interrupt vector does not exist.
    #[error("vector {0}")]
    Vector(u32),
}

impl From<QueueDescError> for RestoreError {
    fn from(error: QueueDescError) -> Self {
        let (field, value) = match error {
            QueueDescError::Ring(error) => return error.into(),
            QueueDescError::DataRing(base) => ("data ring", base),
            QueueDescError::DataSlot(slot) => ("slot of the data ring", slot.into()),
            QueueDescError::Vector(vector) => ("interrupt vector", vector.into()),
        };
        Self::Invalid { field, value }
    }
}

/// Configuration of a transmit queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TxQueueConfig {
    pub(crate) ring: RingShape,
    pub(crate) completions: RingShape,
    pub(crate) vector: u8,
}

/// Receive data ring: one slot for each descriptor of ring 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DataRing {
    pub(crate) base: u64,
    /// Size of a slot, in bytes.
    pub(crate) slot: u16,
}

/// Configuration of a receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RxQueueConfig {
    pub(crate) ring: RingShape,
    /// Ring 2, if there is one.
    pub(crate) second: Option<RingShape>,
    pub(crate) completions: RingShape,
    pub(crate) data: Option<DataRing>,
    pub(crate) vector: u8,
}

fn vector(bytes: &[u8], vectors: u16) -> Result<u8, QueueDescError> {
    check_vector(byte(bytes, 72).into(), vectors)
}

/// Checks an interrupt vector of a function with `vectors` vectors.
///
/// # Errors
/// The vector does not exist.
pub(crate) fn check_vector(vector: u32, vectors: u16) -> Result<u8, QueueDescError> {
    let narrow = u8::try_from(vector).ok().filter(|&narrow| u16::from(narrow) < vectors);
    narrow.ok_or(QueueDescError::Vector(vector))
}

impl TxQueueConfig {
    /// Parses a descriptor for a function with `vectors` vectors.
    pub(crate) fn parse(bytes: &[u8], vectors: u16) -> Result<Self, QueueDescError> {
        Ok(Self {
            ring: RingShape::new("transmit ring", le64(bytes, 16), le32(bytes, 56), MAX_RING)?,
            completions: RingShape::new("completion ring", le64(bytes, 32), le32(bytes, 64), MAX_RING)?,
            vector: vector(bytes, vectors)?,
        })
    }
}

impl RxQueueConfig {
    /// Parses a descriptor for a function with `vectors` vectors. Revisions before 3 have no data ring.
    pub(crate) fn parse(bytes: &[u8], vectors: u16, revision: u8) -> Result<Self, QueueDescError> {
        let ring = RingShape::new("receive ring 1", le64(bytes, 16), le32(bytes, 56), MAX_RING)?;
        let second = match le32(bytes, 60) {
            0 => None,
            entries => Some(RingShape::new("receive ring 2", le64(bytes, 24), entries, MAX_RING)?),
        };
        let data = DataRing { base: le64(bytes, 48), slot: le16(bytes, 74) };
        let data = if revision < 3 || data.slot == 0 { None } else { Some(data.checked(ring)?) };
        Ok(Self {
            ring,
            second,
            completions: RingShape::new("completion ring", le64(bytes, 32), le32(bytes, 64), MAX_RX_COMPLETIONS)?,
            data,
            vector: vector(bytes, vectors)?,
        })
    }
}

impl DataRing {
    /// Checks a data ring for this ring 1.
    ///
    /// # Errors
    /// The slot size is invalid, or the ring extends past the end of the address space.
    pub(crate) fn checked(self, ring: RingShape) -> Result<Self, QueueDescError> {
        if self.slot == 0 || self.slot > MAX_DATA_SLOT || !self.slot.is_multiple_of(DATA_SLOT_ALIGN) {
            return Err(QueueDescError::DataSlot(self.slot));
        }
        self.base.checked_add(self.len(ring)).map(|_| self).ok_or(QueueDescError::DataRing(self.base))
    }

    /// Length in bytes, of a data ring for this ring 1.
    pub(crate) fn len(self, ring: RingShape) -> u64 {
        u64::from(self.slot) * u64::from(ring.entries())
    }

    /// Returns the bus address of a slot. The index is one of ring 1, for which the whole data ring was checked.
    pub(crate) const fn slot_address(self, index: u32) -> u64 {
        self.base.wrapping_add(self.slot as u64 * index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rx() -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[16..24].copy_from_slice(&0x1000_u64.to_le_bytes());
        bytes[24..32].copy_from_slice(&0x2000_u64.to_le_bytes());
        bytes[32..40].copy_from_slice(&0x3000_u64.to_le_bytes());
        bytes[48..56].copy_from_slice(&0x4000_u64.to_le_bytes());
        for (at, entries) in [(56, 64_u32), (60, 32), (64, 96)] {
            bytes[at..at + 4].copy_from_slice(&entries.to_le_bytes());
        }
        bytes[72] = 3;
        bytes[74] = 128;
        bytes
    }

    #[test]
    fn a_receive_queue_as_drivers_describe_it() {
        let config = RxQueueConfig::parse(&rx(), 4, 3).unwrap();
        assert_eq!(
            (config.ring.entries(), config.second.unwrap().entries(), config.completions.entries()),
            (64, 32, 96)
        );
        assert_eq!(config.data.unwrap().slot_address(2), 0x4100);
        assert_eq!(RxQueueConfig::parse(&rx(), 4, 2).unwrap().data, None, "revision 2 knows no data ring");
        assert_eq!(RxQueueConfig::parse(&rx(), 3, 3), Err(QueueDescError::Vector(3)));
    }

    /// Trap 15: values of a hostile driver are refused.
    #[test]
    fn impossible_shapes_are_refused() {
        let with = |at: usize, value: &[u8]| {
            let mut bytes = rx();
            bytes[at..at + value.len()].copy_from_slice(value);
            RxQueueConfig::parse(&bytes, 4, 3)
        };
        for entries in [0_u32, 1, 31, 33, 4097, 4128, u32::MAX] {
            assert!(
                matches!(with(56, &entries.to_le_bytes()), Err(QueueDescError::Ring(RingShapeError::Entries(..)))),
                "{entries}"
            );
        }
        assert!(with(60, &0_u32.to_le_bytes()).unwrap().second.is_none(), "a ring 2 is no duty");
        assert!(matches!(with(60, &8_u32.to_le_bytes()), Err(QueueDescError::Ring(RingShapeError::Entries(..)))));
        assert!(matches!(with(64, &8224_u32.to_le_bytes()), Err(QueueDescError::Ring(RingShapeError::Entries(..)))));
        for base in [0x1010_u64, u64::MAX - 511] {
            assert!(
                matches!(with(16, &base.to_le_bytes()), Err(QueueDescError::Ring(RingShapeError::Base(..)))),
                "{base:#x}"
            );
        }
        for slot in [2112_u16, 65, 63] {
            assert!(matches!(with(74, &slot.to_le_bytes()), Err(QueueDescError::DataSlot(_))), "{slot}");
        }
        assert!(matches!(with(48, &u64::MAX.to_le_bytes()), Err(QueueDescError::DataRing(_))));
    }
}
