//! Register decoding. The device implements the effects.

use crate::abi::regs::{MAX_QUEUES, MAX_VECTORS, control, queue};

/// Size of BAR 0 and of BAR 1, in bytes.
pub(crate) const BAR_SIZE: u64 = 0x1000;

/// A readable register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegRead {
    InterruptMask(u8),
    Revisions,
    UptVersions,
    SharedLow,
    SharedHigh,
    Result,
    MacLow,
    MacHigh,
    InterruptCause,
}

/// A register write that has an effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegWrite {
    InterruptMask(u8, bool),
    TxProducer(u8),
    /// Producer index of either ring.
    RxProducer(u8),
    Revision(u32),
    UptVersion(u32),
    SharedLow(u32),
    SharedHigh(u32),
    Command(u32),
    MacLow(u32),
    MacHigh(u32),
    Acknowledge(u32),
}

/// Returns the offsets of the producer registers of BAR 0, whose written values are only hints.
pub(crate) fn doorbells() -> impl Iterator<Item = u64> {
    let bases = [queue::TX_PRODUCER, queue::RX_PRODUCER, queue::RX_PRODUCER_2];
    bases.into_iter().flat_map(|base| (0..u64::from(MAX_QUEUES)).map(move |number| base + number * queue::STRIDE))
}

/// Returns the index of a register in an array that starts at `base`.
fn number(at: u64, base: u64, count: u64) -> Option<u8> {
    let into = at.checked_sub(base)?;
    let index = into / queue::STRIDE;
    (into % queue::STRIDE == 0 && index < count).then(|| u8::try_from(index).ok()).flatten()
}

impl RegRead {
    /// Decodes a read of `len` bytes. Registers are 32 bits wide; other accesses return `None`.
    pub(crate) fn decode(bar: usize, at: u64, len: usize) -> Option<Self> {
        match (bar, at) {
            _ if len != 4 => None,
            (0, _) => number(at, queue::INTERRUPT_MASK, MAX_VECTORS.into()).map(Self::InterruptMask),
            (1, control::REVISION) => Some(Self::Revisions),
            (1, control::UPT_VERSION) => Some(Self::UptVersions),
            (1, control::SHARED_LOW) => Some(Self::SharedLow),
            (1, control::SHARED_HIGH) => Some(Self::SharedHigh),
            (1, control::COMMAND) => Some(Self::Result),
            (1, control::MAC_LOW) => Some(Self::MacLow),
            (1, control::MAC_HIGH) => Some(Self::MacHigh),
            (1, control::INTERRUPT_CAUSE) => Some(Self::InterruptCause),
            _ => None,
        }
    }
}

impl RegWrite {
    /// Decodes a write. Returns `None` if it has no effect.
    pub(crate) fn decode(bar: usize, at: u64, data: &[u8]) -> Option<Self> {
        let value = u32::from_le_bytes(data.try_into().ok()?);
        let queues = MAX_QUEUES.into();
        match (bar, at) {
            (0, _) => number(at, queue::INTERRUPT_MASK, MAX_VECTORS.into())
                .map(|vector| Self::InterruptMask(vector, value & 1 == 1))
                .or_else(|| number(at, queue::TX_PRODUCER, queues).map(Self::TxProducer))
                .or_else(|| number(at, queue::RX_PRODUCER, queues).map(Self::RxProducer))
                .or_else(|| number(at, queue::RX_PRODUCER_2, queues).map(Self::RxProducer)),
            (1, control::REVISION) => Some(Self::Revision(value)),
            (1, control::UPT_VERSION) => Some(Self::UptVersion(value)),
            (1, control::SHARED_LOW) => Some(Self::SharedLow(value)),
            (1, control::SHARED_HIGH) => Some(Self::SharedHigh(value)),
            (1, control::COMMAND) => Some(Self::Command(value)),
            (1, control::MAC_LOW) => Some(Self::MacLow(value)),
            (1, control::MAC_HIGH) => Some(Self::MacHigh(value)),
            (1, control::EVENT_CAUSE) => Some(Self::Acknowledge(value)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_at_known_offsets_mean_something() {
        let mut writable = [0; 3];
        for (bar, count) in writable.iter_mut().enumerate() {
            for at in 0..BAR_SIZE {
                for len in [0, 1, 2, 3, 5, 8] {
                    assert_eq!(RegRead::decode(bar, at, len), None);
                    assert_eq!(RegWrite::decode(bar, at, &vec![0xff; len]), None);
                }
                *count += usize::from(RegWrite::decode(bar, at, &[0; 4]).is_some());
            }
        }
        assert_eq!(writable, [25 + 8 + 8 + 8, 8, 0]);
        assert_eq!(RegWrite::decode(0, 0x638, &[9, 0, 0, 0]), Some(RegWrite::TxProducer(7)));
        assert_eq!(RegWrite::decode(0, 0x640, &[9, 0, 0, 0]), None, "there is no queue 8");
        assert_eq!(RegWrite::decode(0, 0xa08, &[9, 0, 0, 0]), Some(RegWrite::RxProducer(1)));
        assert_eq!(RegWrite::decode(0, 0xc0, &[1, 0, 0, 0]), Some(RegWrite::InterruptMask(24, true)));
        assert_eq!(RegWrite::decode(0, u64::MAX, &[1, 0, 0, 0]), None);
    }
}
