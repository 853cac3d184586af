//! BAR 1: which register an access means (section 2.1). What it does is the device's business.

use crate::abi::regs::offset;

/// Bytes of BAR 1: a page of its own.
pub(crate) const BAR_SIZE: u64 = 0x1000;

/// A register that can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readable {
    Version,
    Err,
    Icr,
    Imr,
    MacLow,
    MacHigh,
}

/// A write that has an effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Write {
    DsrLow(u32),
    DsrHigh(u32),
    Ctl(u32),
    Request,
    Imr(u32),
    MacLow(u32),
    MacHigh(u32),
}

impl Readable {
    /// The register a read of `len` bytes means, if any: registers are 32 bits wide and nothing else.
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

impl Write {
    /// The effect a write has, if any.
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

    /// Conformance 4: any other offset, size or direction means nothing.
    #[test]
    fn only_words_at_known_offsets_mean_something() {
        for at in 0..0x40 {
            for len in [0, 1, 2, 3, 5, 8, 16] {
                assert_eq!(Readable::decode(at, len), None);
                assert_eq!(Write::decode(at, &vec![0xff; len]), None);
            }
        }
        let readable: Vec<u64> = (0..0x1000).filter(|&at| Readable::decode(at, 4).is_some()).collect();
        assert_eq!(readable, [0x00, 0x14, 0x18, 0x1c, 0x20, 0x24]);
        let writable: Vec<u64> = (0..0x1000).filter(|&at| Write::decode(at, &[0; 4]).is_some()).collect();
        assert_eq!(writable, [0x04, 0x08, 0x0c, 0x10, 0x1c, 0x20, 0x24]);
        assert_eq!(Write::decode(8, &[1, 2, 3, 4]), Some(Write::DsrHigh(0x0403_0201)));
    }
}
