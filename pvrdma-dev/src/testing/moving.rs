//! A function that can move to another device while its driver runs.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;
use pvrdma_pci_function::{Bar, Deferred, MsixPlace, PciFunction};

/// A function as its guest sees it: it belongs to one device after another.
pub struct MovingFunction(RwLock<Arc<dyn PciFunction>>);

impl fmt::Debug for MovingFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MovingFunction")
    }
}

impl MovingFunction {
    /// Creates a function that belongs to this device.
    pub fn new(device: Arc<dyn PciFunction>) -> Arc<Self> {
        Arc::new(Self(RwLock::new(device)))
    }

    /// Moves the function to another device.
    pub fn move_to(&self, device: Arc<dyn PciFunction>) {
        *self.0.write() = device;
    }

    fn device(&self) -> Arc<dyn PciFunction> {
        Arc::clone(&self.0.read())
    }
}

impl PciFunction for MovingFunction {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.device().bars()
    }

    fn config_size(&self) -> usize {
        self.device().config_size()
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.device().config_read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.device().config_write(offset, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.device().bar_read(bar, offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        self.device().bar_write(bar, offset, data)
    }

    fn run_deferred(&self) {
        self.device().run_deferred();
    }

    fn msix(&self) -> Option<MsixPlace> {
        self.device().msix()
    }

    fn reset(&self) {
        self.device().reset();
    }
}
