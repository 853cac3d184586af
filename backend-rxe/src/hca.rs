//! Adapters and their objects, as devices use them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pvrdma_base::{Counter, Snapshot};
use pvrdma_guest_memory::{Charge, Kept, PinGuard};
use pvrdma_pacing::PeerWindows;
use pvrdma_verbs::{
    CompletionSink, DeviceContext, Hca, HcaLimits, MemoryRegion, MrRequest, MrShape, Object, PortAttributes, QpInit,
    QueuePair, SendProgress, SrqInit, VerbsError,
};
use pvrdma_verbs_types::{Access, Gid, GidType, PortState, QpAttrMask, QpAttrs, QpType, Qpn};
use serde::Serialize;
use serde_json::Value;

use crate::adapter::Adapter;
use crate::bindings::{Bindings, WaitingGid};
use crate::cq::{Cq, RxeCq};
use crate::drive::Endpoint;
use crate::fabric::Fabric;
use crate::gid::{BoundGid, GidInspect};
use crate::iwarp::device::IwarpDevice;
use crate::limits::{MAX_CQ, MAX_PD, MAX_SRQ, PORT_MTU, VLANS, hca_limits};
use crate::mr::{Mr, Region};
use crate::path::directory::Node;
use crate::path::wire;
use crate::path::wire::receive::Inbox;
use crate::path::wire::sources::Sources;
use crate::place::Place;
use crate::port::PortInspect;
use crate::qp::flight::RECORDING;
use crate::qp::{Qp, QpParts};
use crate::quota::{Permit, Quota};
use crate::shared::Shared;
use crate::srq::{RxeSrq, Srq};

/// The adapter of a device. Dropping it removes its GIDs from the directory, and makes its QPs inert.
#[derive(Debug)]
pub struct RxeHca {
    pub(crate) node: Arc<Node<Endpoint>>,
    pub(crate) fabric: Arc<Fabric<Endpoint>>,
    bindings: Arc<Bindings>,
    /// Connections to iWARP peers.
    iwarp: Option<IwarpDevice>,
    pds: Quota,
    cqs: Quota,
    srqs: Quota,
    /// Number of the next protection domain. Domains are distinguished by their numbers alone, so numbers are never
    /// reused.
    next_pd: AtomicU64,
    /// Keeps the workers alive.
    shared: Arc<Shared>,
    /// Charge for the queues of its port.
    _queues: Option<Charge>,
}

/// Bytes charged for a queue pair beyond its own structs: entries in tables, timers, wait queues and SGE lists, and
/// heap overhead.
const QP_BESIDE: usize = 1024;

/// State of an adapter at one moment.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct HcaInspect {
    /// The bound entries of the GID table, with the VLAN of the port.
    gids: Snapshot<Vec<GidInspect>>,
    /// GIDs that the guest has bound and cannot use yet.
    waiting_gids: Snapshot<Vec<WaitingGid>>,
    /// Bytes of packets that are kept for later.
    kept_packet_bytes: u64,
    /// Port to other hosts, if the device is plugged in.
    port: Option<PortInspect>,
}

impl RxeHca {
    /// # Errors
    /// The budget of the device does not cover the queues of its port, or the thread of its iWARP connections cannot be
    /// started.
    pub(crate) fn new(context: DeviceContext, place: &Place, shared: Arc<Shared>) -> Result<Self, VerbsError> {
        let id = shared.next_adapter.fetch_add(1, Ordering::Relaxed);
        let port = place.port();
        let queues = port.as_ref().map(|port| context.budget.charge(Kept::Queues, port.most_bytes())).transpose()?;
        let packets = port.as_ref().map(|port| port.packet_rules()).unwrap_or_default();
        let (engine, captures) = (Arc::clone(&shared.engine), Arc::clone(&shared.captures));
        shared.addresses.join(place.mac, &context.rules.addresses);
        let node = Node::new(Adapter::new(id, context, place, engine, captures, packets)?);
        let directory = Arc::clone(&shared.directory);
        if let Some(port) = &port {
            let sources = || Sources::new(Arc::clone(&directory), Arc::clone(&shared.addresses), shared.local);
            port.attach(Arc::downgrade(&node) as _, || Box::new(Inbox::new(&node, sources())));
        }
        let own = Arc::clone(&node.adapter);
        let windows = PeerWindows::default();
        let bindings = Bindings::new(&node, &directory, &shared.addresses);
        let start = |meeting: &Arc<_>| IwarpDevice::start(&node, meeting, shared.threaded, &shared.iwarp);
        let iwarp = own.iwarp.as_ref().map(start).transpose()?;
        let fabric = Arc::new(Fabric { own, directory, local: shared.local, port, windows });
        Ok(Self {
            node,
            fabric,
            bindings,
            iwarp,
            pds: Quota::new(MAX_PD, "protection domain"),
            cqs: Quota::new(MAX_CQ, "completion queue"),
            srqs: Quota::new(MAX_SRQ, "shared receive queue"),
            next_pd: AtomicU64::new(0),
            shared,
            _queues: queues,
        })
    }

    /// Checks the access rights of a region of a process.
    pub(crate) fn check_access(access: Access) -> Result<(), VerbsError> {
        let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let allowed = !access.intersects(remote_change) || access.contains(Access::LOCAL_WRITE);
        if allowed { Ok(()) } else { Err(VerbsError::Invalid("access rights")) }
    }

    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.node.adapter
    }

    pub(crate) const fn bindings(&self) -> &Arc<Bindings> {
        &self.bindings
    }

    /// Returns how often another machine announced an address of the adapter from the adapter's MAC address.
    pub(crate) fn count_twins(&self) -> u64 {
        self.shared.addresses.twins(self.adapter().point.mac)
    }
}

impl RxeHca {
    /// Binds a GID that the device had bound when it was saved.
    pub(crate) fn restore_bound_gid(
        &self,
        index: u8,
        gid: Gid,
        kind: GidType,
        vlan: Option<u16>,
    ) -> Result<(), VerbsError> {
        self.bindings.restore(index, self.bound_gid(gid, kind, vlan)?)
    }

    fn bound_gid(&self, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<BoundGid, VerbsError> {
        if gid.is_zero() {
            return Err(VerbsError::Invalid("GID"));
        }
        if vlan.is_some_and(|vlan| !VLANS.contains(&vlan)) {
            return Err(VerbsError::Invalid("VLAN"));
        }
        Ok(BoundGid { gid, kind, vlan: self.shared.vlan.of_gid(vlan)? })
    }
}

impl Hca for RxeHca {
    type Pd = RxePd;
    type Mr = RxeMr;
    type Cq = RxeCq;
    type Srq = RxeSrq;
    type Qp = RxeQp;

    fn limits(&self) -> HcaLimits {
        hca_limits()
    }

    fn port(&self) -> PortAttributes {
        let active_mtu = self.fabric.port.as_ref().map_or(PORT_MTU, |port| port.path_mtu());
        let max_message = pvrdma_verbs_types::MAX_MESSAGE;
        let state = if self.adapter().is_link_up() { PortState::Active } else { PortState::Down };
        PortAttributes { state, max_mtu: PORT_MTU, active_mtu, max_message }
    }

    fn set_link(&self, up: bool) -> Result<bool, VerbsError> {
        let changed = self.fabric.directory.set_link(&self.node, up);
        if changed {
            self.bindings.set_link(up);
        }
        if let Some(port) = self.fabric.port.as_ref().filter(|_| changed) {
            port.set_link(up);
        }
        if changed && up && self.iwarp.is_some() {
            // Streams have stood still since the link went down.
            self.node.qps().iter().for_each(|endpoint| endpoint.qp().task().schedule());
        }
        Ok(changed)
    }

    fn set_uplink_mtu(&self, bytes: Option<u32>) -> bool {
        self.fabric.port.as_ref().is_some_and(|port| port.set_uplink_mtu(bytes))
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        self.bindings.bind(index, self.bound_gid(gid, kind, vlan)?)
    }

    fn unbind_gid(&self, index: u8) {
        self.bindings.unbind(index);
    }

    fn create_pd(&self) -> Result<RxePd, VerbsError> {
        let permit = self.pds.take()?;
        Ok(RxePd { id: self.next_pd.fetch_add(1, Ordering::Relaxed), _permit: permit })
    }

    fn register_mr(&self, pd: &RxePd, request: MrRequest) -> Result<RxeMr, VerbsError> {
        let adapter = self.adapter();
        let mr = match request {
            MrRequest::User { start, length, pages, access } => {
                Self::check_access(access)?;
                let pin = adapter.pin_alone(&pages)?;
                let region = Region::paged(start, length, access, pages).ok_or(VerbsError::Invalid("memory region"))?;
                Mr::fixed(pd.id, region, pin)
            }
            MrRequest::Dma { access } => Mr::fixed(pd.id, Region::dma(access), PinGuard::none()),
            MrRequest::FastRegister { max_pages } => Mr::fast(pd.id, max_pages),
        };
        let key = adapter.mrs.insert(mr)?;
        Ok(RxeMr { adapter: Arc::clone(adapter), key, destroyed: AtomicBool::new(false) })
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<RxeCq, VerbsError> {
        let permit = self.cqs.take()?;
        Ok(RxeCq(Arc::new(Cq::new(Arc::clone(self.adapter()), sink, permit))))
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<RxeSrq, VerbsError> {
        let permit = self.srqs.take()?;
        let srq = Srq::new(Arc::clone(self.adapter()), init.cookie, init.pd.id, init.queue, init.limit, permit);
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
        // A QP with an SRQ has no receive ring, even if the caller passed one.
        let srq = init.srq.map(|srq| Arc::clone(&srq.0));
        let recv_queue = init.recv_queue.filter(|_| srq.is_none());
        let parts = QpParts {
            adapter: Arc::clone(self.adapter()),
            qpn,
            qp_type: init.qp_type,
            pd: init.pd.id,
            cookie: init.cookie,
            signal_all: init.signal_all,
            max_send_sge: u8::try_from(init.caps.max_send_sge).unwrap_or(u8::MAX),
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            srq,
        };
        let fabric = Arc::clone(&self.fabric);
        let endpoint = self.node.insert(qpn, || Endpoint::new(parts, fabric, init.send_queue, recv_queue))?;
        Ok(RxeQp { endpoint, node: Arc::clone(&self.node) })
    }

    fn bytes_of(&self, object: Object) -> u64 {
        let bytes = match object {
            Object::Pd => 0,
            // Includes its slot in a table that may have doubled.
            Object::Mr => size_of::<Mr>() + 64,
            Object::Cq => size_of::<Cq>(),
            // Its list of waiters is charged with the QPs.
            Object::Srq(_) => size_of::<Srq>(),
            Object::Qp(caps) => {
                let wire = self.fabric.port.is_some().then(|| wire::first_bytes(caps.max_send_sge));
                size_of::<Endpoint>() + size_of::<Qp>() + RECORDING + QP_BESIDE + wire.unwrap_or(0)
            }
        };
        bytes as u64
    }

    fn counters(&self) -> Vec<Counter> {
        let mut list = self.adapter().counters.list();
        if let Some(port) = &self.fabric.port {
            list.extend(port.counts());
        }
        list
    }

    fn inspect(&self) -> Value {
        let adapter = self.adapter();
        let port = self.fabric.port.as_ref().map(|port| port.inspect());
        serde_json::to_value(HcaInspect {
            gids: adapter.gids.inspect(),
            waiting_gids: self.bindings.inspect(),
            kept_packet_bytes: adapter.packets.used(),
            port,
        })
        .unwrap_or_default()
    }
}

impl Drop for RxeHca {
    fn drop(&mut self) {
        self.bindings.end();
        for endpoint in self.node.qps() {
            endpoint.destroy(&self.node);
        }
        drop(self.iwarp.take());
        let complete = &mut *self.adapter().paused.change();
        if std::mem::take(complete) {
            // Requesters of other devices find out that their peer has gone.
            self.fabric.directory.resume(&self.node).values().for_each(|task| task.schedule());
        }
        self.shared.addresses.leave(self.adapter().point.mac);
    }
}

/// Protection domain.
#[derive(Debug)]
pub struct RxePd {
    pub(crate) id: u64,
    _permit: Permit,
}

#[cfg(test)]
impl RxeHca {
    /// Sets the number of domains that were created so far.
    pub(crate) fn count_domains(&self, count: u64) {
        self.next_pd.store(count, Ordering::Relaxed);
    }
}

/// A registered memory region. Dropping it ends the registration.
#[derive(Debug)]
pub struct RxeMr {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) key: u32,
    pub(crate) destroyed: AtomicBool,
}

impl MemoryRegion for RxeMr {
    fn lkey(&self) -> u32 {
        self.key
    }

    fn rkey(&self) -> u32 {
        self.key
    }

    fn shape(&self) -> Option<MrShape> {
        self.adapter.mrs.try_read()?.shape(self.key)
    }

    fn inspect(&self) -> Value {
        // `null` once the region is destroyed.
        let shown: Snapshot<_> = self.adapter.mrs.try_read().map(|mrs| mrs.inspect(self.key)).into();
        serde_json::to_value(shown).unwrap_or_default()
    }

    fn destroy(&self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Removing the region waits for every copy in flight. The pages are unpinned only after all locks are released.
        drop(self.adapter.mrs.remove(self.key));
    }
}

impl Drop for RxeMr {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A queue pair. Dropping it destroys the QP.
#[derive(Debug)]
pub struct RxeQp {
    pub(crate) endpoint: Arc<Endpoint>,
    node: Arc<Node<Endpoint>>,
}

impl QueuePair for RxeQp {
    fn qpn(&self) -> Qpn {
        self.endpoint.qp().qpn
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        self.endpoint.modify(attrs, mask)
    }

    fn query(&self) -> QpAttrs {
        self.endpoint.qp().query()
    }

    fn try_query(&self) -> Option<QpAttrs> {
        self.endpoint.qp().try_query()
    }

    fn notify_send(&self) {
        self.endpoint.run_inline();
    }

    fn notify_recv(&self) {
        self.endpoint.receive_posted();
    }

    fn inspect(&self) -> Value {
        serde_json::to_value(self.endpoint.inspect()).unwrap_or_default()
    }

    fn progress(&self) -> Option<SendProgress> {
        self.endpoint.progress()
    }

    fn destroy(&self) {
        self.endpoint.destroy(&self.node);
    }
}

impl Drop for RxeQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
