//! Directory of this process: the owner of each GID, and the QP of each number.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use pvrdma_base::EndOnPanic;
use pvrdma_handover::Generation;
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::Qpn;

use crate::adapter::Adapter;
use crate::addresses::Address;
use crate::gid::BoundGid;
use crate::limits::MAX_QP;
use crate::paused::Waiters;
use crate::port::Function;

/// Returns the part of a binding that can have only one owner in the network. The encapsulation is not part of it.
pub(crate) const fn address(bound: BoundGid) -> Address {
    (bound.gid, bound.vlan)
}

/// A device and its queue pairs of type `Q`.
pub(crate) struct Node<Q> {
    pub(crate) adapter: Arc<Adapter>,
    qps: RwLock<HashMap<u32, Weak<Q>>>,
}

impl<Q> fmt::Debug for Node<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("adapter", &self.adapter).finish_non_exhaustive()
    }
}

impl<Q> Node<Q> {
    pub(crate) fn new(adapter: Adapter) -> Arc<Self> {
        Arc::new(Self { adapter: Arc::new(adapter), qps: RwLock::default() })
    }

    /// Returns the QP with this number.
    pub(crate) fn qp(&self, qpn: Qpn) -> Option<Arc<Q>> {
        self.qps.read().get(&qpn.get())?.upgrade()
    }

    /// Returns all QPs.
    pub(crate) fn qps(&self) -> Vec<Arc<Q>> {
        self.qps.read().values().filter_map(Weak::upgrade).collect()
    }

    /// Creates a QP and assigns this number to it.
    ///
    /// # Errors
    /// The number is in use, or the maximum number of QPs is reached.
    pub(crate) fn insert(&self, qpn: Qpn, make: impl FnOnce() -> Arc<Q>) -> Result<Arc<Q>, VerbsError> {
        let mut qps = self.qps.write();
        let count = qps.len();
        match qps.entry(qpn.get()) {
            Entry::Occupied(entry) if entry.get().strong_count() > 0 => Err(VerbsError::InUse("QPN")),
            _ if count >= MAX_QP as usize => Err(VerbsError::Exhausted("queue pair")),
            entry => {
                let qp = make();
                entry.insert_entry(Arc::downgrade(&qp));
                Ok(qp)
            }
        }
    }

    /// Releases the number of a QP, unless another QP has taken it since.
    pub(crate) fn forget(&self, qpn: Qpn, qp: &Q) {
        if let Entry::Occupied(entry) = self.qps.write().entry(qpn.get())
            && std::ptr::eq(entry.get().as_ptr(), qp)
        {
            entry.remove();
        }
    }
}

impl<Q: Send + Sync> Function for Node<Q> {
    fn addresses(&self) -> Option<BTreeSet<Address>> {
        let bound = (0..=u8::MAX).filter_map(|index| self.adapter.gids.get(index));
        // An address may be bound once for each encapsulation.
        (!self.adapter.paused.is_set()).then(|| bound.map(address).collect())
    }
}

#[derive(Debug)]
struct Owner<Q> {
    node: Weak<Node<Q>>,
    /// Number of table indices of that device that hold the GID.
    indices: u32,
}

/// Owners of all bound GIDs.
pub(crate) struct Directory<Q> {
    owners: RwLock<HashMap<Address, Owner<Q>>>,
    generation: Generation,
    /// Number of changes between paused and not paused, of all devices.
    pauses: Generation,
}

impl<Q> Default for Directory<Q> {
    fn default() -> Self {
        Self { owners: RwLock::default(), generation: Generation::new(), pauses: Generation::new() }
    }
}

impl<Q> fmt::Debug for Directory<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory").field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// Returns the current generation of a directory, for a thread that knows no queue pairs that can run.
pub(crate) type Generations = Arc<dyn Fn() -> u64 + Send + Sync>;

impl<Q: Send + Sync + 'static> Directory<Q> {
    /// Returns a function that returns the generation.
    pub(crate) fn generations(self: &Arc<Self>) -> Generations {
        let me = Arc::clone(self);
        Arc::new(move || me.generation())
    }
}

impl<Q> Directory<Q> {
    /// Returns the generation, which changes with every binding. A route of an older generation must be looked up
    /// again.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Returns a number that changes whenever a device is paused or resumed. A request whose wait for a peer spans such
    /// a change is retried without spending a retry.
    #[inline]
    pub(crate) fn pauses(&self) -> u64 {
        self.pauses.get()
    }

    /// Returns the device that has bound this GID in this VLAN.
    pub(crate) fn find(&self, gid: BoundGid) -> Option<Arc<Node<Q>>> {
        self.owners.read().get(&address(gid))?.node.upgrade()
    }

    /// Binds or unbinds a GID at a table index of a device.
    ///
    /// # Errors
    /// The index does not exist, or another device has bound the GID.
    pub(crate) fn set_gid(&self, node: &Arc<Node<Q>>, index: u8, new: Option<BoundGid>) -> Result<(), VerbsError> {
        let _guard = EndOnPanic::new("the directory of GIDs");
        let adapter = &node.adapter;
        let old = {
            let mut gids = adapter.gids.write();
            let slot = gids.get_mut(usize::from(index)).ok_or(VerbsError::Invalid("GID index"))?;
            if *slot == new {
                return Ok(());
            }
            if let Some(gid) = new {
                self.bind(gid, node)?;
            }
            let old = std::mem::replace(slot, new);
            if let Some(gid) = old {
                self.unbind(gid, node);
            }
            old
        };
        if let Some(iwarp) = &adapter.iwarp {
            iwarp.addresses_changed();
        }
        // Batches that looked up the old binding hold a view of this adapter's memory, for which the barrier waits.
        // Later batches see the new generation.
        if old.is_some() {
            adapter.memory.barrier();
        }
        Ok(())
    }

    /// Sets the link state of a device, which keeps its addresses. Once this has returned from setting it down, nothing
    /// is delivered from the device or to it. Returns `true` if the state has changed.
    pub(crate) fn set_link(&self, node: &Node<Q>, up: bool) -> bool {
        let adapter = &node.adapter;
        if adapter.link_up.swap(up, Ordering::AcqRel) == up {
            return false;
        }
        // Routes have to be looked up again, as after a change of a binding.
        self.generation.end();
        if !up {
            adapter.memory.barrier();
        }
        true
    }

    /// Marks a device as paused. Once the caller has then waited for all views of its memory, no other device delivers
    /// to it.
    pub(crate) fn pause(&self, node: &Node<Q>) {
        node.adapter.paused.set(node.adapter.engine.now());
        self.pauses.end();
        // Routes have to be looked up again, as after a change of a binding.
        self.generation.end();
    }

    /// Removes the mark. Returns the tasks that wait for that.
    pub(crate) fn resume(&self, node: &Node<Q>) -> Waiters {
        let waiters = node.adapter.paused.clear();
        self.pauses.end();
        self.generation.end();
        waiters
    }

    fn bind(&self, gid: BoundGid, node: &Arc<Node<Q>>) -> Result<(), VerbsError> {
        match self.owners.write().entry(address(gid)) {
            Entry::Occupied(mut entry) => {
                let owner = entry.get_mut();
                if owner.is(node) {
                    owner.indices += 1;
                } else if owner.node.strong_count() == 0 {
                    *owner = Owner { node: Arc::downgrade(node), indices: 1 };
                } else {
                    return Err(VerbsError::InUse("GID"));
                }
            }
            Entry::Vacant(entry) => {
                entry.insert(Owner { node: Arc::downgrade(node), indices: 1 });
            }
        }
        self.generation.end();
        Ok(())
    }

    fn unbind(&self, gid: BoundGid, node: &Arc<Node<Q>>) {
        if let Entry::Occupied(mut entry) = self.owners.write().entry(address(gid))
            && entry.get().is(node)
        {
            let owner = entry.get_mut();
            owner.indices = owner.indices.saturating_sub(1);
            if owner.indices == 0 {
                entry.remove();
            }
        }
        self.generation.end();
    }
}

impl<Q> Owner<Q> {
    fn is(&self, node: &Arc<Node<Q>>) -> bool {
        std::ptr::eq(self.node.as_ptr(), Arc::as_ptr(node))
    }
}
