//! Agreements between two endpoints of this implementation, in reserved bits of the BTH.
//!
//! The bits are the seven reserved ones of byte 8 ([`super::Bth::reserved7`]), which the ICRC covers and all receivers
//! ignore (IBA 9.2).
//!
//! # Selective acknowledgements
//!
//! A requester sets [`OFFER`] in its requests until the first response arrives. A responder that supports selective
//! acknowledgements sets [`ACCEPT`] in all its responses from then on. A first response without it ends the
//! negotiation.
//!
//! # Packets without an ICRC
//!
//! The administrator of each end decides if the ICRC may be left out: because the link between the ends has an
//! integrity check of its own, or because the link is trusted. An end without that permission never sets the bits
//! below, ignores them, and drops a packet with a wrong ICRC. So a packet without an ICRC is accepted only if both
//! administrators permit it.
//!
//! Two ends that agreed on selective acknowledgements then exchange the permission in each packet. A requester sets
//! [`REQUEST_WITHOUT_ICRC`] in its requests. A responder sets [`ACCEPT_WITHOUT_ICRC`] in place of [`ACCEPT`] while the
//! newest request had that value. Each side leaves the ICRC out only if the newest packet of the peer permits it. Its
//! four bytes are then zero, so lengths and offsets do not change.
//!
//! Retransmitted requests always have an ICRC. If the peer has moved to a host that does not permit packets without
//! one, it accepts the retransmission, and its response withdraws the permission. So no state of this agreement is
//! saved.

/// Bits of the first requests of a requester that accepts selective acknowledgements.
pub const OFFER: u8 = 0x2d;
/// Bits of the responses of a responder that sends selective acknowledgements.
pub const ACCEPT: u8 = 0x53;
/// Bits of the requests of a requester that accepts responses without an ICRC.
pub const REQUEST_WITHOUT_ICRC: u8 = 0x36;
/// Bits of the responses of a responder that sends selective acknowledgements, and accepts requests without an ICRC.
pub const ACCEPT_WITHOUT_ICRC: u8 = 0x65;

/// Returns `true` if a response with these bits comes from a responder that sends selective acknowledgements.
#[inline]
pub(crate) const fn accepts(reserved7: u8) -> bool {
    matches!(reserved7, ACCEPT | ACCEPT_WITHOUT_ICRC)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three damaged bits never turn one value of a direction into another.
    #[test]
    fn values_of_a_direction_differ_in_four_bits() {
        for values in [[0, OFFER, REQUEST_WITHOUT_ICRC], [0, ACCEPT, ACCEPT_WITHOUT_ICRC]] {
            for (index, one) in values.iter().enumerate() {
                for other in &values[index + 1..] {
                    assert!((one ^ other).count_ones() >= 4, "{one:#x} {other:#x}");
                }
                assert!(*one < 0x80);
            }
        }
    }

    #[test]
    fn only_responses_accept() {
        let accepting: Vec<u8> = (0..0x80).filter(|&bits| accepts(bits)).collect();
        assert_eq!(accepting, [ACCEPT, ACCEPT_WITHOUT_ICRC]);
    }
}
