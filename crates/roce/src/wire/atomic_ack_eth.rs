//! The extended transport header of an atomic operation's response (IBA 9.3.6).

/// Atomic ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AtomicAckEth {
    /// Eight bytes at the responder before the operation, as a number.
    pub original: u64,
}

impl AtomicAckEth {
    #[inline]
    pub(super) const fn from_bytes(header: &[u8; 8]) -> Self {
        Self { original: u64::from_be_bytes(*header) }
    }

    #[inline]
    pub(super) const fn to_bytes(self) -> [u8; 8] {
        self.original.to_be_bytes()
    }
}
