//! The extended transport header of a request for an atomic operation (IBA 9.3.4).

use pvrdma_packet::field::{field, put};

/// Extended transport header of an atomic operation. Operands are numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AtomicEth {
    /// Virtual address at the responder.
    pub address: u64,
    /// R_Key.
    pub rkey: u32,
    /// Value to swap in, or to add.
    pub swap_or_add: u64,
    /// Value to compare with the current one.
    pub compare: u64,
}

impl AtomicEth {
    #[inline]
    pub(super) fn from_bytes(header: &[u8; 28]) -> Self {
        Self {
            address: u64::from_be_bytes(field::<0, _, _>(header)),
            rkey: u32::from_be_bytes(field::<8, _, _>(header)),
            swap_or_add: u64::from_be_bytes(field::<12, _, _>(header)),
            compare: u64::from_be_bytes(field::<20, _, _>(header)),
        }
    }

    #[inline]
    pub(super) fn to_bytes(self) -> [u8; 28] {
        let mut header = [0; 28];
        put::<0, _, _>(&mut header, self.address.to_be_bytes());
        put::<8, _, _>(&mut header, self.rkey.to_be_bytes());
        put::<12, _, _>(&mut header, self.swap_or_add.to_be_bytes());
        put::<20, _, _>(&mut header, self.compare.to_be_bytes());
        header
    }
}
