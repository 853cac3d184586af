//! The table of a device's regions.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use pvrdma_guest_memory::{DmaView, MemoryWatcher};
use pvrdma_verbs::{MrRequest, MrShape, VerbsError};
use pvrdma_verbs_types::{Access, FastRegister, Sge};

use super::region::{Bind, FastStep, Mr};
use crate::adapter::Adapter;
use crate::sys;
use crate::verbs::{HostOp, HostPd};

/// Regions of a device, by bits 31:8 of their keys, which the host never assigns twice at the same time.
#[derive(Debug)]
pub(crate) struct MrTable {
    adapter: Arc<Adapter>,
    regions: RwLock<HashMap<u32, Arc<Mr>>>,
}

impl MrTable {
    pub(crate) fn new(adapter: &Arc<Adapter>) -> Arc<Self> {
        Arc::new(Self { adapter: Arc::clone(adapter), regions: RwLock::default() })
    }

    /// Creates a region.
    ///
    /// # Errors
    /// Access rights and addresses are inconsistent, the memory is not the guest's, the device's limit is exceeded, or
    /// the host's adapter refuses.
    pub(crate) fn register(&self, pd: &Arc<HostPd>, request: MrRequest) -> Result<Arc<Mr>, VerbsError> {
        // The view is held until the region is in the table, where a change of the map finds it.
        let view = self.adapter.memory.view();
        let mr = Arc::new(Mr::register(&self.adapter, pd, &view, request)?);
        self.regions.write().insert(mr.lkey() >> 8, Arc::clone(&mr));
        drop(view);
        Ok(mr)
    }

    /// Ends a registration. When this returns, no access through its keys is in flight. The caller holds no view.
    pub(crate) fn destroy(&self, mr: &Arc<Mr>) {
        let known = {
            let mut regions = self.regions.write();
            let index = mr.lkey() >> 8;
            let known = regions.get(&index).is_some_and(|known| Arc::ptr_eq(known, mr));
            if known {
                regions.remove(&index);
            }
            known
        };
        // The host waits for accesses in flight through the keys.
        mr.destroy();
        if known && matches!(mr.shape(), MrShape::FastRegister { .. }) {
            // A batch that is being posted may hold the window. Its thread holds a view meanwhile, so waiting for all
            // views suffices.
            self.adapter.memory.barrier();
        }
    }

    fn get(&self, key: u32) -> Option<Arc<Mr>> {
        self.regions.read().get(&(key >> 8)).cloned()
    }

    fn get_in(&self, pd: &Arc<HostPd>, key: u32) -> Option<Arc<Mr>> {
        self.regions.read().get(&(key >> 8)).filter(|mr| mr.is_in(pd)).cloned()
    }

    /// Translates local memory to which `pd` needs the rights `need`. Empty pieces are ignored. Returns `None` if
    /// access is not allowed.
    pub(crate) fn translate(
        &self,
        view: &DmaView<'_>,
        pd: &Arc<HostPd>,
        sges: &[Sge],
        need: Access,
        out: &mut Vec<sys::Sge>,
    ) -> Option<()> {
        let regions = self.regions.read();
        for sge in sges.iter().filter(|sge| sge.length != 0) {
            let mr = regions.get(&(sge.lkey >> 8)).filter(|mr| mr.is_in(pd))?;
            mr.translate(&self.adapter, view, sge, need, out)?;
        }
        Some(())
    }

    /// Prepares a fast registration by the QP with QPN `qpn`.
    pub(crate) fn fast_register(
        &self,
        view: &DmaView<'_>,
        pd: &Arc<HostPd>,
        qpn: u32,
        request: &mut FastRegister,
    ) -> FastStep {
        self.get_in(pd, request.key).map_or(FastStep::Refuse, |mr| mr.fast_register(&self.adapter, view, qpn, request))
    }

    /// Prepares a local invalidation. Returns `None` if it is not allowed.
    pub(crate) fn invalidate(&self, pd: &Arc<HostPd>, key: u32) -> Option<(HostOp, Bind)> {
        self.get_in(pd, key)?.invalidate(key)
    }

    /// Returns `true` if `key` names bus addresses, with the access rights `need`.
    pub(crate) fn is_bus(&self, pd: &Arc<HostPd>, key: u32, need: Access) -> bool {
        self.get_in(pd, key).is_some_and(|mr| mr.is_bus(key, need))
    }

    /// Returns `true` if a fast registration is in force under `key`.
    pub(crate) fn is_bound(&self, key: u32) -> bool {
        self.regions.read().get(&(key >> 8)).is_some_and(|mr| mr.is_bound(key))
    }

    /// Handles the invalidation of a key by a peer.
    pub(crate) fn invalidated(&self, key: u32) {
        if let Some(mr) = self.get(key) {
            mr.unbind(key);
        }
    }

    /// Ends the fast registrations that a QP has filled, before the QP is destroyed.
    pub(crate) fn end_with(&self, qpn: u32) {
        self.all().iter().for_each(|mr| mr.end_with(qpn));
    }

    /// Ends all registrations of memory that is gone. Returns their number.
    pub(crate) fn revoke(&self, gone: impl Fn(u64, u64) -> bool) -> u64 {
        self.all().iter().map(|mr| mr.revoke(&gone)).sum()
    }

    fn all(&self) -> Vec<Arc<Mr>> {
        self.regions.read().values().cloned().collect()
    }

    fn revoke_counted(&self, gone: impl Fn(u64, u64) -> bool) {
        self.adapter.counters.regions_revoked.add(self.revoke(gone));
    }
}

impl MemoryWatcher for MrTable {
    fn unmapped(&self, ranges: &[(u64, u64)]) {
        self.revoke_counted(|iova, len| {
            ranges.iter().any(|&(start, count)| iova < start.saturating_add(count) && start < iova.saturating_add(len))
        });
    }

    fn disabled(&self) {
        self.revoke_counted(|_, _| true);
    }
}
