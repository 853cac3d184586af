//! The RDMA extended transport header (IBA 9.3.3).

use pvrdma_packet::field::{field, put};

/// RDMA extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Reth {
    /// Virtual address at the responder.
    pub address: u64,
    /// R_Key for the memory.
    pub rkey: u32,
    /// Length of the whole message in bytes ("DMA length").
    pub length: u32,
}

impl Reth {
    #[inline]
    pub(super) fn from_bytes(header: &[u8; 16]) -> Self {
        Self {
            address: u64::from_be_bytes(field::<0, _, _>(header)),
            rkey: u32::from_be_bytes(field::<8, _, _>(header)),
            length: u32::from_be_bytes(field::<12, _, _>(header)),
        }
    }

    #[inline]
    pub(super) fn to_bytes(self) -> [u8; 16] {
        let mut header = [0; 16];
        put::<0, _, _>(&mut header, self.address.to_be_bytes());
        put::<8, _, _>(&mut header, self.rkey.to_be_bytes());
        put::<12, _, _>(&mut header, self.length.to_be_bytes());
        header
    }
}
