//! Placeholder; the device is on its way.

mod pci_function;

pub use pci_function::{Bar, InterruptSink, PciFunction};
