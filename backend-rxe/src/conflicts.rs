//! Conflicts about the addresses of a device, as its owner observes them.

use std::fmt;
use std::sync::Arc;

use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::Gid;

use crate::addresses::{Addresses, Observer};

/// Conflict: a host beyond the uplink uses an address that a device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressConflict {
    /// The address.
    pub address: Gid,
    /// Its VLAN.
    pub vlan: Option<u16>,
    /// The device keeps the address, because it is listed or the device's rule is `any`. Otherwise its claim has ended.
    pub kept: bool,
}

/// Handle for an observer of a device's conflicts, which is removed on drop. A later observer of the same device
/// replaces it.
pub struct ObservedConflicts {
    addresses: Arc<Addresses>,
    mac: MacAddr,
    observer: Arc<Observer>,
}

impl ObservedConflicts {
    pub(crate) fn new(
        addresses: &Arc<Addresses>,
        mac: MacAddr,
        observer: impl Fn(&AddressConflict) + Send + Sync + 'static,
    ) -> Self {
        let observer = addresses.observe(mac, move |conflict| {
            let (address, vlan) = conflict.address;
            observer(&AddressConflict { address, vlan, kept: conflict.kept });
        });
        Self { addresses: Arc::clone(addresses), mac, observer }
    }
}

impl fmt::Debug for ObservedConflicts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedConflicts").field("mac", &self.mac).finish_non_exhaustive()
    }
}

impl Drop for ObservedConflicts {
    fn drop(&mut self) {
        self.addresses.stop_observing(self.mac, &self.observer);
    }
}
