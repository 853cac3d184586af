//! The base transport header, the first header of every packet (IBA 9.2).

use pvrdma_packet::field::{field, put, u24, u24_bytes};
use pvrdma_verbs_types::{Psn, Qpn};

use super::opcode::Opcode;

/// P_Key of the default partition, the only one.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Returns `true` if two P_Keys match: the same partition, and at least one side a full member (IBA 10.9.3).
#[inline]
pub const fn pkey_matches(ours: u16, theirs: u16) -> bool {
    (ours ^ theirs) & 0x7fff == 0 && (ours | theirs) & 0x8000 != 0
}

/// Base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Bth {
    /// Opcode of the packet.
    pub opcode: Opcode,
    /// SE: the solicited event bit, which triggers a solicited-only completion notification.
    pub solicited: bool,
    /// MigReq; ignored when received.
    pub migration: bool,
    /// Pad bytes (0..=3) that extend the payload to a multiple of four. Computed when a packet is built.
    pub pad: u8,
    /// Transport version, 0.
    pub version: u8,
    /// P_Key of the partition.
    pub pkey: u16,
    /// FECN; ignored when received.
    pub fecn: bool,
    /// BECN: set in a congestion notification.
    pub becn: bool,
    /// Six reserved bits that are not covered by the ICRC.
    pub reserved6: u8,
    /// QP of the receiver.
    pub destination: Qpn,
    /// AckReq: the receiver should acknowledge soon.
    pub ack_request: bool,
    /// Seven reserved bits that are covered by the ICRC.
    pub reserved7: u8,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Length of the header in bytes.
    pub const LEN: usize = 12;

    /// Creates a header with all optional bits off.
    #[inline]
    pub const fn new(opcode: Opcode, destination: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migration: false,
            pad: 0,
            version: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            reserved6: 0,
            destination,
            ack_request: false,
            reserved7: 0,
            psn,
        }
    }

    #[inline]
    pub(super) fn from_bytes(header: &[u8; Self::LEN]) -> Self {
        let [opcode, flags] = field::<0, _, _>(header);
        let [notification] = field::<4, _, _>(header);
        let [request] = field::<8, _, _>(header);
        Self {
            opcode: Opcode(opcode),
            solicited: flags & 0x80 != 0,
            migration: flags & 0x40 != 0,
            pad: flags >> 4 & 3,
            version: flags & 0xf,
            pkey: u16::from_be_bytes(field::<2, _, _>(header)),
            fecn: notification & 0x80 != 0,
            becn: notification & 0x40 != 0,
            reserved6: notification & 0x3f,
            destination: Qpn::new(u24(field::<5, _, _>(header))),
            ack_request: request & 0x80 != 0,
            reserved7: request & 0x7f,
            psn: Psn::new(u24(field::<9, _, _>(header))),
        }
    }

    #[inline]
    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let bit = |set: bool, mask: u8| if set { mask } else { 0 };
        let flags = bit(self.solicited, 0x80) | bit(self.migration, 0x40) | (self.pad & 3) << 4 | self.version & 0xf;
        let notification = bit(self.fecn, 0x80) | bit(self.becn, 0x40) | self.reserved6 & 0x3f;
        let mut header = [0; Self::LEN];
        put::<0, _, _>(&mut header, [self.opcode.0, flags]);
        put::<2, _, _>(&mut header, self.pkey.to_be_bytes());
        put::<4, _, _>(&mut header, [notification]);
        put::<5, _, _>(&mut header, u24_bytes(self.destination.get()));
        put::<8, _, _>(&mut header, [bit(self.ack_request, 0x80) | self.reserved7 & 0x7f]);
        put::<9, _, _>(&mut header, u24_bytes(self.psn.get()));
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_has_its_field() {
        let ones = Bth::from_bytes(&[0xff; 12]);
        assert_eq!(ones.to_bytes(), [0xff; 12]);
        let zeros = Bth::from_bytes(&[0; 12]);
        assert_eq!(zeros.to_bytes(), [0; 12]);
        assert_eq!((ones.pad, ones.version, ones.reserved6, ones.reserved7), (3, 15, 63, 127));
    }

    #[test]
    fn pkeys() {
        assert!(pkey_matches(DEFAULT_PKEY, 0xffff));
        assert!(pkey_matches(DEFAULT_PKEY, 0x7fff));
        assert!(!pkey_matches(DEFAULT_PKEY, 0x9234));
        assert!(!pkey_matches(0x7fff, 0x7fff));
    }
}
