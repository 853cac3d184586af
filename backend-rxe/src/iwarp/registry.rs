//! Devices with iWARP of an engine without threads, whose caller serves them.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

/// Connections of a device that have no thread.
pub(crate) trait Serviced: Send + Sync {
    /// Does what is possible without waiting. Returns `false` if that was nothing.
    fn service(&self) -> bool;

    /// Returns the time of the next deadline.
    fn deadline(&self) -> Option<Duration>;
}

/// The devices.
#[derive(Default)]
pub(crate) struct Registry(Mutex<Vec<Weak<dyn Serviced>>>);

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

impl Registry {
    /// Adds a device, until it is dropped.
    pub(crate) fn add(&self, device: Weak<dyn Serviced>) {
        let mut devices = self.0.lock();
        devices.retain(|device| device.strong_count() > 0);
        devices.push(device);
    }

    /// Returns all devices.
    pub(crate) fn all(&self) -> Vec<Arc<dyn Serviced>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
