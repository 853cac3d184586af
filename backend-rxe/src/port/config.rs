//! Configuration of a port.

use std::sync::Arc;

use pvrdma_link::Link;

use super::rules::PortRules;

/// Connection of a device to the network.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PortConfig {
    /// Link to other hosts.
    pub uplink: Arc<dyn Link>,
    /// Link of the device's network function, whose frames are forwarded.
    pub nic: Option<Arc<dyn Link>>,
    /// MTU of the network: bytes of an IP packet. The path MTU of the port follows from it.
    pub mtu: u32,
    /// Rules that the device has to obey.
    pub rules: PortRules,
}

impl PortConfig {
    /// Creates a configuration without a network function and with default rules. `mtu`: see [`Self::mtu`].
    pub fn new(uplink: Arc<dyn Link>, mtu: u32) -> Self {
        Self { uplink, nic: None, mtu, rules: PortRules::default() }
    }
}

pvrdma_base::setters!(PortConfig {
    with_nic => nic: Option<Arc<dyn Link>>,
    with_rules => rules: PortRules,
});
