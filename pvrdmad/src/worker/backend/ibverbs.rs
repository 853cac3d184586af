//! The host's adapter. It is the network: it has no ports, and the host observes and shares it.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_ibverbs::{AddressOwner, Ibverbs, IbverbsConfig};
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::InterruptSink;
use pvrdma_rxe::{
    DeviceShare, PortConfig, ShareConfig, Uplink,
    capture::{Capture, CaptureConfig, CaptureCounts},
};
use pvrdma_verbs::VerbsError;

use super::adapter::{Adapter, Created, Parts};
use crate::config::Device;
use crate::worker::Host;

/// An RDMA adapter of the host.
#[derive(Debug)]
pub(super) struct HostAdapter(Ibverbs);

impl HostAdapter {
    /// Opens the adapter.
    ///
    /// # Errors
    /// The library or the adapter does not exist, or the adapter is unsuitable.
    pub(super) fn start(config: &IbverbsConfig, host: &Arc<dyn Host>) -> Result<Self> {
        let addresses = Arc::new(AddressesOfHost(Arc::clone(host)));
        Ok(Self(Ibverbs::with_addresses(config.clone(), addresses).context("backend ibverbs")?))
    }
}

impl Adapter for HostAdapter {
    fn parts(&self, _: &Device) -> Parts {
        Parts::default()
    }

    fn plug(&self, _: MacAddr, _: PortConfig) -> Result<Uplink> {
        bail!("the host's adapter is the network, and has no ports")
    }

    fn create(
        &self,
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Created, VerbsError> {
        let function = PvrdmaDevice::new(config, memory, interrupts, &self.0)?;
        Ok(Created { function, migratable: Err("the host's adapter cannot save the device") })
    }

    // It has no uplink that could move, and no share among the parts of a device.
    fn announce(&self) {}

    fn set_share(&self, _: &DeviceShare, _: ShareConfig) {}

    fn capture(&self, _: MacAddr, _: CaptureConfig) -> Result<Capture> {
        bail!("the host's adapter moves the packets: capture there")
    }

    fn capture_counts(&self, _: MacAddr) -> CaptureCounts {
        CaptureCounts::default()
    }
}

/// Changes addresses of the host's interface on behalf of the adapter.
#[derive(Debug)]
struct AddressesOfHost(Arc<dyn Host>);

impl AddressOwner for AddressesOfHost {
    fn add(&self, address: IpAddr) -> io::Result<()> {
        self.0.add_address(address)
    }

    fn remove(&self, address: IpAddr) -> io::Result<()> {
        self.0.remove_address(address)
    }
}
