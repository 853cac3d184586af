//! The transmit descriptor.

use super::low_bits;

/// Size of any descriptor, in bytes.
pub(crate) const DESC_LEN: u64 = 16;
/// Maximum number of descriptors of a frame that is not to be segmented.
pub(crate) const MAX_PER_FRAME: u32 = 16;
/// Maximum number of descriptors of a frame that is to be segmented.
pub(crate) const MAX_PER_SUPER_FRAME: u32 = 24;
/// Length that the value 0 stands for, in bytes.
const LARGEST_BUFFER: u32 = 1 << 14;

/// Offload requested for a frame (`om`, with `hlen` and `msscof`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OffloadMode {
    /// No offload.
    None,
    /// Encapsulation offload of revision 4 and later.
    Encapsulated,
    /// Store the sum from byte `start` to the end at byte `at`.
    Checksum { start: u16, at: u16 },
    /// Cut into TCP segments of `mss` bytes, which follow `header` bytes of headers.
    Segment { header: u16, mss: u16 },
}

/// A transmit descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TxDesc {
    /// Bus address of the bytes.
    pub(crate) address: u64,
    /// Number of bytes, 1 to 16,384.
    pub(crate) len: u32,
    /// `true` for the last descriptor of a frame.
    pub(crate) end: bool,
    /// The driver requests a completion.
    pub(crate) completion: bool,
    /// Requested offload; valid in the first descriptor of a frame.
    pub(crate) offload: OffloadMode,
    /// VLAN tag to insert; valid in the first descriptor of a frame.
    pub(crate) tag: Option<u16>,
}

impl TxDesc {
    /// Returns `true` if word 2 belongs to the device in this generation.
    pub(crate) const fn is_ready(word2: u32, generation: bool) -> bool {
        (word2 >> 14 & 1 == 1) == generation
    }

    /// Parses the words after the address.
    pub(crate) const fn parse(address: u64, word2: u32, word3: u32) -> Self {
        let len = low_bits(word2, 14);
        let (hlen, msscof) = (low_bits(word3, 10), low_bits(word2 >> 18, 14));
        Self {
            address,
            len: if len == 0 { LARGEST_BUFFER } else { len as u32 },
            end: word3 >> 12 & 1 == 1,
            completion: word3 >> 13 & 1 == 1,
            offload: match word3 >> 10 & 3 {
                0 => OffloadMode::None,
                1 => OffloadMode::Encapsulated,
                2 => OffloadMode::Checksum { start: hlen, at: msscof },
                _ => OffloadMode::Segment { header: hlen, mss: msscof },
            },
            tag: if word3 >> 15 & 1 == 1 { Some(low_bits(word3 >> 16, 16)) } else { None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_interface_says() {
        let desc =
            TxDesc::parse(0x1234, 1460 << 18 | 1 << 14 | 100, 5 << 16 | 1 << 15 | 1 << 13 | 1 << 12 | 3 << 10 | 54);
        assert_eq!(
            desc,
            TxDesc {
                address: 0x1234,
                len: 100,
                end: true,
                completion: true,
                offload: OffloadMode::Segment { header: 54, mss: 1460 },
                tag: Some(5),
            }
        );
        assert!(TxDesc::is_ready(1 << 14, true) && !TxDesc::is_ready(1 << 14, false));
        assert_eq!(TxDesc::parse(0, 50 << 18, 2 << 10 | 34).offload, OffloadMode::Checksum { start: 34, at: 50 });
        assert_eq!(TxDesc::parse(0, 0, 1 << 10).offload, OffloadMode::Encapsulated);
    }

    /// Trap 2: a length of 0 means 16 KiB.
    #[test]
    fn no_length_is_the_largest() {
        assert_eq!(TxDesc::parse(0, 0, 0).len, 16_384);
        assert_eq!(TxDesc::parse(0, 0x3fff, 0).len, 16_383);
    }
}
