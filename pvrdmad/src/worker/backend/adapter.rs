//! The operations of a network's adapter that a worker needs, beside those of [`pvrdma_verbs::Backend`].

use std::fmt;
use std::sync::Arc;

use anyhow::Result;
use pvrdma_dev::DeviceConfig;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{InterruptSink, Migratable};
use pvrdma_rxe::{
    DeviceFlows, DeviceShare, ObservedConflicts, ObservedFailures, PortConfig, ShareConfig, Uplink,
    capture::{Capture, CaptureConfig, CaptureCounts},
    faults::DeviceFaults,
};
use pvrdma_verbs::VerbsError;

use crate::config::Device;
use crate::failures::FailureCounts;
use crate::worker::any_device::AnyDevice;

/// The adapter that moves the data of a network's devices.
pub(in crate::worker) trait Adapter: fmt::Debug + Send + Sync {
    /// Returns the parts of a device that this adapter has. [`Self::plug`] and [`Self::create`] follow, and use them.
    fn parts(&self, device: &Device) -> Parts;

    /// Connects a device to its network. Precedes [`Self::create`], because the device looks up its port when its
    /// driver starts.
    ///
    /// # Errors
    /// The adapter has no ports, the device is connected already, or the thread of the port cannot be started.
    fn plug(&self, mac: MacAddr, port: PortConfig) -> Result<Uplink>;

    /// Creates a device.
    ///
    /// # Errors
    /// The configuration is invalid, or the adapter cannot serve another device.
    fn create(
        &self,
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
    ) -> Result<Created, VerbsError>;

    /// Announces all devices at the uplink, because it leads to another port of the switch.
    fn announce(&self);

    /// Changes a share among the [`Parts`] of a device.
    fn set_share(&self, share: &DeviceShare, config: ShareConfig);

    /// Starts a capture of a device, until the result is dropped.
    ///
    /// # Errors
    /// The adapter cannot capture, the device has too many captures already, or a descriptor cannot be created.
    fn capture(&self, mac: MacAddr, config: CaptureConfig) -> Result<Capture>;

    /// Returns the statistics of a device's captures.
    fn capture_counts(&self, mac: MacAddr) -> CaptureCounts;
}

/// A device on its adapter.
pub(in crate::worker) struct Created {
    /// The device.
    pub(in crate::worker) function: Arc<dyn AnyDevice>,
    /// The same device, or the reason why its adapter cannot save it.
    pub(in crate::worker) migratable: Result<Arc<dyn Migratable>, &'static str>,
}

/// Parts of a device that its adapter has.
#[derive(Default)]
pub(in crate::worker) struct Parts {
    /// Its share of common resources, if the adapter enforces shares.
    pub(in crate::worker) share: Option<DeviceShare>,
    /// Its faults on request, if the adapter has them.
    pub(in crate::worker) faults: Option<DeviceFaults>,
    /// Its traffic counters, if the adapter counts the traffic.
    pub(in crate::worker) flows: Option<DeviceFlows>,
    /// Receives failures of its queue pairs, and counts them.
    pub(in crate::worker) failures: Option<(ObservedFailures, Arc<FailureCounts>)>,
    /// Receives conflicts about its addresses.
    pub(in crate::worker) conflicts: Option<ObservedConflicts>,
}
