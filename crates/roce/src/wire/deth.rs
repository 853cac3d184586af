//! The datagram extended transport header (IBA 9.3.2).

use pvrdma_packet::field::{field, put, u24, u24_bytes};
use pvrdma_verbs_types::Qpn;

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Deth {
    /// Q_Key, which must equal that of the receiver.
    pub qkey: u32,
    /// QP of the sender.
    pub source: Qpn,
}

impl Deth {
    #[inline]
    pub(super) fn from_bytes(header: &[u8; 8]) -> Self {
        Self { qkey: u32::from_be_bytes(field::<0, _, _>(header)), source: Qpn::new(u24(field::<5, _, _>(header))) }
    }

    #[inline]
    pub(super) fn to_bytes(self) -> [u8; 8] {
        let mut header = [0; 8];
        put::<0, _, _>(&mut header, self.qkey.to_be_bytes());
        put::<5, _, _>(&mut header, u24_bytes(self.source.get()));
        header
    }
}
