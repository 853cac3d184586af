//! Actions of administrators on the network interface of an RDMA device and its addresses: tunnels, bridges, network
//! namespaces, XDP, moved addresses. Data still arrives at the interface and at the RDMA device.

mod addresses;
mod checksums;
mod interface;
mod steps;
mod tunnels;

use super::case::Case;

/// All cases, in the pair that most cases share.
pub(crate) fn cases() -> Vec<Case> {
    [checksums::cases(), tunnels::cases(), interface::cases(), addresses::cases()].into_iter().flatten().collect()
}
