//! The wire: the path to peers of other hosts, through the device's port.
//!
//! # Who sends
//!
//! The requester of a QP sends with its half held, so that its packets leave in order, but after it has given guest
//! memory back. Responses leave from the port's thread only. When the link is full both stop: requesters are woken, and
//! responses are still owed.
//!
//! # Guard
//!
//! Frames are built by us, from a GID that is bound and the device's own address. What comes is dropped and counted
//! unless it is for us, intact, in the VLAN of the address, from an address that the device may talk to, and from the
//! peer of the QP; a GID of our own process is nobody's peer on the wire, unless local delivery is off. Only such a
//! packet may make state, and that is bounded. Frames of the network function are held to the device's address and VLAN
//! ([`crate::port::policy`]).

mod cnp;
mod hooks;
mod new_path;
pub(crate) mod peer_window;
pub(crate) mod rate_limiter;
pub(crate) mod rc;
pub(crate) mod receive;
pub(crate) mod responder;
pub(crate) mod room;
pub(crate) mod sources;
mod timeout_grace;
pub(crate) mod ud;

pub(crate) use new_path::NewPath;
use pvrdma_verbs::QpAttrs;

/// READs and atomics of either direction that a QP has paid for when it was made.
const READS: usize = 16;
/// Bytes that one of these takes: what is remembered of it, and what is owed for it.
const READ_BYTES: usize = 192;

/// Bytes that one more takes for which the guest asks: the requester's, and a peer's, of which the queues may have
/// doubled and have acknowledgements in between.
const MORE_READS_BYTES: [u64; 2] = [64, 256];

/// Bytes that a QP on the wire pays for with these attributes, beyond what it paid when it was made.
pub(crate) fn more_reads_bytes(attrs: &QpAttrs) -> u64 {
    let more = |reads: u8, bytes: u64| bytes.saturating_mul(usize::from(reads).saturating_sub(READS) as u64);
    let [own, peers] = MORE_READS_BYTES;
    more(attrs.max_rd_atomic, own).saturating_add(more(attrs.max_dest_rd_atomic, peers))
}

/// Bytes that a QP may need on the wire at least, for requests of so many SGEs.
pub(crate) fn first_bytes(max_sge: u32) -> usize {
    let halves = size_of::<rc::WireRequester>() + size_of::<responder::WireResponder>() + 2 * READS * READ_BYTES;
    halves.saturating_add(room::first_bytes(max_sge))
}
