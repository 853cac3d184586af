//! Commands and what some of them carry.

use super::{le32, le64};

/// A command that the device knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    /// Take the shared area and start.
    Activate,
    /// Stop; no DMA after it.
    Quiesce,
    /// Stop and forget interrupt masks; no DMA after it.
    Reset,
    /// `rxMode` has changed.
    UpdateRxMode,
    /// The multicast table has changed.
    UpdateMacFilters,
    /// The VLAN table has changed.
    UpdateVlanFilters,
    /// The RSS configuration has changed.
    UpdateRss,
    /// Moderation levels have changed.
    UpdateModeration,
    /// Wake-up patterns have changed.
    UpdatePower,
    /// `uptFeatures` has changed.
    UpdateFeatures,
    /// A coalescing scheme is set.
    SetCoalesce,
    /// Write the state of all queues.
    GetQueueStatus,
    /// Write the statistics of all queues.
    GetStats,
    /// Speed and state of the link.
    GetLink,
    /// Burnt-in MAC address, first four bytes.
    GetPermanentMacLow,
    /// Last two bytes.
    GetPermanentMacHigh,
    /// Device ID.
    GetDeviceIdLow,
    /// Its high half.
    GetDeviceIdHigh,
    /// Nothing.
    GetExtraInfo,
    /// Type of interrupts and how they are masked.
    GetInterruptConfig,
    /// Whether rings adapt.
    GetAdaptiveRingInfo,
    /// Bytes of a slot of the transmit data ring.
    GetTxDataSize,
    /// Write the coalescing scheme.
    GetCoalesce,
}

impl Command {
    /// The command of this number, if the device knows it in `revision` (1 to 3).
    pub(crate) fn parse(number: u32, revision: u8) -> Option<Self> {
        Some(match number {
            0xcafe_0000 => Self::Activate,
            0xcafe_0001 => Self::Quiesce,
            0xcafe_0002 => Self::Reset,
            0xcafe_0003 => Self::UpdateRxMode,
            0xcafe_0004 => Self::UpdateMacFilters,
            0xcafe_0005 => Self::UpdateVlanFilters,
            0xcafe_0006 => Self::UpdateRss,
            0xcafe_0007 => Self::UpdateModeration,
            0xcafe_0008 => Self::UpdatePower,
            0xcafe_0009 => Self::UpdateFeatures,
            0xcafe_000e if revision >= 3 => Self::SetCoalesce,
            0xf00d_0000 => Self::GetQueueStatus,
            0xf00d_0001 => Self::GetStats,
            0xf00d_0002 => Self::GetLink,
            0xf00d_0003 => Self::GetPermanentMacLow,
            0xf00d_0004 => Self::GetPermanentMacHigh,
            0xf00d_0005 => Self::GetDeviceIdLow,
            0xf00d_0006 => Self::GetDeviceIdHigh,
            0xf00d_0007 => Self::GetExtraInfo,
            0xf00d_0008 => Self::GetInterruptConfig,
            0xf00d_0009 => Self::GetAdaptiveRingInfo,
            0xf00d_000a if revision >= 3 => Self::GetTxDataSize,
            0xf00d_000b if revision >= 3 => Self::GetCoalesce,
            _ => return None,
        })
    }
}

/// Where a configuration of variable length is (`VariableLenConfDesc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConfigPlace {
    /// Bytes.
    pub(crate) len: u32,
    /// Bus address.
    pub(crate) address: u64,
}

impl ConfigPlace {
    /// Parses 16 bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        Self { len: le32(bytes, 4), address: le64(bytes, 8) }
    }
}

/// When completions raise an interrupt (`CoalesceScheme`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Coalesce {
    /// One interrupt for each frame.
    Disabled,
    /// One for each batch of received frames. What was sent may wait for the next of them, for a moment.
    #[default]
    Adaptive,
    /// After so many completions, at the latest at the end of a batch: transmit, transmit completions, receive.
    Static([u32; 3]),
    /// At most so many a second. Batches keep below what a guest can take, so that nothing is held back.
    Rate(u32),
}

impl Coalesce {
    /// Bytes in memory.
    pub(crate) const LEN: usize = 16;
    /// Most completions that [`Self::Static`] may name.
    const MAX_DEPTH: u32 = 128;
    /// What [`Self::Rate`] may name.
    const RATES: std::ops::RangeInclusive<u32> = 100..=100_000;

    /// Parses a scheme; `None` if it is not one.
    pub(crate) fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        match le32(bytes, 0) {
            0 => Some(Self::Disabled),
            1 => Some(Self::Adaptive),
            2 => {
                let depths = [le32(bytes, 4), le32(bytes, 8), le32(bytes, 12)];
                depths.iter().all(|&depth| depth <= Self::MAX_DEPTH).then_some(Self::Static(depths))
            }
            3 => Some(le32(bytes, 4)).filter(|rate| Self::RATES.contains(rate)).map(Self::Rate),
            _ => None,
        }
    }

    /// The scheme as it is in memory.
    pub(crate) fn encode(self) -> [u8; Self::LEN] {
        let words = match self {
            Self::Disabled => [0; 4],
            Self::Adaptive => [1, 0, 0, 0],
            Self::Static([tx, tx_completions, rx]) => [2, tx, tx_completions, rx],
            Self::Rate(rate) => [3, rate, 0, 0],
        };
        let mut bytes = [0; Self::LEN];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_later_revisions_are_unknown_before() {
        for number in [0xcafe_000e, 0xf00d_000a, 0xf00d_000b] {
            assert_eq!(Command::parse(number, 2), None);
            assert!(Command::parse(number, 3).is_some());
        }
        assert_eq!(Command::parse(0xcafe_0010, 3), None, "field selection is revision 4");
    }

    #[test]
    fn schemes_are_bounded_and_come_back() {
        for scheme in [Coalesce::Disabled, Coalesce::Adaptive, Coalesce::Static([0, 64, 128]), Coalesce::Rate(100_000)]
        {
            assert_eq!(Coalesce::parse(&scheme.encode()), Some(scheme));
        }
        for bad in [Coalesce::Static([129, 0, 0]), Coalesce::Rate(99), Coalesce::Rate(100_001)] {
            assert_eq!(Coalesce::parse(&bad.encode()), None);
        }
        assert_eq!(Coalesce::parse(&[4; 16]), None);
    }
}
