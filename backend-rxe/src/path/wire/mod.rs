//! The second way out: peers of other hosts, reached through an Ethernet link.
//!
//! A [`port::Port`] belongs to one device. It has an uplink and, if the daemon stands between the device's network function
//! and the network, the link to that function. One thread waits for both. RoCE frames for the device go to its queue pairs,
//! everything else is passed on.
//!
//! # Which way a request takes
//!
//! A destination GID that is bound on the fabric is reached by local delivery, any other through the uplink if there is one.
//! A connected QP decides with its first request and stays with it until RESET: PSNs on the wire and positions in local
//! delivery cannot be told from each other. State for the wire is made when it is needed, so that other QPs do not pay for it.
//! So when a GID moves, from the network to a device of this process or back, its connections do not move along: the peer that
//! they had is gone, and they end as if its host were, by their retries.
//!
//! # Who sends
//!
//! The requester of a QP sends with its half held, so that its packets leave in order, but after it has given guest memory
//! back. Answers leave from the port's thread only. When the link is full both stop: requesters are woken, and answers are
//! still owed.
//!
//! # Guard
//!
//! Frames are built by us, from a GID that is bound and the device's own address. What comes is dropped and counted unless it
//! is for us, intact, in the VLAN of the address, and from the peer of the QP; a GID of our own fabric is nobody's peer on the
//! wire. Only such a packet may make state, and that is bounded. Frames of the network function are held to the device's
//! address and VLAN ([`rules`]).

pub(crate) mod hooks;
pub(crate) mod peer_window;
pub(crate) mod rate_limiter;
pub(crate) mod rc;
pub(crate) mod receive;
mod timeout_grace;
pub(crate) mod ud;

use pvrdma_verbs::{AddressVector, GidType, NetworkType, Qpn};

use crate::hca::{Adapter, BoundGid};
use pvrdma_roce::{Origin, Path};

/// Bytes before the network header that count towards a frame but not towards the MTU.
pub(crate) const ETHERNET_LEN: usize = 18;
/// Frames that are built while guest memory is held.
pub(crate) const BATCH: usize = 32;

/// What stands in the frames that an adapter sends from a GID.
pub(crate) fn origin(adapter: &Adapter, source: BoundGid) -> Option<Origin> {
    let port = adapter.port.as_ref()?;
    let BoundGid { gid, kind, vlan } = source;
    Some(Origin { mac: port.mac(), gid, kind, vlan, marks: port.marks() })
}

/// The path of a connected QP and the GID that it starts from. `None`: there is no way to that address.
pub(crate) fn connected_path(
    adapter: &Adapter,
    av: &AddressVector,
    local: Qpn,
    remote: Qpn,
) -> Option<(Path, BoundGid)> {
    let source = adapter.gid(av.sgid_index)?;
    // A GID of this process is reached directly, or not at all.
    if adapter.shared.fabric.find(source.beside(av.dgid)).is_some() {
        return None;
    }
    Some((Path::connected(&origin(adapter, source)?, av, local, remote)?, source))
}

/// The encapsulation that a packet has.
const fn gid_kind(network: NetworkType) -> GidType {
    match network {
        NetworkType::RoceV1 => GidType::RoceV1,
        NetworkType::Ipv4 | NetworkType::Ipv6 => GidType::RoceV2,
    }
}
