//! An adapter: the objects of one device.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use pvrdma_guest_memory::{DmaSpace, DmaView, PageList, PinGuard};
use pvrdma_verbs::{
    Access, CompletionSink, Counter, DeviceContext, EventSink, Gid, GidType, Hca, HcaLimits, MrRequest, Mtu,
    PortAttributes, PortState, QpInit, QpType, Qpn, SrqInit, VerbsError,
};

use crate::capture::Point;
use crate::counters::Counters;
use crate::cq::{Cq, RxeCq};
use crate::mr::{MAX_MR, Mr, MrTable, Region, RxeMr};
use crate::port::Port;
use crate::qp::{Qp, RxeQp};
use crate::rxe::Shared;
use crate::srq::{RxeSrq, Srq};

/// Largest message.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;
/// Path MTU of local delivery, the largest there is.
pub(crate) const PORT_MTU: Mtu = Mtu::M4096;
/// RDMA reads and atomics outstanding per QP that may be asked for.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
const MAX_QP: u32 = 65_535;
const MAX_CQ: u32 = 65_535;
const MAX_SRQ: u32 = 65_535;
const MAX_PD: u32 = 65_535;
const GID_INDICES: usize = 256;
/// Numbers of VLANs (IEEE 802.1Q table 9-2).
pub(crate) const VLANS: RangeInclusive<u16> = 1..=4094;

/// One place in a table of limited size.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicU32>);

impl Permit {
    fn take(count: &Arc<AtomicU32>, limit: u32, what: &'static str) -> Result<Self, VerbsError> {
        count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < limit).then_some(n.wrapping_add(1)))
            .map(|_| Self(Arc::clone(count)))
            .map_err(|_| VerbsError::Exhausted(what))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
struct Counts {
    pds: Arc<AtomicU32>,
    cqs: Arc<AtomicU32>,
    srqs: Arc<AtomicU32>,
    next_pd: AtomicU32,
}

/// A GID as it is bound. All of it is part of the address: RoCE v1 does not reach v2, nor one VLAN another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BoundGid {
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
    /// Its VLAN. Packets of no VLAN have no tag, or one for their priority.
    pub(crate) vlan: Option<u16>,
}

impl BoundGid {
    /// Another GID on the same network.
    pub(crate) const fn beside(self, gid: Gid) -> Self {
        Self { gid, ..self }
    }
}

/// What the objects of one device share.
pub(crate) struct Adapter {
    pub(crate) me: Weak<Self>,
    /// Order in which region tables of two adapters are locked.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) shared: Arc<Shared>,
    /// The way to other hosts, if the device is plugged in.
    pub(crate) port: Option<Arc<Port>>,
    /// Where the device is watched.
    pub(crate) point: Arc<Point>,
    pub(crate) mrs: RwLock<MrTable>,
    pub(crate) counters: Counters,
    qps: RwLock<HashMap<u32, Weak<Qp>>>,
    gids: RwLock<Box<[Option<BoundGid>]>>,
    counts: Counts,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Adapter {
    pub(crate) fn new(id: u64, context: DeviceContext, shared: Arc<Shared>) -> Arc<Self> {
        let port = shared.ports.lock().get(&context.mac).cloned();
        let point = shared.captures.point(context.mac);
        let adapter = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            id,
            port,
            point,
            name: context.name,
            memory: context.memory,
            events: context.events,
            shared,
            mrs: RwLock::default(),
            counters: Counters::default(),
            qps: RwLock::default(),
            gids: RwLock::new(vec![None; GID_INDICES].into_boxed_slice()),
            counts: Counts::default(),
        });
        if let Some(port) = &adapter.port {
            port.attach(&adapter.me);
        }
        adapter
    }

    /// What is bound at a table index.
    pub(crate) fn gid(&self, index: u8) -> Option<BoundGid> {
        self.gids.read().get(usize::from(index)).copied().flatten()
    }

    /// Whether a GID is bound here with this encapsulation and VLAN.
    pub(crate) fn has_gid(&self, gid: BoundGid) -> bool {
        self.gids.read().iter().flatten().any(|&bound| bound == gid)
    }

    /// The GID as it is bound here with another VLAN.
    #[cold]
    pub(crate) fn is_in_other_vlan(&self, gid: BoundGid) -> bool {
        self.gids.read().iter().flatten().any(|bound| bound.gid == gid.gid && bound.kind == gid.kind && *bound != gid)
    }

    /// The QP of this number.
    pub(crate) fn qp(&self, qpn: Qpn) -> Option<Arc<Qp>> {
        self.qps.read().get(&qpn.get())?.upgrade()
    }

    pub(crate) fn forget_qp(&self, qp: &Qp) {
        let mut qps = self.qps.write();
        if let Entry::Occupied(entry) = qps.entry(qp.qpn.get())
            && Weak::ptr_eq(entry.get(), &qp.me)
        {
            entry.remove();
        }
    }

    /// Keeps pages resident as the device's policy says. The refusal is in the log. `view` is of this adapter's memory.
    pub(crate) fn pin(&self, view: &DmaView<'_>, pages: &PageList) -> Option<PinGuard> {
        let refused = |error| log::warn!("{}: {error}", self.name);
        self.memory.pin_pages_of(view, pages).map_err(refused).ok()
    }

    fn set_gid(&self, index: u8, new: Option<BoundGid>) -> Result<(), VerbsError> {
        let fabric = &self.shared.fabric;
        let old = {
            let mut gids = self.gids.write();
            let slot = gids.get_mut(usize::from(index)).ok_or(VerbsError::Invalid("GID index"))?;
            if *slot == new {
                return Ok(());
            }
            if let Some(gid) = new {
                fabric.bind(gid, &self.me)?;
            }
            let old = std::mem::replace(slot, new);
            if let Some(gid) = old {
                fabric.unbind(gid, &self.me);
            }
            old
        };
        // Batches that looked the old binding up hold a view of this adapter's memory; later ones see the generation.
        if old.is_some() {
            self.memory.barrier();
        }
        Ok(())
    }
}

/// Protection domain.
#[derive(Debug)]
pub struct RxePd {
    pub(crate) id: u32,
    _permit: Permit,
}

/// One adapter. Dropping it takes its GIDs off the fabric; its QPs are inert from then on.
#[derive(Debug)]
pub struct RxeHca(pub(crate) Arc<Adapter>);

impl Hca for RxeHca {
    type Pd = RxePd;
    type Mr = RxeMr;
    type Cq = RxeCq;
    type Srq = RxeSrq;
    type Qp = RxeQp;

    fn limits(&self) -> HcaLimits {
        HcaLimits {
            max_qp: MAX_QP,
            max_qp_wr: 1 << 16,
            max_sge: 128,
            max_cq: MAX_CQ,
            max_cqe: 1 << 23,
            max_mr: MAX_MR,
            max_mr_size: 1 << 40,
            max_pd: MAX_PD,
            max_srq: MAX_SRQ,
            max_rd_atomic: MAX_RD_ATOMIC,
            atomics: true,
            memory_management: true,
        }
    }

    fn port(&self) -> PortAttributes {
        let active_mtu = self.0.port.as_ref().map_or(PORT_MTU, |port| port.path_mtu());
        PortAttributes { state: PortState::Active, max_mtu: PORT_MTU, active_mtu, max_message: MAX_MESSAGE }
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        if gid.is_zero() {
            return Err(VerbsError::Invalid("GID"));
        }
        if vlan.is_some_and(|vlan| !VLANS.contains(&vlan)) {
            return Err(VerbsError::Invalid("VLAN"));
        }
        // The VLAN of the port is not the guest's to leave.
        let vlan = self.0.port.as_ref().and_then(|port| port.vlan()).or(vlan);
        self.0.set_gid(index, Some(BoundGid { gid, kind, vlan }))
    }

    fn unbind_gid(&self, index: u8) {
        // The index of every u8 is in the table, and nothing is bound: this cannot fail.
        let _ = self.0.set_gid(index, None);
    }

    fn create_pd(&self) -> Result<RxePd, VerbsError> {
        let counts = &self.0.counts;
        let permit = Permit::take(&counts.pds, MAX_PD, "protection domain")?;
        Ok(RxePd { id: counts.next_pd.fetch_add(1, Ordering::Relaxed), _permit: permit })
    }

    fn register_mr(&self, pd: &RxePd, request: MrRequest) -> Result<RxeMr, VerbsError> {
        let mr = match request {
            MrRequest::User { start, length, pages, access } => {
                let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
                    return Err(VerbsError::Invalid("access rights"));
                }
                let pin = self.0.memory.pin_pages(&pages).map_err(|error| {
                    log::warn!("{}: {error}", self.0.name);
                    VerbsError::Exhausted("locked memory")
                })?;
                let region = Region::paged(start, length, access, pages).ok_or(VerbsError::Invalid("memory region"))?;
                Mr::fixed(pd.id, region, pin)
            }
            MrRequest::Dma { access } => Mr::fixed(pd.id, Region::dma(access), PinGuard::none()),
            MrRequest::FastRegister { max_pages } => Mr::fast(pd.id, max_pages),
        };
        let key = self.0.mrs.write().insert(mr)?;
        Ok(RxeMr::new(Arc::clone(&self.0), key))
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<RxeCq, VerbsError> {
        let permit = Permit::take(&self.0.counts.cqs, MAX_CQ, "completion queue")?;
        Ok(RxeCq(Arc::new(Cq::new(sink, permit))))
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<RxeSrq, VerbsError> {
        let permit = Permit::take(&self.0.counts.srqs, MAX_SRQ, "shared receive queue")?;
        let srq = Srq::new(Arc::clone(&self.0), init.cookie, init.pd.id, init.queue, init.limit, permit);
        Ok(RxeSrq(Arc::new(srq)))
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<RxeQp, VerbsError> {
        let qpn = match init.qp_type {
            QpType::Gsi => Qpn::GSI,
            QpType::Rc | QpType::Ud if init.qpn.get() <= Qpn::GSI.get() || init.qpn.get() == 0x00ff_ffff => {
                return Err(VerbsError::Invalid("QPN"));
            }
            QpType::Rc | QpType::Ud => init.qpn,
        };
        let mut qps = self.0.qps.write();
        let count = qps.len();
        match qps.entry(qpn.get()) {
            Entry::Occupied(entry) if entry.get().strong_count() > 0 => Err(VerbsError::InUse("QPN")),
            _ if count >= MAX_QP as usize => Err(VerbsError::Exhausted("queue pair")),
            entry => {
                let qp = Qp::new(Arc::clone(&self.0), qpn, init);
                entry.insert_entry(Weak::clone(&qp.me));
                Ok(RxeQp(qp))
            }
        }
    }

    fn counters(&self) -> Vec<Counter> {
        let mut list = self.0.counters.list();
        if let Some(port) = &self.0.port {
            list.extend(port.counts());
        }
        list
    }
}

impl Drop for RxeHca {
    fn drop(&mut self) {
        for index in 0..=u8::MAX {
            self.unbind_gid(index);
        }
        let qps: Vec<_> = self.0.qps.read().values().filter_map(Weak::upgrade).collect();
        for qp in qps {
            qp.destroy();
        }
    }
}
