//! Makes the report of a device from the device itself.

use std::sync::Arc;

use pvrdma_dev::{DeviceStatus, ObjectKind, PciFunction, PvrdmaDevice};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_rxe::Rxe;
use pvrdma_rxe::capture::CaptureCounts;
use pvrdma_verbs::Backend;
use serde_json::Value;

use super::report::{
    CaptureReport, ClientReport, CommandReport, DeviceReport, MemoryReport, NetworkReport, by_name, phase_word,
    port_word,
};
use crate::config::Device;
use crate::network::Network;
use crate::vfio_user::{ConnectionStats, IrqTable};

/// A device whatever its backend.
pub(crate) trait AnyDevice: PciFunction {
    fn device_status(&self) -> DeviceStatus;

    /// Its objects of a kind, as data.
    fn device_objects(&self, kind: ObjectKind) -> Value;
}

impl<B: Backend + 'static> AnyDevice for PvrdmaDevice<B> {
    fn device_status(&self) -> DeviceStatus {
        self.status()
    }

    fn device_objects(&self, kind: ObjectKind) -> Value {
        self.inspect_objects(kind)
    }
}

/// What reports about a device need.
pub(crate) struct Reporter {
    pub(crate) device: Device,
    pub(crate) function: Arc<dyn AnyDevice>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) irqs: Arc<IrqTable>,
    pub(crate) stats: Arc<ConnectionStats>,
    pub(crate) network: Option<Arc<Network>>,
    /// Which can watch the device.
    pub(crate) rxe: Option<Rxe>,
}

impl Reporter {
    pub(crate) fn report(&self) -> DeviceReport {
        let status = self.function.device_status();
        let counters = [status.counters, self.irqs.counters.list(), self.stats.counters.list()].concat();
        let objects = status.objects;
        DeviceReport {
            name: status.name,
            socket: self.device.socket.display().to_string(),
            mac: status.mac.to_string(),
            roce: self.device.roce(),
            version: status.version,
            phase: phase_word(status.phase).to_owned(),
            bus_master: status.bus_master,
            port: port_word(status.port.state),
            mtu: status.port.active_mtu.bytes(),
            client: ClientReport { connected: self.stats.is_connected() },
            memory: MemoryReport {
                pin: self.device.pin,
                mapped_bytes: status.mapped_bytes,
                pinned_bytes: status.pinned_bytes,
                pin_error: self.memory.pin_failure().err().map(|error| error.to_string()),
            },
            network: self
                .network
                .as_ref()
                .map(|network| NetworkReport { mtu: network.mtu(), counters: by_name(&network.counters()) }),
            capture: self.capture_report(),
            objects: [
                ("contexts", objects.contexts),
                ("pds", objects.pds),
                ("mrs", objects.mrs),
                ("cqs", objects.cqs),
                ("srqs", objects.srqs),
                ("qps", objects.qps),
                ("gids", objects.gids),
                ("page_list_extents", u32::try_from(status.page_list_extents).unwrap_or(u32::MAX)),
            ]
            .into_iter()
            .map(|(kind, count)| (kind.to_owned(), u64::from(count)))
            .collect(),
            commands: status
                .commands
                .into_iter()
                .map(|count| {
                    (count.name.to_owned(), CommandReport { executed: count.executed, refused: count.refused })
                })
                .collect(),
            counters: by_name(&counters),
            adapter: by_name(&status.adapter),
        }
    }

    fn capture_report(&self) -> CaptureReport {
        let CaptureCounts { active, captured, dropped } =
            self.rxe.as_ref().map_or_else(CaptureCounts::default, |rxe| rxe.capture_counts(self.device.config.mac));
        CaptureReport { active: active as u64, frames: captured, dropped }
    }
}
