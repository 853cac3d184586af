//! The in-process driver, connected to a function through a vfio-user socket.

use std::path::Path;

use pvrdma_dev::testing::{Driver, GuestMemory};
use pvrdmad::testing::RemoteFunction;

use super::memfd;

/// Same as [`probe`], with the exported doorbell pages of the device mapped.
pub fn probe_mapped(socket: &Path, bytes: u64) -> Driver {
    let file = memfd("guest", bytes);
    let (function, irqs) = RemoteFunction::connect_mapped(socket, &file).unwrap();
    Driver::probe(function, &GuestMemory::in_file(file), &irqs).unwrap()
}

/// Connects to a device, gives it memory, and binds the driver to it.
pub fn probe(socket: &Path, bytes: u64) -> Driver {
    let file = memfd("guest", bytes);
    let (function, irqs) = RemoteFunction::connect(socket, &file).unwrap();
    Driver::probe(function, &GuestMemory::in_file(file), &irqs).unwrap()
}
