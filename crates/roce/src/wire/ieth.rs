//! The invalidate extended transport header (IBA 9.3.8).

/// Invalidate extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ieth {
    /// R_Key of the responder to be invalidated.
    pub rkey: u32,
}

impl Ieth {
    #[inline]
    pub(super) const fn from_bytes(header: &[u8; 4]) -> Self {
        Self { rkey: u32::from_be_bytes(*header) }
    }

    #[inline]
    pub(super) const fn to_bytes(self) -> [u8; 4] {
        self.rkey.to_be_bytes()
    }
}
