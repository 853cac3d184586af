//! A port as data.

use pvrdma_verbs::Mtu;
use serde::Serialize;

use super::Port;
use super::tx_queue::{TxQueue, TxQueueInspect};

/// A port at one moment.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct PortInspect {
    /// Bytes of an IP packet that the network carries.
    mtu: u32,
    /// Largest path MTU, in bytes, whose packets fit.
    path_mtu: Mtu,
    /// The VLAN that everything behind the port is in.
    vlan: Option<u16>,
    /// Times that frames were read from the links.
    batches: u64,
    /// Times that a second thread was called, because there was too much for one.
    helper_calls: u64,
    /// The way to other hosts.
    uplink: TxQueueInspect,
    /// The device's network function.
    nic: Option<TxQueueInspect>,
}

impl Port {
    /// Describes itself.
    pub(crate) fn inspect(&self) -> PortInspect {
        PortInspect {
            mtu: self.carried(),
            path_mtu: self.path_mtu(),
            vlan: self.vlan(),
            batches: self.batches(),
            helper_calls: self.helpers.calls(),
            uplink: self.uplink.inspect(),
            nic: self.nic.as_ref().map(TxQueue::inspect),
        }
    }
}
