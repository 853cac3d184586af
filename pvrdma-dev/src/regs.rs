//! BAR 1: decoding of accesses to registers (section 2.1). The device implements their effect.

use crate::abi::regs::offset;

/// Size of BAR 1 in bytes: a page of its own.
pub(crate) const BAR_SIZE: u64 = 0x1000;

/// Readable register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegRead {
    Version,
    Err,
    Icr,
    Imr,
    MacLow,
    MacHigh,
}

/// Write with an effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegWrite {
    DsrLow(u32),
    DsrHigh(u32),
    Ctl(u32),
    Request,
    Imr(u32),
    MacLow(u32),
    MacHigh(u32),
}

impl RegRead {
    /// Decodes a read of `len` bytes. Returns `None` unless it is a 32-bit read of a register.
    pub(crate) const fn decode(at: u64, len: usize) -> Option<Self> {
        if len != 4 {
            return None;
        }
        Some(match at {
            offset::VERSION => Self::Version,
            offset::ERR => Self::Err,
            offset::ICR => Self::Icr,
            offset::IMR => Self::Imr,
            offset::MAC_LOW => Self::MacLow,
            offset::MAC_HIGH => Self::MacHigh,
            _ => return None,
        })
    }
}

impl RegWrite {
    /// Decodes a write. Returns `None` if it has no effect.
    pub(crate) fn decode(at: u64, data: &[u8]) -> Option<Self> {
        let value = u32::from_le_bytes(data.try_into().ok()?);
        Some(match at {
            offset::DSR_LOW => Self::DsrLow(value),
            offset::DSR_HIGH => Self::DsrHigh(value),
            offset::CTL => Self::Ctl(value),
            offset::REQUEST => Self::Request,
            offset::IMR => Self::Imr(value),
            offset::MAC_LOW => Self::MacLow(value),
            offset::MAC_HIGH => Self::MacHigh(value),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Conformance 4: an access with any other offset, size or direction has no effect.
    #[test]
    fn only_words_at_known_offsets_mean_something() {
        for at in 0..0x40 {
            for len in [0, 1, 2, 3, 5, 8, 16] {
                assert_eq!(RegRead::decode(at, len), None);
                assert_eq!(RegWrite::decode(at, &vec![0xff; len]), None);
            }
        }
        let readable: Vec<u64> = (0..0x1000).filter(|&at| RegRead::decode(at, 4).is_some()).collect();
        assert_eq!(readable, [0x00, 0x14, 0x18, 0x1c, 0x20, 0x24]);
        let writable: Vec<u64> = (0..0x1000).filter(|&at| RegWrite::decode(at, &[0; 4]).is_some()).collect();
        assert_eq!(writable, [0x04, 0x08, 0x0c, 0x10, 0x1c, 0x20, 0x24]);
        assert_eq!(RegWrite::decode(8, &[1, 2, 3, 4]), Some(RegWrite::DsrHigh(0x0403_0201)));
    }
}
