//! The wire: the path to peers on other hosts, through the device's port.
//!
//! # Senders
//!
//! The requester of a QP sends while its half is locked, so that its packets leave in order, but after it has released
//! guest memory. Only the port's thread sends responses. When the link is full, both stop: requesters are woken when
//! there is room, and responses stay owed.
//!
//! # Checks
//!
//! This engine builds the frames itself, with a bound source GID and the device's own MAC address. A received packet is
//! dropped and counted unless it is intact, addressed to this device, in the VLAN of that address, from an address that
//! the rules allow, and from the peer of the QP. A GID of this process is accepted as a source on the wire only if
//! local delivery is off, or for a connection that began on the wire, before both devices came to this process. Only a
//! packet that passes these checks can allocate state, and that state is bounded. Frames of the network function are
//! checked against the device's address and VLAN ([`crate::port::policy`]).

mod admitted;
mod cnp;
mod flow;
pub(crate) mod hold;
pub(super) mod hooks;
mod new_path;
pub(crate) mod rc;
pub(crate) mod receive;
pub(crate) mod responder;
pub(crate) mod room;
pub(crate) mod saved;
pub(crate) mod sources;
mod timeout_grace;
pub(crate) mod turns;
pub(crate) mod ud;

pub(crate) use admitted::Admitted;
pub(crate) use new_path::NewPath;
use pvrdma_verbs_types::QpAttrs;

/// Number of READs and atomics in each direction that a QP is charged for when it is created.
const READS: usize = 16;
/// Memory in bytes that each of these READs or atomics may need: the state of the request, and the owed response.
const READ_BYTES: usize = 192;

/// Memory in bytes for each READ or atomic above [`READS`]: as requester, and as responder. The responder's queues may
/// have doubled their capacity, and hold acknowledgements between the responses.
const MORE_READS_BYTES: [u64; 2] = [64, 256];

/// Returns the bytes that a QP on the wire is charged for these attributes, beyond the charge at its creation.
pub(crate) fn more_reads_bytes(attrs: &QpAttrs) -> u64 {
    let more = |reads: u8, bytes: u64| bytes.saturating_mul(usize::from(reads).saturating_sub(READS) as u64);
    let [own, peers] = MORE_READS_BYTES;
    more(attrs.max_rd_atomic, own).saturating_add(more(attrs.max_dest_rd_atomic, peers))
}

/// Returns the number of bytes that a QP is charged for the wire at its creation, if its requests have up to `max_sge`
/// SGEs.
pub(crate) fn first_bytes(max_sge: u32) -> usize {
    let halves = size_of::<rc::WireRequester>() + size_of::<responder::WireResponder>() + 2 * READS * READ_BYTES;
    halves.saturating_add(room::first_bytes(max_sge))
}
