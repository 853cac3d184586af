//! A port as data.

use pvrdma_verbs::Mtu;
use serde::Serialize;

use super::tx_queue::TxQueueInspect;

/// A port at one moment.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct PortInspect {
    /// Bytes of an IP packet that the network carries.
    pub(super) mtu: u32,
    /// Largest path MTU, in bytes, whose packets fit.
    pub(super) path_mtu: Mtu,
    /// The VLAN that everything behind the port is in.
    pub(super) vlan: Option<u16>,
    /// Times that frames were read from the links.
    pub(super) batches: u64,
    /// Times that a second thread was called, because there was too much for one.
    pub(super) helper_calls: u64,
    /// The way to other hosts.
    pub(super) uplink: TxQueueInspect,
    /// The device's network function.
    pub(super) nic: Option<TxQueueInspect>,
}
