//! The software adapter.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use pvrdma_base::LogLimit;
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_pci_function::InterruptSink;
use pvrdma_rxe::{
    ObservedConflicts, ObservedFailures, PortConfig, Rxe, RxeConfig, RxeStation,
    capture::{Capture, CaptureConfig},
};
use pvrdma_verbs::VerbsError;

use super::adapter::{Adapter, Created, SoftwareParts, Station};
use crate::config::{Device, Network};
use crate::failures::{FailureCounts, FailureLog};
use crate::protocol::NetworkSetup;
use crate::worker::Host;

/// The software adapter of a network.
#[derive(Debug)]
pub(super) struct Software {
    rxe: Rxe,
    failures: Arc<FailureLog>,
    host: Arc<dyn Host>,
}

impl Software {
    /// Creates the adapter. Failed queue pairs of its devices go to `failures`.
    ///
    /// # Errors
    /// A thread or a descriptor cannot be created.
    pub(super) fn start(setup: &NetworkSetup, host: &Arc<dyn Host>, failures: &Arc<FailureLog>) -> Result<Self> {
        let Network { vlan, local, port_threads, .. } = setup.network;
        let workers = setup.engine_threads;
        let config = RxeConfig::default()
            .with_workers(workers)
            .with_vlan(vlan)
            .with_local(local)
            .with_port_threads(port_threads);
        let rxe = Rxe::new(config).context("backend rxe")?;
        Ok(Self { rxe, failures: Arc::clone(failures), host: Arc::clone(host) })
    }

    /// Returns an observer that keeps failed queue pairs, and reports those that the log has to the host.
    fn observe_failures(&self, station: &RxeStation, device: &Device, counts: &Arc<FailureCounts>) -> ObservedFailures {
        let (name, host) = (device.config.name.clone(), Arc::clone(&self.host));
        let (log, counts) = (Arc::clone(&self.failures), Arc::clone(counts));
        station.observe_failures(move |failure| {
            log.add(&name, &counts, failure);
            if failure.logged {
                let peer = IpAddr::from(failure.peer.0).to_canonical();
                host.queue_pair_failed(&name, failure.qpn.get(), peer, (failure.cause, &failure.history));
            }
        })
    }

    /// Returns an observer that reports hosts beyond the uplink that use addresses of a device, to the log and the
    /// host.
    fn observe_conflicts(&self, station: &RxeStation, device: &Device) -> ObservedConflicts {
        let (name, host) = (device.config.name.clone(), Arc::clone(&self.host));
        let log = LogLimit::new();
        station.observe_conflicts(move |conflict| {
            let address = IpAddr::from(conflict.address.0).to_canonical();
            let then = if conflict.kept { "keeps it" } else { "loses it" };
            log.warn(module_path!(), &name, format_args!("a host beyond the uplink uses {address}: the device {then}"));
            host.address_conflict(&name, address, conflict.vlan, conflict.kept);
        })
    }
}

impl Adapter for Software {
    fn station(&self, device: &Device) -> Result<Box<dyn Station>> {
        let station = self.rxe.station(device.mac);
        station.set_share(device.share);
        let failed = Arc::default();
        Ok(Box::new(SoftwareStation(SoftwareParts {
            _failures: self.observe_failures(&station, device, &failed),
            _conflicts: self.observe_conflicts(&station, device),
            failed,
            faults: station.faults(),
            station,
        })))
    }

    fn announce(&self) {
        self.rxe.announce();
    }
}

/// Station of a device at the software adapter.
#[derive(Debug)]
struct SoftwareStation(SoftwareParts);

impl Station for SoftwareStation {
    fn plug(&self, port: PortConfig) -> Result<()> {
        Ok(self.0.station.plug(port)?)
    }

    fn create(
        &self,
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Created, VerbsError> {
        let function = PvrdmaDevice::new(config, memory, interrupts, &self.0.station)?;
        Ok(Created { migratable: Ok(Arc::clone(&function) as _), function })
    }

    fn capture(&self, config: CaptureConfig) -> Result<Capture> {
        Ok(self.0.station.capture(config)?)
    }

    fn software(&self) -> Option<&SoftwareParts> {
        Some(&self.0)
    }
}
