//! The extended transport header of a FLUSH request (IBA release 1.5, annex A19).

/// FLUSH extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Feth {
    /// Placement type: 1 global visibility, 2 persistence.
    pub placement: u8,
    /// Selectivity level: 0 a range, 1 the whole memory region.
    pub selectivity: u8,
}

impl Feth {
    pub(super) const fn from_bytes([.., low]: [u8; 4]) -> Self {
        Self { placement: low & 0xf, selectivity: low >> 4 & 3 }
    }

    pub(super) const fn to_bytes(self) -> [u8; 4] {
        [0, 0, 0, (self.selectivity & 3) << 4 | self.placement & 0xf]
    }
}
