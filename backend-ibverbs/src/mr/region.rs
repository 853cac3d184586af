//! A memory region of a guest, and its registrations with the host.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs::{MrRequest, MrShape, VerbsError};
use pvrdma_verbs_types::{Access, FastRegister, Sge};
use serde::Serialize;

use super::pieces::Pieces;
use super::registration::{anchor, host_pieces, register, register_part};
use crate::adapter::Adapter;
use crate::contiguous_mapping::ContiguousMapping;
use crate::counters::bump;
use crate::limits::Share;
use crate::sys::{self, ACCESS_MW_BIND};
use crate::verbs::{HostMr, HostMw, HostOp, HostPd};

/// A region of a guest.
pub(crate) struct Mr {
    pd: Arc<HostPd>,
    /// Key at creation; fast registrations change the low byte.
    key: u32,
    rkey: u32,
    /// `false` once the region is destroyed or its memory is gone.
    alive: AtomicBool,
    body: Body,
}

enum Body {
    /// Memory of a guest process, under the host's own keys. If the memory is registered in pieces, the keys are those
    /// of an anchor: a page of the backend that no request may access.
    User {
        start: u64,
        length: u64,
        access: Access,
        pages: PageList,
        anchor: Option<HostMr>,
        /// See [`HostMr::shift`].
        shift: u64,
        host: Mutex<Option<Registered>>,
    },
    /// Bus addresses. The key is that of an anchor, a page of the backend that no request may access; memory is
    /// registered on first use.
    Dma { access: Access, _anchor: HostMr, parts: Mutex<Vec<DmaPart>> },
    /// A memory window and the region that it is bound to.
    Fast { max_pages: u32, state: Mutex<FastState> },
}

/// Registration of a process's memory.
enum Registered {
    Whole { _host: HostMr, _share: Share },
    Pieces(Pieces),
}

/// A range of bus addresses.
struct DmaPart {
    iova: u64,
    len: u64,
    host: HostMr,
    _share: Share,
}

struct FastState {
    /// `None` once the region is destroyed.
    window: Option<Arc<HostMw>>,
    bound: Option<FastBound>,
}

struct FastBound {
    /// A request that empties the region is in flight.
    ending: bool,
    /// QP that filled the region.
    qpn: u32,
    key: u32,
    iova: u64,
    length: u64,
    access: Access,
    pages: PageList,
    host: Arc<HostMr>,
    _share: Share,
}

/// Access rights of peers.
const REMOTE: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// Result of requesting a fast registration.
pub(crate) enum FastStep {
    /// The operation that fills the region.
    Bind(HostOp, Bind),
    /// A request that empties the region must end first.
    Wait,
    /// The registration is not allowed.
    Refuse,
}

/// Effect of a request in flight on a fast-registered region.
#[derive(Clone)]
pub(crate) enum Bind {
    /// Fills the region under this key.
    Register(Arc<Mr>, u32),
    /// Empties the region.
    Invalidate(Arc<Mr>, u32),
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr").field("key", &self.key).finish_non_exhaustive()
    }
}

impl fmt::Debug for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, key) = match self {
            Self::Register(_, key) => ("register", key),
            Self::Invalidate(_, key) => ("invalidate", key),
        };
        write!(f, "{what} {key:#x}")
    }
}

/// Returns `true` if `addr..addr+len` lies inside `start..start+length`.
fn covers(start: u64, length: u64, addr: u64, len: u64) -> bool {
    addr.checked_sub(start).and_then(|into| length.checked_sub(into)).is_some_and(|room| len <= room)
}

/// Returns `true` if any page of a list satisfies `gone`.
fn any_extent(pages: &PageList, gone: &impl Fn(u64, u64) -> bool) -> bool {
    pages.extents().iter().any(|extent| gone(extent.iova, extent.bytes()))
}

/// Snapshot of a region. It does not contain keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct MrInspect {
    /// `false` once the region is destroyed or its memory is gone.
    alive: bool,
    /// Guest memory that is registered with the host for this region, in bytes of whole pages.
    registered_bytes: Snapshot<u64>,
}

impl Mr {
    /// Returns the properties that the region was created with.
    pub(crate) fn shape(&self) -> MrShape {
        match self.body {
            Body::User { start, length, access, .. } => MrShape::User { start, length, access },
            Body::Dma { access, .. } => MrShape::Dma { access },
            Body::Fast { max_pages, .. } => MrShape::fast_register(max_pages),
        }
    }

    /// Returns a snapshot. Does not wait for locks.
    pub(crate) fn inspect(&self) -> MrInspect {
        let registered = match &self.body {
            Body::User { pages, host, .. } => {
                host.try_lock().map(|host| if host.is_some() { pages.bytes() } else { 0 })
            }
            Body::Dma { parts, .. } => parts.try_lock().map(|parts| parts.iter().map(|part| part.len).sum()),
            Body::Fast { state, .. } => {
                state.try_lock().map(|state| state.bound.as_ref().map_or(0, |bound| bound.pages.bytes()))
            }
        };
        MrInspect { alive: self.alive.load(Ordering::Relaxed), registered_bytes: registered.into() }
    }

    /// Creates a region and registers its memory. The caller holds the view until the region is in the table.
    pub(super) fn register(
        adapter: &Adapter,
        pd: &Arc<HostPd>,
        view: &DmaView<'_>,
        request: MrRequest,
    ) -> Result<Self, VerbsError> {
        let (key, rkey, body) = match request {
            MrRequest::User { start, length, pages, access } => {
                let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
                    return Err(VerbsError::Invalid("access rights"));
                }
                if !Self::fits(start, length, &pages) {
                    return Err(VerbsError::Invalid("memory region"));
                }
                Self::register_user(adapter, pd, view, (start, length), pages, access)?
            }
            MrRequest::Dma { access } => {
                let anchor = anchor(pd)?;
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
        Ok(Self { pd: Arc::clone(pd), key, rkey, alive: AtomicBool::new(true), body })
    }

    /// Registers memory of a process. Returns both keys, and the registration.
    fn register_user(
        adapter: &Adapter,
        pd: &Arc<HostPd>,
        view: &DmaView<'_>,
        (start, length): (u64, u64),
        pages: PageList,
        access: Access,
    ) -> Result<(u32, u32, Body), VerbsError> {
        let pieces = host_pieces(view, &pages, access)?;
        if ContiguousMapping::is_possible(&pieces) {
            let (host, share) = register(adapter, pd, &pieces, (start, length), access, 0)?;
            if host.shift() != 0 && access.intersects(REMOTE) {
                return Err(VerbsError::Unsupported("memory for peers on an adapter that ignores its addresses (siw)"));
            }
            let (lkey, rkey, shift) = (host.lkey(), host.rkey(), host.shift());
            let host = Mutex::new(Some(Registered::Whole { _host: host, _share: share }));
            return Ok((lkey, rkey, Body::User { start, length, access, pages, anchor: None, shift, host }));
        }
        if access.intersects(REMOTE) {
            return Err(VerbsError::Unsupported("memory for peers that is scattered over huge pages of the host"));
        }
        let anchor = anchor(pd)?;
        let (lkey, rkey) = (anchor.lkey(), anchor.rkey());
        let pieces = Pieces::register(adapter, pd, pieces, start - start % PAGE_SIZE, access)?;
        let host = Mutex::new(Some(Registered::Pieces(pieces)));
        Ok((lkey, rkey, Body::User { start, length, access, pages, anchor: Some(anchor), shift: 0, host }))
    }

    /// Returns the local key at creation.
    pub(crate) const fn lkey(&self) -> u32 {
        self.key
    }

    /// Returns the remote key at creation.
    pub(crate) const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Returns `true` if it belongs to this protection domain.
    pub(super) fn is_in(&self, pd: &Arc<HostPd>) -> bool {
        Arc::ptr_eq(&self.pd, pd)
    }

    /// Returns `true` if `key` is its key and names bus addresses, with the right to do `need`.
    pub(super) fn is_bus(&self, key: u32, need: Access) -> bool {
        self.key == key && matches!(&self.body, Body::Dma { access, .. } if access.contains(need))
    }

    /// Returns `true` if a fast registration is in force under `key`.
    pub(super) fn is_bound(&self, key: u32) -> bool {
        match &self.body {
            Body::Fast { state, .. } => state.lock().bound.as_ref().is_some_and(|bound| bound.key == key),
            Body::User { .. } | Body::Dma { .. } => false,
        }
    }

    /// Prepares a local invalidation. Returns `None` if nothing is registered under `key`, or if it is ending.
    pub(super) fn invalidate(self: &Arc<Self>, key: u32) -> Option<(HostOp, Bind)> {
        let Body::Fast { state, .. } = &self.body else { return None };
        state.lock().bound.as_mut().filter(|bound| bound.key == key && !bound.ending)?.ending = true;
        Some((HostOp::LocalInvalidate(key), Bind::Invalidate(Arc::clone(self), key)))
    }

    /// Returns `true` if a list of these pages covers `length` bytes from `start`.
    fn fits(start: u64, length: u64, pages: &PageList) -> bool {
        let span = length.checked_add(start % PAGE_SIZE);
        length != 0 && start.checked_add(length).is_some() && span.is_some_and(|span| span <= pages.bytes())
    }

    /// Ends the registrations that contain memory for which `gone` returns `true`. Afterwards the host cannot access
    /// it. Returns the number of registrations ended.
    pub(super) fn revoke(&self, gone: &impl Fn(u64, u64) -> bool) -> u64 {
        match &self.body {
            Body::User { pages, host, .. } => {
                if !any_extent(pages, gone) {
                    return 0;
                }
                self.alive.store(false, Ordering::Release);
                u64::from(host.lock().take().is_some())
            }
            Body::Dma { parts, .. } => {
                let mut parts = parts.lock();
                let before = parts.len();
                parts.retain(|part| !gone(part.iova, part.len));
                (before - parts.len()) as u64
            }
            Body::Fast { state, .. } => {
                let mut state = state.lock();
                if !state.bound.as_ref().is_some_and(|bound| any_extent(&bound.pages, gone)) {
                    return 0;
                }
                // The window is freed first, because a region to which windows are bound cannot be deregistered.
                self.alive.store(false, Ordering::Release);
                state.window = None;
                state.bound = None;
                1
            }
        }
    }

    pub(super) fn destroy(&self) {
        self.alive.store(false, Ordering::Release);
        match &self.body {
            Body::User { host, .. } => drop(host.lock().take()),
            Body::Dma { parts, .. } => parts.lock().clear(),
            Body::Fast { state, .. } => {
                let mut state = state.lock();
                state.window = None;
                state.bound = None;
            }
        }
    }

    /// Translates a piece of local memory, if `pd` has the access rights `need` to it.
    pub(super) fn translate(
        &self,
        adapter: &Adapter,
        view: &DmaView<'_>,
        sge: &Sge,
        need: Access,
        out: &mut Vec<sys::Sge>,
    ) -> Option<()> {
        let (addr, length) = (sge.addr, sge.length);
        let len = u64::from(length);
        match &self.body {
            Body::User { start, length: size, access, anchor, shift, host, .. } => {
                let allowed = self.key == sge.lkey && access.contains(need) && covers(*start, *size, addr, len);
                if !allowed || !self.alive.load(Ordering::Acquire) {
                    return None;
                }
                if anchor.is_some() {
                    let host = host.lock();
                    let Some(Registered::Pieces(pieces)) = &*host else { return None };
                    return pieces.translate(adapter, addr, length, out);
                }
                out.push(sys::Sge { addr: addr.wrapping_add(*shift), length, lkey: sge.lkey });
                Some(())
            }
            Body::Dma { access, parts, .. } => {
                let allowed = self.key == sge.lkey && access.contains(need) && self.alive.load(Ordering::Acquire);
                if !allowed {
                    return None;
                }
                self.bus_addresses(adapter, view, &mut parts.lock(), sge, out)
            }
            Body::Fast { state, .. } => {
                let state = state.lock();
                let bound = state.bound.as_ref().filter(|bound| {
                    bound.key == sge.lkey && bound.access.contains(need) && covers(bound.iova, bound.length, addr, len)
                })?;
                out.push(sys::Sge { addr, length, lkey: bound.host.lkey() });
                Some(())
            }
        }
    }

    /// Finds, or registers, the ranges that contain `sge`.
    fn bus_addresses(
        &self,
        adapter: &Adapter,
        view: &DmaView<'_>,
        parts: &mut Vec<DmaPart>,
        sge: &Sge,
        out: &mut Vec<sys::Sge>,
    ) -> Option<()> {
        let (mut addr, end) = (sge.addr, sge.addr.checked_add(u64::from(sge.length))?);
        while addr < end {
            let known = parts.iter().position(|part| covers(part.iova, part.len, addr, 1));
            let at = match known {
                Some(at) => at,
                None => {
                    let all = view.all_pieces();
                    let (iova, piece) =
                        all.into_iter().find(|(iova, piece)| covers(*iova, piece.len as u64, addr, 1))?;
                    let (len, access) = (piece.len, if piece.writable { Access::LOCAL_WRITE } else { Access::empty() });
                    match register_part(adapter, &self.pd, iova, piece, access) {
                        Ok((host, share)) => parts.push(DmaPart { iova, len: len as u64, host, _share: share }),
                        Err(error) => {
                            let log = &adapter.log;
                            log.warn(module_path!(), format_args!("memory at {iova:#x} cannot be registered: {error}"));
                            return None;
                        }
                    }
                    parts.len().checked_sub(1)?
                }
            };
            let part = parts.get(at)?;
            let count = (part.iova + part.len).min(end) - addr;
            let host = addr.wrapping_add(part.host.shift());
            out.push(sys::Sge { addr: host, length: u32::try_from(count).ok()?, lkey: part.host.lkey() });
            addr += count;
        }
        Some(())
    }

    /// Prepares a fast registration: the host's region, and the request that binds the window to it.
    pub(super) fn fast_register(
        self: &Arc<Self>,
        adapter: &Adapter,
        view: &DmaView<'_>,
        qpn: u32,
        request: &mut FastRegister,
    ) -> FastStep {
        let Body::Fast { max_pages, state } = &self.body else { return FastStep::Refuse };
        let mut state = state.lock();
        match &state.bound {
            Some(bound) if bound.ending => FastStep::Wait,
            Some(_) => FastStep::Refuse,
            None => match self.fill(adapter, view, qpn, request, *max_pages, &mut state) {
                Some((op, bind)) => FastStep::Bind(op, bind),
                None => FastStep::Refuse,
            },
        }
    }

    fn fill(
        self: &Arc<Self>,
        adapter: &Adapter,
        view: &DmaView<'_>,
        qpn: u32,
        request: &mut FastRegister,
        max_pages: u32,
        state: &mut FastState,
    ) -> Option<(HostOp, Bind)> {
        let &mut FastRegister { key, iova, length, access, .. } = request;
        let pages = request.pages.take().filter(|pages| pages.pages() <= max_pages)?;
        let window = state.window.clone()?;
        if !Self::fits(iova, length, &pages) {
            return None;
        }
        let registered = host_pieces(view, &pages, Access::LOCAL_WRITE).and_then(|pieces| {
            register(adapter, &self.pd, &pieces, (iova, length), Access::LOCAL_WRITE, ACCESS_MW_BIND)
        });
        let failed = |error: &_| adapter.log.warn(module_path!(), format_args!("a fast registration failed: {error}"));
        let (host, share) = registered.inspect_err(failed).ok()?;
        let host = Arc::new(host);
        let op = HostOp::BindMw {
            mw: window,
            mr: Arc::clone(&host),
            key,
            addr: iova,
            length,
            access: (access & REMOTE).bits(),
        };
        state.bound = Some(FastBound { ending: false, qpn, key, iova, length, access, pages, host, _share: share });
        bump(&adapter.counters.fast_registrations);
        Some((op, Bind::Register(Arc::clone(self), key)))
    }

    /// Ends a registration that `qpn` filled, and its region: a bound window must be freed before its QP.
    pub(super) fn end_with(&self, qpn: u32) {
        if let Body::Fast { state, .. } = &self.body {
            let mut state = state.lock();
            if state.bound.as_ref().is_some_and(|bound| bound.qpn == qpn) {
                self.alive.store(false, Ordering::Release);
                state.window = None;
                state.bound = None;
            }
        }
    }

    /// Notes that the registration under `key` has ended.
    pub(super) fn unbind(&self, key: u32) {
        if let Body::Fast { state, .. } = &self.body {
            let mut state = state.lock();
            if state.bound.as_ref().is_some_and(|bound| bound.key == key) {
                state.bound = None;
            }
        }
    }
}

impl Bind {
    /// Notes that the request was posted.
    pub(crate) fn posted(&self) {
        if let Self::Register(mr, key) = self
            && let Body::Fast { state, .. } = &mr.body
            && let Some(window) = &state.lock().window
        {
            window.bound(*key);
        }
    }

    /// Notes that the request has ended. An error ends the QP, and the registration is not bound.
    pub(crate) fn ended(&self, success: bool) {
        match self {
            Self::Register(mr, key) if !success => mr.unbind(*key),
            Self::Invalidate(mr, key) if success => mr.unbind(*key),
            Self::Register(..) | Self::Invalidate(..) => {}
        }
    }
}
