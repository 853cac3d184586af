//! The wire: the path to peers on other hosts, through the device's port.
//!
//! # Senders
//!
//! The requester of a QP sends while its half is locked, so that its packets leave in order, but after it has released
//! guest memory. Responses are sent by the port's thread only. When the link is full, both stop: requesters are woken
//! when there is room, and responses remain owed.
//!
//! # Checks
//!
//! This engine builds the frames, with a source GID that is bound and the device's own MAC address. A received packet
//! is dropped and counted unless it is intact, for this device, in the VLAN of the address, from an address that the
//! rules allow, and from the peer of the QP. A GID of this process is never accepted as a source on the wire, unless
//! local delivery is off. Only a packet that passes these checks can allocate state, which is bounded. Frames of the
//! network function are checked against the device's address and VLAN ([`crate::port::policy`]).

mod cnp;
mod hooks;
mod new_path;
pub(crate) mod peer_window;
pub(crate) mod rate_limiter;
pub(crate) mod rc;
pub(crate) mod receive;
pub(crate) mod responder;
pub(crate) mod room;
pub(crate) mod saved;
pub(crate) mod sources;
mod timeout_grace;
pub(crate) mod turns;
pub(crate) mod ud;

pub(crate) use new_path::NewPath;
use pvrdma_verbs::QpAttrs;

/// Number of READs and atomics in each direction that a QP is charged for when it is created.
const READS: usize = 16;
/// Memory, in bytes, of each of these: the state of the request, and the response that is owed.
const READ_BYTES: usize = 192;

/// Memory, in bytes, of each further one that the guest asks for, as requester and as responder. The responder's queues
/// may have doubled, and have acknowledgements in between.
const MORE_READS_BYTES: [u64; 2] = [64, 256];

/// Returns the bytes that a QP on the wire is charged for these attributes, beyond the charge at its creation.
pub(crate) fn more_reads_bytes(attrs: &QpAttrs) -> u64 {
    let more = |reads: u8, bytes: u64| bytes.saturating_mul(usize::from(reads).saturating_sub(READS) as u64);
    let [own, peers] = MORE_READS_BYTES;
    more(attrs.max_rd_atomic, own).saturating_add(more(attrs.max_dest_rd_atomic, peers))
}

/// Returns the minimum number of bytes that a QP may need on the wire, if its requests have up to `max_sge` SGEs.
pub(crate) fn first_bytes(max_sge: u32) -> usize {
    let halves = size_of::<rc::WireRequester>() + size_of::<responder::WireResponder>() + 2 * READS * READ_BYTES;
    halves.saturating_add(room::first_bytes(max_sge))
}
