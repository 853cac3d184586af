//! The ports of a network.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::VerbsError;

use super::Port;

/// Ports of the devices that are connected to a network, by MAC address.
#[derive(Debug, Default)]
pub(crate) struct Ports(Mutex<HashMap<MacAddr, Arc<Port>>>);

impl Ports {
    /// Removes a port.
    pub(super) fn remove(&self, mac: MacAddr) {
        self.0.lock().remove(&mac);
    }

    /// Returns all ports.
    pub(crate) fn all(&self) -> Vec<Arc<Port>> {
        self.0.lock().values().cloned().collect()
    }

    /// Adds a port.
    ///
    /// # Errors
    /// The device has a port already.
    pub(super) fn insert(&self, port: &Arc<Port>) -> Result<(), VerbsError> {
        match self.0.lock().entry(port.mac) {
            Entry::Occupied(_) => Err(VerbsError::InUse("MAC address")),
            Entry::Vacant(entry) => {
                entry.insert(Arc::clone(port));
                Ok(())
            }
        }
    }
}
