//! State of a port for inspection.

use pvrdma_verbs_types::Mtu;
use serde::Serialize;

use super::tx_queue::TxQueueInspect;

/// State of a port at one moment.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct PortInspect {
    /// MTU of the network: bytes of an IP packet.
    pub(super) mtu: u32,
    /// Largest path MTU, in bytes, whose packets fit.
    pub(super) path_mtu: Mtu,
    /// VLAN of all traffic of the port, if it is an access port.
    pub(super) vlan: Option<u16>,
    /// Number of batches that were read from the links.
    pub(super) batches: u64,
    /// Number of times that a second thread was called, because the load was too high for one.
    pub(super) helper_calls: u64,
    /// Link to other hosts.
    pub(super) uplink: TxQueueInspect,
    /// Link of the device's network function.
    pub(super) nic: Option<TxQueueInspect>,
}
