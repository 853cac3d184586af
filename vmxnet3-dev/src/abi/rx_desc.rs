//! The receive descriptor. The device never writes to it: the driver compares address and length with its own copy.

/// A receive descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RxDesc {
    /// Bus address of the buffer.
    pub(crate) address: u64,
    /// Size of the buffer in bytes, at most 16,383.
    pub(crate) len: u16,
    /// `true` for a BODY buffer, which takes only the continuation of a frame. Other buffers take only the start.
    pub(crate) body: bool,
}

/// Minimum size of a buffer that takes the start of a frame, in bytes.
pub(crate) const MIN_HEAD: u16 = 128;

impl RxDesc {
    /// Returns `true` if word 2 belongs to the device in this generation.
    pub(crate) const fn is_ready(word2: u32, generation: bool) -> bool {
        (word2 >> 31 == 1) == generation
    }

    /// Parses the word after the address.
    pub(crate) const fn parse(address: u64, word2: u32) -> Self {
        Self { address, len: super::low_bits(word2, 14), body: word2 >> 14 & 1 == 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_interface_says() {
        let desc = RxDesc::parse(7, 1 << 31 | 1 << 14 | 4096);
        assert_eq!(desc, RxDesc { address: 7, len: 4096, body: true });
        assert!(RxDesc::is_ready(1 << 31, true) && RxDesc::is_ready(0, false) && !RxDesc::is_ready(0, true));
        assert!(!RxDesc::parse(7, 1600).body);
    }
}
