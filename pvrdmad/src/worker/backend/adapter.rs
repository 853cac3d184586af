//! The operations of a network's adapter that a worker needs.

use std::fmt;
use std::sync::Arc;

use anyhow::Result;
use pvrdma_dev::DeviceConfig;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_pci_function::{InterruptSink, Migratable};
use pvrdma_rxe::{
    ObservedConflicts, ObservedFailures, PortConfig, RxeStation,
    capture::{Capture, CaptureConfig},
    faults::DeviceFaults,
};
use pvrdma_verbs::VerbsError;

use crate::config::Device;
use crate::failures::FailureCounts;
use crate::worker::any_device::AnyDevice;

/// The adapter that moves the data of a network's devices.
pub(in crate::worker) trait Adapter: fmt::Debug + Send + Sync {
    /// Returns the station of a device.
    ///
    /// # Errors
    /// The adapter cannot serve another device.
    fn station(&self, device: &Device) -> Result<Box<dyn Station>>;

    /// Announces all devices at the uplink, because it leads to another port of the switch.
    fn announce(&self);
}

/// Place of a device at an adapter. Dropping it disconnects the device from its network.
pub(in crate::worker) trait Station: fmt::Debug + Send + Sync {
    /// Connects the device to its network. Precedes [`Self::create`], because the device looks up its port then.
    ///
    /// # Errors
    /// The adapter has no ports, the device is connected already, or the thread of the port cannot be started.
    fn plug(&self, port: PortConfig) -> Result<()>;

    /// Creates the device.
    ///
    /// # Errors
    /// The configuration is invalid, or the adapter cannot serve another device.
    fn create(
        &self,
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Created, VerbsError>;

    /// Starts a capture of the device, until the result is dropped.
    ///
    /// # Errors
    /// The adapter cannot capture, the device has too many captures already, or a descriptor cannot be created.
    fn capture(&self, config: CaptureConfig) -> Result<Capture>;

    /// Returns the parts that only the software adapter has, or `None` if another adapter serves the device.
    fn software(&self) -> Option<&SoftwareParts>;
}

/// A device on its adapter.
pub(in crate::worker) struct Created {
    /// The device.
    pub(in crate::worker) function: Arc<dyn AnyDevice>,
    /// The same device, or the reason why its adapter cannot save it.
    pub(in crate::worker) migratable: Result<Arc<dyn Migratable>, &'static str>,
}

/// Parts of a device that only the software adapter has.
#[derive(Debug)]
pub(in crate::worker) struct SoftwareParts {
    // Fields are dropped in this order: observers end before the port.
    /// Receives failures of its queue pairs.
    pub(in crate::worker) _failures: ObservedFailures,
    /// Receives conflicts about its addresses.
    pub(in crate::worker) _conflicts: ObservedConflicts,
    /// Counts of its failed queue pairs.
    pub(in crate::worker) failed: Arc<FailureCounts>,
    /// Its faults on request.
    pub(in crate::worker) faults: DeviceFaults,
    /// Its station.
    pub(in crate::worker) station: RxeStation,
}
