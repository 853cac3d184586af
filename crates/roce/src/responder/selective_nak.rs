//! Saying which packets are missing beside the one that a sequence NAK names.
//!
//! A NAK confirms everything in front of its PSN, so a responder can name one missing packet only, and the next when that one
//! has come: at one percent loss a hundred packets in a round trip. We tell of the others by ACKs that confirm nothing, with the
//! PSN [`STALE_PSN_OFFSET`] before that of the missing packet. To a requester that is an answer from long ago, which confirms nothing
//! and is dropped without a word. Ours understands it.
//!
//! Only peers get them that were seen to send again what is missing and nothing else ([`crate::ReorderBuffer`]).

use pvrdma_verbs::Psn;

/// How old such an ACK seems: half of what can be told from PSNs to come.
pub(crate) const STALE_PSN_OFFSET: u32 = 1 << 22;

/// The PSN of an ACK that tells that `missing` is missing.
pub(crate) fn stale_psn(missing: Psn) -> Psn {
    missing.plus(STALE_PSN_OFFSET.wrapping_neg())
}
