//! A device that is served: the function, its place on the network, and who connects to it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use anyhow::Result;
use pvrdma_dev::PvrdmaDevice;
use pvrdma_guest_memory::{DmaSpace, MemoryLimits};
use pvrdma_rxe::{DeviceShare, Rxe, Uplink};
use pvrdma_verbs::Backend;

use super::Host;
use super::network_function::NetworkFunction;
use crate::config::{Device, LinkState, MemoryFiles, MemoryRules};
use crate::status::Reporter;
use crate::vfio_user::{ConnectionStats, Endpoint, FileRules, IrqTable, REPLY_DEADLINE, Server};

/// A device that is served. Dropping it disconnects its client.
pub(super) struct ServedDevice {
    // Dropped in this order: nobody uses a device whose port is gone.
    _server: Server,
    _nic_server: Option<Server>,
    pub(super) reporter: Reporter,
}

impl std::fmt::Debug for ServedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedDevice").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl ServedDevice {
    pub(super) fn name(&self) -> &str {
        &self.reporter.device.config.name
    }

    /// Makes the device and serves it at `listener`.
    ///
    /// # Errors
    /// The backend does not take it, or there is no room for its thread.
    pub(super) fn start<B: Backend + 'static>(
        device: Device,
        listener: OwnedFd,
        backend: &B,
        place: Place,
        host: &Arc<dyn Host>,
    ) -> Result<Self> {
        let Place { network, mtu, link, share, port, rxe, nic } = place;
        let limits = MemoryLimits { locked_bytes: device.memory.max_locked, ..MemoryLimits::default() };
        let memory = DmaSpace::with_limits(device.pin.into(), limits);
        let irqs = Arc::new(IrqTable::default());
        let (name, told) = (device.config.name.clone(), Arc::clone(host));
        let stats = Arc::new(ConnectionStats::with_observer(move |connected| told.client(&name, connected)));
        let function = PvrdmaDevice::new(device.config.clone(), Arc::clone(&memory), irqs.clone(), backend)?;
        if link == LinkState::Down {
            function.set_link(false)?;
            if let Some(nic) = &nic {
                nic.link.device().set_link(false);
            }
        }
        let endpoint = Endpoint {
            name: device.config.name.clone(),
            function: function.clone(),
            memory: Arc::clone(&memory),
            files: file_rules(device.memory),
            irqs: Arc::clone(&irqs),
            stats: Arc::clone(&stats),
            intx: device.config.intx,
            reply_deadline: REPLY_DEADLINE,
        };
        let server = Server::start(UnixListener::from(listener), endpoint)?;
        let (nic, nic_server) = nic.map(NetworkFunction::into_parts).unzip();
        let reporter = Reporter { device, function, memory, irqs, stats, network, mtu, share, port, rxe, nic };
        Ok(Self { _server: server, _nic_server: nic_server, reporter })
    }
}

/// Which files a function of a device takes, and how much of them.
pub(super) fn file_rules(rules: MemoryRules) -> FileRules {
    let sealed = rules.files == MemoryFiles::Sealed;
    FileRules { sealed, mapped_bytes: rules.max_mapped, ..FileRules::default() }
}

/// Where a device is.
pub(super) struct Place {
    /// Name of the network.
    pub(super) network: String,
    /// Bytes of an IP packet that it carries.
    pub(super) mtu: u32,
    /// How its link is.
    pub(super) link: LinkState,
    /// What it may use, if that is ours to give.
    pub(super) share: Option<DeviceShare>,
    /// The device's end of the uplink, if there is one.
    pub(super) port: Option<Uplink>,
    /// Which can watch the device.
    pub(super) rxe: Option<Rxe>,
    /// The network function beside it, if that is ours.
    pub(super) nic: Option<NetworkFunction>,
}
