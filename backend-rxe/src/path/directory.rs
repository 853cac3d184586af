//! Which adapter of this process has which GID.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use pvrdma_verbs::{Gid, VerbsError};

use crate::hca::{Adapter, BoundGid};

/// A GID and its VLAN: the encapsulation does not tell owners apart.
type Address = (Gid, Option<u16>);

const fn address(bound: BoundGid) -> Address {
    (bound.gid, bound.vlan)
}

#[derive(Debug)]
struct Owner {
    adapter: Weak<Adapter>,
    /// Table indices of that adapter that hold the GID.
    indices: u32,
}

/// All GIDs that are bound.
#[derive(Debug, Default)]
pub(crate) struct Fabric {
    owners: RwLock<HashMap<Address, Owner>>,
    generation: AtomicU64,
}

impl Fabric {
    /// Changes with every binding. A route that was found under an older generation must be looked up again.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Takes a GID for an adapter.
    pub(crate) fn bind(&self, gid: BoundGid, adapter: &Weak<Adapter>) -> Result<(), VerbsError> {
        match self.owners.write().entry(address(gid)) {
            Entry::Occupied(mut entry) => {
                let owner = entry.get_mut();
                if Weak::ptr_eq(&owner.adapter, adapter) {
                    owner.indices += 1;
                } else if owner.adapter.strong_count() == 0 {
                    *owner = Owner { adapter: Weak::clone(adapter), indices: 1 };
                } else {
                    return Err(VerbsError::InUse("GID"));
                }
            }
            Entry::Vacant(entry) => {
                entry.insert(Owner { adapter: Weak::clone(adapter), indices: 1 });
            }
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Gives one binding of a GID back.
    pub(crate) fn unbind(&self, gid: BoundGid, adapter: &Weak<Adapter>) {
        if let Entry::Occupied(mut entry) = self.owners.write().entry(address(gid))
            && Weak::ptr_eq(&entry.get().adapter, adapter)
        {
            let owner = entry.get_mut();
            owner.indices = owner.indices.saturating_sub(1);
            if owner.indices == 0 {
                entry.remove();
            }
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// The adapter that has this GID in this VLAN.
    pub(crate) fn find(&self, gid: BoundGid) -> Option<Arc<Adapter>> {
        self.owners.read().get(&address(gid))?.adapter.upgrade()
    }
}
