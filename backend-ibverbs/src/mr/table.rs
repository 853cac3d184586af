//! The table of regions, and a region as the device sees it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, RwLock};
use pvrdma_guest_memory::{DmaView, HostPiece};
use pvrdma_verbs::{Access, FastRegister, MemoryRegion, MrRequest, Sge, VerbsError};
use vm_memory::mmap::MmapRegion;

use super::{Bind, Body, FastState, FastStep, Mr, register};
use crate::adapter::Adapter;
use crate::contiguous_mapping::ContiguousMapping;
use crate::sys;
use crate::verbs::{HostMr, HostMw, HostOp, HostPd};

/// The regions of a device by bits 31:8 of their keys, which the host never gives twice at the same time.
#[derive(Debug, Default)]
pub(crate) struct MrTable(RwLock<HashMap<u32, Arc<Mr>>>);

impl MrTable {
    fn get(&self, key: u32, pd: &Arc<HostPd>) -> Option<Arc<Mr>> {
        self.0.read().get(&(key >> 8)).filter(|mr| Arc::ptr_eq(&mr.pd, pd)).cloned()
    }

    /// Translates local memory that `pd` may do `need` with. Empty pieces mean nothing. `None` when it may not.
    pub(crate) fn translate(
        &self,
        adapter: &Adapter,
        view: &DmaView<'_>,
        pd: &Arc<HostPd>,
        sges: &[Sge],
        need: Access,
        out: &mut Vec<sys::Sge>,
    ) -> Option<()> {
        let table = self.0.read();
        for sge in sges.iter().filter(|sge| sge.length != 0) {
            let mr = table.get(&(sge.lkey >> 8)).filter(|mr| Arc::ptr_eq(&mr.pd, pd))?;
            mr.translate(adapter, view, sge, need, out)?;
        }
        Some(())
    }

    /// Prepares a fast registration.
    pub(crate) fn fast_register(
        &self,
        adapter: &Adapter,
        view: &DmaView<'_>,
        (pd, qpn): (&Arc<HostPd>, u32),
        request: &mut FastRegister,
    ) -> FastStep {
        self.get(request.key, pd).map_or(FastStep::Refuse, |mr| mr.fast_register(adapter, view, qpn, request))
    }

    /// Prepares a local invalidation; `None` when it is not allowed.
    pub(crate) fn invalidate(&self, pd: &Arc<HostPd>, key: u32) -> Option<(HostOp, Bind)> {
        let mr = self.get(key, pd)?;
        let Body::Fast { state, .. } = &mr.body else { return None };
        state.lock().bound.as_mut().filter(|bound| bound.key == key && !bound.ending)?.ending = true;
        Some((HostOp::LocalInvalidate(key), Bind::Invalidate(Arc::clone(&mr), key)))
    }

    /// Whether `key` names bus addresses, with the right to do `need`.
    pub(crate) fn is_bus(&self, pd: &Arc<HostPd>, key: u32, need: Access) -> bool {
        self.get(key, pd)
            .is_some_and(|mr| mr.key == key && matches!(&mr.body, Body::Dma { access, .. } if access.contains(need)))
    }

    /// Whether a fast registration is in force under `key`.
    pub(crate) fn is_bound(&self, key: u32) -> bool {
        self.0.read().get(&(key >> 8)).is_some_and(|mr| match &mr.body {
            Body::Fast { state, .. } => state.lock().bound.as_ref().is_some_and(|bound| bound.key == key),
            Body::User { .. } | Body::Dma { .. } => false,
        })
    }

    /// A peer took a key away.
    pub(crate) fn invalidated(&self, key: u32) {
        let mr = self.0.read().get(&(key >> 8)).cloned();
        if let Some(mr) = mr {
            mr.unbind(key);
        }
    }

    /// A QP is about to end: so do the fast registrations that it filled.
    pub(crate) fn end_with(&self, qpn: u32) {
        let all: Vec<_> = self.0.read().values().cloned().collect();
        all.iter().for_each(|mr| mr.end_with(qpn));
    }

    /// Ends every registration of memory that is gone. Gives how many those were.
    pub(crate) fn revoke(&self, gone: impl Fn(u64, u64) -> bool) -> u64 {
        let all: Vec<_> = self.0.read().values().cloned().collect();
        all.iter().map(|mr| mr.revoke(&gone)).sum()
    }
}

/// A registered memory region. Dropping it ends the registration.
#[derive(Debug)]
pub struct IbvMr {
    adapter: Arc<Adapter>,
    mr: Arc<Mr>,
}

impl IbvMr {
    pub(crate) fn register(adapter: &Arc<Adapter>, pd: &Arc<HostPd>, request: MrRequest) -> Result<Self, VerbsError> {
        // Held until the region is in the table, where a change of the map finds it.
        let view = adapter.memory.view();
        let (key, rkey, body) = match request {
            MrRequest::User { start, length, pages, access } => {
                let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
                    return Err(VerbsError::Invalid("access rights"));
                }
                if !Mr::fits(start, length, &pages) {
                    return Err(VerbsError::Invalid("memory region"));
                }
                let (host, share) = register(adapter, pd, &view, &pages, (start, length), access, 0)?;
                let (lkey, rkey) = (host.lkey(), host.rkey());
                (lkey, rkey, Body::User { start, length, access, pages, host: Mutex::new(Some((host, share))) })
            }
            MrRequest::Dma { access } => {
                let anchor = Self::anchor(pd)?;
                let (lkey, rkey) = (anchor.lkey(), anchor.rkey());
                let access = access & Access::LOCAL_WRITE;
                (lkey, rkey, Body::Dma { access, _anchor: anchor, parts: Mutex::default() })
            }
            MrRequest::FastRegister { max_pages } => {
                let window = HostMw::new(pd)?;
                let key = window.key();
                let state = FastState { window: Some(Arc::new(window)), bound: None };
                (key, key, Body::Fast { max_pages, state: Mutex::new(state) })
            }
        };
        let mr = Arc::new(Mr { pd: Arc::clone(pd), key, rkey, alive: AtomicBool::new(true), body });
        adapter.mrs.0.write().insert(key >> 8, Arc::clone(&mr));
        drop(view);
        Ok(Self { adapter: Arc::clone(adapter), mr })
    }

    /// A page that only serves to have a key that nothing else has.
    fn anchor(pd: &Arc<HostPd>) -> Result<HostMr, VerbsError> {
        let len = 4096;
        let page = MmapRegion::new(len).map_err(|error| VerbsError::Host(std::io::Error::other(error)))?;
        let mapping =
            ContiguousMapping::map(&[HostPiece { mapping: Arc::new(page), offset: 0, len, writable: false }])?;
        Ok(HostMr::register(pd, mapping, 0, len, 0, 0)?)
    }
}

impl MemoryRegion for IbvMr {
    fn lkey(&self) -> u32 {
        self.mr.key
    }

    fn rkey(&self) -> u32 {
        self.mr.rkey
    }

    fn destroy(&self) {
        {
            let mut table = self.adapter.mrs.0.write();
            let index = self.mr.key >> 8;
            if table.get(&index).is_some_and(|mr| Arc::ptr_eq(mr, &self.mr)) {
                table.remove(&index);
            }
        }
        // The host waits for whatever is under way through its keys.
        self.mr.destroy();
    }
}

impl Drop for IbvMr {
    fn drop(&mut self) {
        self.destroy();
    }
}
