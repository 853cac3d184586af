//! The host's adapter. It is the network: it has no ports, and the host observes and shares it.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_ibverbs::{AddressOwner, Ibverbs, IbverbsConfig, IbverbsStation};
use pvrdma_pci_function::InterruptSink;
use pvrdma_rxe::{
    PortConfig,
    capture::{Capture, CaptureConfig},
};
use pvrdma_verbs::{Backend, VerbsError};

use super::adapter::{Adapter, Created, SoftwareParts, Station};
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
    fn station(&self, device: &Device) -> Result<Box<dyn Station>> {
        Ok(Box::new(HostStation(self.0.station(device.mac)?)))
    }

    // It has no uplink that could move.
    fn announce(&self) {}
}

/// Station of a device at the host's adapter.
#[derive(Debug)]
struct HostStation(IbverbsStation);

impl Station for HostStation {
    fn plug(&self, _: PortConfig) -> Result<()> {
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

    fn capture(&self, _: CaptureConfig) -> Result<Capture> {
        bail!("the host's adapter moves the packets: capture there")
    }

    fn software(&self) -> Option<&SoftwareParts> {
        None
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
