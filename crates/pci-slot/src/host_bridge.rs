//! The host bridge. A guest without ACPI probes for it before it accepts that there is a bus.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, CONFIG_SIZE, ConfigLayout, ConfigSpace, Deferred, Identity, MsixPlace, PciFunction};

use crate::slot::{Slot, SlotError};

/// Vendor Intel, with the device ID that Cloud Hypervisor's bridge also uses.
const IDENTITY: Identity = Identity { vendor: 0x8086, device: 0x0d57, revision: 0, class: [0, 0, 6] };

/// A host bridge that does nothing.
#[derive(Debug)]
pub struct HostBridge(Mutex<ConfigSpace>);

impl HostBridge {
    /// Creates slot 0 with a host bridge.
    ///
    /// # Errors
    /// There are no file descriptors left.
    pub fn slot() -> Result<Arc<Slot>, SlotError> {
        let layout = ConfigLayout {
            identity: IDENTITY,
            bars: [None; 6],
            msix: None,
            interrupt_pin: false,
            multifunction: false,
        };
        Slot::builder(0).with(0, Arc::new(Self(Mutex::new(ConfigSpace::new(&layout))))).build()
    }
}

impl PciFunction for HostBridge {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        CONFIG_SIZE
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.0.lock().read(offset, data, false);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.0.lock().write(offset, data);
    }

    fn bar_read(&self, _bar: usize, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn bar_write(&self, _bar: usize, _offset: u64, _data: &[u8]) -> Deferred {
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        None
    }

    fn reset(&self) {
        self.0.lock().reset();
    }
}
