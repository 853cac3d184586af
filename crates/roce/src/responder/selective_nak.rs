//! Selective NAKs: which packets are missing beside the one that a sequence NAK names.
//!
//! A NAK acknowledges everything before its PSN, so a responder can name one missing packet only, and the next when that one
//! has come: at one percent loss that is a hundred packets in a round trip. The architecture has no selective NAK. Ours is an
//! ACK with a stale PSN, [`STALE_PSN_OFFSET`] before that of the missing packet: to any requester a response from long ago,
//! which acknowledges nothing and is dropped silently. Our requester understands it.
//!
//! Only peers get them that were seen to retransmit what is missing and nothing else ([`crate::ReorderBuffer`]).

use pvrdma_verbs::Psn;

/// How many PSNs old such an ACK is: half of those that can be told from PSNs to come (IBA 9.7.1).
pub(crate) const STALE_PSN_OFFSET: u32 = 1 << 22;

/// The PSN of the selective NAK for the packet `missing`.
pub(crate) fn stale_psn(missing: Psn) -> Psn {
    missing.plus(STALE_PSN_OFFSET.wrapping_neg())
}
