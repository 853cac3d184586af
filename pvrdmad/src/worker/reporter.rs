//! Makes the report of a device from the device itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_base::Counter;
use pvrdma_dev::DeviceStatus;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_link::Link;
use pvrdma_rxe::capture::CaptureCounts;
use pvrdma_verbs::VerbsError;
use pvrdma_vfio_user_server::{ConnectionStats, IrqTable, pin_advice};
use pvrdma_vmxnet3::Vmxnet3Device;
use serde_json::{Map, Value};

use super::any_device::AnyDevice;
use super::backend::Station;
use crate::config::{Device, LinkState, SocketPlace};
use crate::doorbells::Doorbells;
use crate::protocol::Carrier;
use crate::status::{
    AddressReport, CaptureReport, Catalogue, ClientReport, DeviceReport, FlowReport, FormerCounts, LinkReport,
    MemoryReport, NetworkReport, NicReport, ShareReport, by_name, describe_counters, port_word,
};

/// Reports the client of a socket.
fn client(stats: &ConnectionStats) -> ClientReport {
    ClientReport { connected: stats.is_connected(), process: stats.process() }
}

/// Sources of reports about a network function.
pub(super) struct NicReporter {
    pub(super) device: Arc<Vmxnet3Device>,
    pub(super) irqs: Arc<IrqTable>,
    pub(super) stats: Arc<ConnectionStats>,
    /// Counts of former processes.
    pub(super) former: FormerCounts,
}

impl NicReporter {
    fn counters(&self) -> Vec<Counter> {
        let mut own = [self.device.status().counters, self.irqs.counters.list(), self.stats.counters.list()].concat();
        self.former.add(&mut own, &mut [], &mut []);
        own
    }

    /// Returns its counts for the next process.
    pub(super) fn counts(&self) -> FormerCounts {
        FormerCounts::of(&self.counters(), &[], &[])
    }

    fn report(&self, socket: &SocketPlace) -> NicReport {
        let status = self.device.status();
        let counters = self.counters();
        NicReport {
            socket: socket.to_string(),
            client: client(&self.stats),
            active: status.active,
            link: if status.link_up { "up" } else { "down" }.to_owned(),
            mac: status.mac.to_string(),
            counters: by_name(&counters),
        }
    }
}

/// Sources of reports about a device.
pub(super) struct Reporter {
    pub(super) device: Device,
    pub(super) function: Arc<dyn AnyDevice>,
    /// Links of its functions.
    pub(super) links: Arc<DeviceLinks>,
    pub(super) memory: Arc<DmaSpace>,
    pub(super) irqs: Arc<IrqTable>,
    pub(super) stats: Arc<ConnectionStats>,
    /// Name of the network.
    pub(super) network: String,
    /// Longest IP packet of the network, in bytes.
    pub(super) mtu: u32,
    /// Its station at the adapter, with its port. Dropped after its links.
    pub(super) station: Box<dyn Station>,
    /// The link to its network function, if QEMU emulates that.
    pub(super) nic_link: Option<Arc<dyn Link>>,
    /// The network function beside it, if this daemon emulates it.
    pub(super) nic: Option<NicReporter>,
    /// Its doorbell pages.
    pub(super) doorbells: Doorbells,
    /// Counts of former processes.
    pub(super) former: FormerCounts,
}

/// Links of a device's functions, and the reasons that keep them down.
pub(super) struct DeviceLinks {
    pub(super) function: Arc<dyn AnyDevice>,
    pub(super) nic: Option<Arc<Vmxnet3Device>>,
    /// The administrator has set them down.
    pub(super) is_down: AtomicBool,
    /// A fault on request keeps them down.
    pub(super) is_faulty: AtomicBool,
}

impl DeviceLinks {
    /// Sets the links up if the administrator and `carrier` permit it and no fault keeps them down, and sets the path
    /// MTU.
    ///
    /// # Errors
    /// The link belongs to an adapter that other devices use as well.
    pub(super) fn set(&self, carrier: Carrier) -> Result<(), VerbsError> {
        let held = [&self.is_down, &self.is_faulty].iter().any(|held| held.load(Ordering::Relaxed));
        let up = !held && carrier.state == LinkState::Up;
        self.function.set_uplink_mtu(carrier.mtu);
        self.function.set_link(up)?;
        if let Some(nic) = &self.nic {
            nic.set_link(up);
        }
        Ok(())
    }

    /// Keeps the links down for a fault, or ends that. The caller holds the lock of `carrier`.
    pub(super) fn hold_for_fault(&self, held: bool, carrier: Carrier) {
        self.is_faulty.store(held, Ordering::Relaxed);
        // Only the host's adapter refuses, and that has no faults on request.
        let _ = self.set(carrier);
    }
}

impl Reporter {
    pub(super) fn report(&self) -> DeviceReport {
        let (status, port) = self.status();
        let (rules, software) = (&self.device.config.rules, self.station.software());
        DeviceReport {
            socket: self.device.socket.to_string(),
            port: port_word(status.port.state),
            link_down: self.links.is_down.load(Ordering::Relaxed),
            mtu: status.port.active_mtu.bytes(),
            client: client(&self.stats),
            memory: MemoryReport {
                pin: self.device.pin,
                status: status.memory,
                files: self.device.memory.files,
                max_mapped_bytes: self.device.memory.max_mapped,
                max_locked_bytes: self.device.memory.max_locked,
                open_files: self.stats.cost.files(),
                mappings: self.stats.cost.mappings(),
                pin_error: self.memory.pin_error().err().map(|error| pin_advice(&error)),
            },
            doorbells: self.doorbells.report(),
            addresses: self.address_report(),
            peers: [&rules.peers, &rules.network_peers].map(|peers| peers.0.iter().map(ToString::to_string).collect()),
            network: NetworkReport {
                name: self.network.clone(),
                mtu: self.mtu,
                nic: self
                    .device
                    .nic
                    .as_ref()
                    .zip(self.nic_link.as_ref())
                    .map(|(spec, link)| LinkReport::new(spec, link)),
                counters: by_name(&port),
            },
            share: software.map(|parts| ShareReport::new(parts.station.share(), parts.station.share_usage())),
            flows: software.iter().flat_map(|parts| parts.station.flows()).map(FlowReport::from).collect(),
            failed: software.map(|parts| parts.failed.by_cause()).unwrap_or_default(),
            faults: software.map(|parts| parts.faults.status()).unwrap_or_default(),
            capture: self.capture_report(),
            nic: self.nic.as_ref().zip(self.device.nic_socket.as_ref()).map(|(nic, socket)| nic.report(socket)),
            status: members(&status),
        }
    }

    /// Returns the status of the device and the counters of its port, with the counts of former processes.
    fn status(&self) -> (DeviceStatus, Vec<Counter>) {
        let mut status = self.function.device_status();
        status.counters.extend(self.irqs.counters.list());
        status.counters.extend(self.stats.counters.list());
        status.counters.extend(self.doorbells.counters());
        let mut port = self.port_counters();
        self.former.add(&mut status.counters, &mut status.adapter, &mut port);
        (status, port)
    }

    fn port_counters(&self) -> Vec<Counter> {
        self.station.software().map(|parts| parts.station.port_counters()).unwrap_or_default()
    }

    /// Returns its counts for the next process.
    pub(super) fn counts(&self) -> FormerCounts {
        let (status, port) = self.status();
        FormerCounts::of(&status.counters, &status.adapter, &port)
    }

    /// Adds descriptions of the counters in the report.
    pub(super) fn describe(&self, known: &mut Catalogue) {
        let status = self.function.device_status();
        let (irqs, stats) = (self.irqs.counters.list(), self.stats.counters.list());
        let own = [status.counters, status.adapter, irqs, stats, self.doorbells.counters()].concat();
        let port = self.port_counters();
        let nic = self.nic.as_ref().map(NicReporter::counters).unwrap_or_default();
        describe_counters(own.iter().chain(&port).chain(&nic), known);
    }

    fn address_report(&self) -> AddressReport {
        let rule = &self.device.config.rules.addresses;
        AddressReport {
            rule: rule.word().to_owned(),
            listed: rule.listed.iter().map(ToString::to_string).collect(),
            guarded: self.device.nic.is_some() || self.device.nic_socket.is_some(),
        }
    }

    fn capture_report(&self) -> CaptureReport {
        let counts = self.station.software().map(|parts| parts.station.capture_counts());
        let CaptureCounts { active, captured, dropped } = counts.unwrap_or_default();
        CaptureReport { active: active as u64, frames: captured, dropped }
    }
}

/// Returns the status of a device, without the members that have a place of their own in the report.
fn members(status: &DeviceStatus) -> Map<String, Value> {
    let Ok(Value::Object(mut members)) = serde_json::to_value(status) else { return Map::new() };
    members.remove("port");
    members.remove("memory");
    members
}
