//! Commands and the parameters of some of them.

use super::{le32, le64};

/// A command that the device supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    /// Read the shared area and start.
    Activate,
    /// Stop; no DMA follows.
    Quiesce,
    /// Stop and reset the interrupt masks; no DMA follows.
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
    /// Set a coalescing scheme.
    SetCoalesce,
    /// Write the status of all queues.
    GetQueueStatus,
    /// Write the statistics of all queues.
    GetStats,
    /// Return speed and state of the link.
    GetLink,
    /// Return the permanent MAC address, first four bytes.
    GetPermanentMacLow,
    /// Return the permanent MAC address, last two bytes.
    GetPermanentMacHigh,
    /// Return the device ID.
    GetDeviceIdLow,
    /// Return the high half of the device ID.
    GetDeviceIdHigh,
    /// Return extra information. There is none.
    GetExtraInfo,
    /// Return the type of interrupts and their mask mode.
    GetInterruptConfig,
    /// Return whether rings adapt.
    GetAdaptiveRingInfo,
    /// Return the size of a slot of the transmit data ring, in bytes.
    GetTxDataSize,
    /// Write the coalescing scheme.
    GetCoalesce,
}

impl Command {
    /// Returns the command with this number, if the device supports it in `revision` (1 to 3).
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

/// Location of a configuration of variable length (`VariableLenConfDesc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConfigPlace {
    /// Length, in bytes.
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

/// Interrupt coalescing scheme (`CoalesceScheme`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Coalesce {
    /// One interrupt for each frame.
    Disabled,
    /// One interrupt for each batch of received frames. Transmit completions may wait briefly for the next of them.
    #[default]
    Adaptive,
    /// One interrupt after a number of completions, at the latest at the end of a batch: transmit, transmit
    /// completions, receive.
    Static([u32; 3]),
    /// Maximum interrupts per second. Batches already stay below the rate that a guest can handle, so no interrupt is
    /// delayed.
    Rate(u32),
}

impl Coalesce {
    /// Size in memory, in bytes.
    pub(crate) const LEN: usize = 16;
    /// Maximum number of completions in [`Self::Static`].
    const MAX_DEPTH: u32 = 128;
    /// Valid rates for [`Self::Rate`].
    const RATES: std::ops::RangeInclusive<u32> = 100..=100_000;

    /// Parses a scheme. Returns `None` if it is invalid.
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

    /// Encodes the scheme in its memory format.
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
