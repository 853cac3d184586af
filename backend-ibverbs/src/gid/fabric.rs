//! Devices of this process, by GID.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use pvrdma_verbs::{Rules, VerbsError};
use pvrdma_verbs_types::{Gid, GidType};

use super::host::HostGid;
use crate::counters::Counters;
use crate::datagram::Datagram;

/// A GID of a guest, with the host's GID used for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bound {
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
    /// GID of the host used for it.
    pub(crate) host: HostGid,
}

impl Bound {
    /// Returns `true` if the host has the guest's own address, so that no other address is used for it.
    pub(crate) fn is_own(&self) -> bool {
        self.host.gid == self.gid && self.host.kind == self.kind
    }
}

/// Receiver of management datagrams of a device: its GSI QP.
pub(crate) trait DatagramReceiver: Send + Sync {
    /// Stores a datagram in the next receive. Returns `false` if it was dropped.
    fn receive(&self, datagram: &Datagram) -> bool;
}

/// A device of this process, as seen by the others.
#[derive(Default)]
pub(crate) struct Member {
    pub(crate) counters: Arc<Counters>,
    pub(crate) rules: Rules,
    /// GSI QP of the device, if its guest has created one.
    pub(crate) gsi: Mutex<Option<Weak<dyn DatagramReceiver>>>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").finish_non_exhaustive()
    }
}

impl Member {
    /// Passes a management datagram to the device. Returns `false` if it was dropped.
    pub(crate) fn receive(&self, datagram: &Datagram) -> bool {
        let gsi = self.gsi.lock().as_ref().and_then(Weak::upgrade);
        gsi.is_some_and(|gsi| gsi.receive(datagram))
    }
}

/// Owners of the GIDs of this process.
#[derive(Debug, Default)]
pub(crate) struct Fabric(RwLock<HashMap<Gid, (Weak<Member>, Bound)>>);

impl Fabric {
    /// Assigns a GID to a device, or changes the host's GID used for one that it has.
    ///
    /// # Errors
    /// [`VerbsError::InUse`]: another device has it.
    pub(crate) fn bind(&self, owner: &Arc<Member>, bound: Bound) -> Result<(), VerbsError> {
        let owner = Arc::downgrade(owner);
        match self.0.write().entry(bound.gid) {
            Entry::Occupied(entry) if entry.get().0.strong_count() > 0 && !entry.get().0.ptr_eq(&owner) => {
                Err(VerbsError::InUse("GID"))
            }
            entry => {
                entry.insert_entry((owner, bound));
                Ok(())
            }
        }
    }

    /// Removes a GID from a device, if the device has it.
    pub(crate) fn unbind(&self, owner: &Arc<Member>, gid: Gid) {
        if let Entry::Occupied(entry) = self.0.write().entry(gid)
            && entry.get().0.as_ptr() == Arc::as_ptr(owner)
        {
            entry.remove();
        }
    }

    /// Returns the device that has a GID.
    pub(crate) fn owner(&self, gid: Gid) -> Option<Arc<Member>> {
        self.0.read().get(&gid)?.0.upgrade()
    }

    /// Returns `true` if the peer rules of a device allow address `to`, and, if `to` belongs to this process, its
    /// device's rules allow `from`. Loopback is always allowed.
    pub(crate) fn may_meet(&self, own: &Arc<Member>, from: Gid, to: Gid) -> bool {
        match self.owner(to) {
            Some(peer) if Arc::ptr_eq(&peer, own) => true,
            Some(peer) => own.rules.allow_peer(to) && peer.rules.allow_peer(from),
            None => own.rules.allow_peer(to),
        }
    }

    /// Returns the device whose own address an entry of the host's table is.
    pub(crate) fn owner_of(&self, entry: &HostGid) -> Option<Arc<Member>> {
        let fabric = self.0.read();
        let (owner, bound) = fabric.get(&entry.gid)?;
        if bound.host == *entry { owner.upgrade() } else { None }
    }

    /// Returns the GID by which the host's network knows a peer: the host's entry for a guest of this process, and the
    /// peer's own GID otherwise.
    pub(crate) fn translate(&self, gid: Gid) -> Gid {
        self.0.read().get(&gid).map_or(gid, |(_, bound)| bound.host.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn gid(last: u8) -> Gid {
        Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last])
    }

    const fn entry(index: u8, last: u8) -> HostGid {
        HostGid { index, gid: gid(last), kind: GidType::RoceV2 }
    }

    #[test]
    fn an_entry_belongs_to_the_owner_of_its_address() {
        let fabric = Fabric::default();
        let owner = Arc::default();
        let own = Bound { gid: gid(1), kind: GidType::RoceV2, host: entry(3, 1) };
        // The host's first address is used for this one.
        let other = Bound { gid: gid(2), kind: GidType::RoceV2, host: entry(0, 9) };
        fabric.bind(&owner, own).unwrap();
        fabric.bind(&owner, other).unwrap();
        assert!(own.is_own() && !other.is_own());
        assert!(fabric.owner_of(&entry(3, 1)).is_some());
        // The index was assigned to another address since, the address has another index, and an address of the host
        // itself.
        for entry in [entry(3, 7), entry(4, 1), entry(0, 9), HostGid { kind: GidType::RoceV1, ..entry(3, 1) }] {
            assert!(fabric.owner_of(&entry).is_none(), "{entry:?}");
        }
    }

    #[test]
    fn a_gid_has_one_owner_until_that_unbinds_it_or_is_gone() {
        let fabric = Fabric::default();
        let (first, second) = (Arc::<Member>::default(), Arc::<Member>::default());
        let bound = Bound { gid: gid(1), kind: GidType::RoceV2, host: entry(0, 9) };
        fabric.bind(&first, bound).unwrap();
        assert!(matches!(fabric.bind(&second, bound), Err(VerbsError::InUse("GID"))));
        fabric.unbind(&second, gid(1));
        assert!(fabric.owner(gid(1)).is_some_and(|owner| Arc::ptr_eq(&owner, &first)));
        // For a peer of this process, the host's GID is returned, for any other peer its own.
        assert_eq!((fabric.translate(gid(1)), fabric.translate(gid(5))), (gid(9), gid(5)));
        fabric.unbind(&first, gid(1));
        assert_eq!(fabric.translate(gid(1)), gid(1));
        fabric.bind(&second, bound).unwrap();
        drop(second);
        assert!(fabric.owner(gid(1)).is_none());
        fabric.bind(&first, bound).unwrap();
        assert!(fabric.owner(gid(1)).is_some());
    }
}
