//! Devices without PCI: queues, sinks and guest memory for tests of the engine.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rdma_backend::memory::{Backing, DmaError, DmaRange, DmaSpace, DmaView, PAGE_SIZE, PageListBuilder, PinPolicy};
use rdma_backend::{
    Access, AddressVector, AsyncEvent, Backend, Completion, CompletionSink, CqOverrun, DeviceContext, EventSink, Gid,
    GidType, Hca, MacAddr, MemoryRegion, MrRequest, Mtu, Psn, QpAttrMask, QpAttrs, QpCaps, QpInit, QpState, QpType,
    Qpn, QueueError, QueuePair, RecvSource, RecvWork, RemoteAddress, SendData, SendFlags, SendOp, SendSource, SendWork,
    Sge, WcStatus,
};
use vm_memory::mmap::MmapRegion;

use crate::clock::{Clock, ManualClock};
use crate::link::fault::{FaultLink, Faults};
use crate::link::{Link, memory};
use crate::{PortConfig, Uplink};
use crate::{Rxe, RxeConfig, RxeCq, RxeHca, RxeMr, RxePd, RxeQp, RxeSrq};

/// First bus address of a node's memory.
const BASE: u64 = 0x1000_0000;
/// Octets of a node's memory.
const MEMORY: u64 = 256 << 20;

pub(crate) const ALL: Access = Access::all();

/// A ring that the "guest" fills.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    pub(crate) posted: Mutex<VecDeque<T>>,
    pub(crate) broken: AtomicU32,
    pub(crate) popped: AtomicU64,
    pub(crate) retired: AtomicU64,
    pub(crate) resets: AtomicU32,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self {
            posted: Mutex::default(),
            broken: AtomicU32::new(0),
            popped: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            resets: AtomicU32::new(0),
        }
    }
}

impl<T> Ring<T> {
    fn take(&self) -> Result<Option<T>, QueueError> {
        if self.broken.load(Ordering::SeqCst) != 0 {
            return Err(DmaError::Unmapped { addr: 0, len: 4 }.into());
        }
        let element = self.posted.lock().pop_front();
        self.popped.fetch_add(u64::from(element.is_some()), Ordering::SeqCst);
        Ok(element)
    }

    fn clear(&self) {
        self.posted.lock().clear();
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

struct Consumer<T>(Arc<Ring<T>>);

impl SendSource for Consumer<SendWork> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut SendWork) -> Result<bool, QueueError> {
        Ok(self.0.take()?.map(|element| *work = element).is_some())
    }

    fn retire(&mut self, _view: &DmaView<'_>) {
        let retired = self.0.retired.fetch_add(1, Ordering::SeqCst);
        assert!(retired < self.0.popped.load(Ordering::SeqCst), "retired more than was popped");
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

impl RecvSource for Consumer<RecvWork> {
    fn pop(&mut self, _view: &DmaView<'_>, work: &mut RecvWork) -> Result<bool, QueueError> {
        Ok(self.0.take()?.map(|element| *work = element).is_some())
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.posted.lock().len()).unwrap())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

/// A completion queue that keeps everything, up to its size.
#[derive(Debug)]
pub(crate) struct Completions {
    entries: Mutex<Vec<Completion>>,
    pub(crate) size: AtomicU32,
    pub(crate) total: AtomicU64,
}

impl Completions {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { entries: Mutex::default(), size: AtomicU32::new(u32::MAX), total: AtomicU64::new(0) })
    }

    /// Takes all entries.
    pub(crate) fn poll(&self) -> Vec<Completion> {
        std::mem::take(&mut *self.entries.lock())
    }

    /// Takes all entries as name and status.
    pub(crate) fn statuses(&self) -> Vec<(u64, WcStatus)> {
        self.poll().iter().map(|c| (c.wr_id, c.status)).collect()
    }

    /// Takes the only entry.
    pub(crate) fn one(&self) -> Completion {
        let entries = self.poll();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries[0]
    }
}

impl CompletionSink for Completions {
    fn complete(&self, _view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        let mut entries = self.entries.lock();
        if entries.len() >= self.size.load(Ordering::SeqCst) as usize {
            return Err(CqOverrun);
        }
        self.total.fetch_add(1, Ordering::SeqCst);
        entries.push(*completion);
        Ok(())
    }
}

/// Events as they came.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<AsyncEvent>>);

impl Events {
    pub(crate) fn poll(&self) -> Vec<AsyncEvent> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl EventSink for Events {
    fn event(&self, _view: &DmaView<'_>, event: AsyncEvent) {
        self.0.lock().push(event);
    }
}

thread_local! {
    static WIRE: Cell<Option<(Faults, u64)>> = const { Cell::new(None) };
}

/// Has every [`World`] that `test` makes consist of two backends, nodes of odd numbers on one and of even numbers on the
/// other, with nodes 1 and 2 connected by a cable with these faults.
pub(crate) fn on_the_wire(faults: Faults, seed: u64, test: impl FnOnce()) {
    WIRE.set(Some((faults, seed)));
    test();
    WIRE.set(None);
}

/// The Ethernet address of a node.
pub(crate) const fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number])
}

/// Octets of an IP packet on the cable.
const CABLE_MTU: u32 = 4500;

/// One backend with a clock that tests move.
pub(crate) struct World {
    pub(crate) rxe: Rxe,
    pub(crate) clock: Arc<ManualClock>,
    /// The other end of the cable, if there is one.
    pub(crate) far: Option<Rxe>,
    /// Keep the cable plugged in.
    pub(crate) _uplinks: Vec<Uplink>,
}

impl World {
    /// Nothing runs by itself.
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut RxeConfig)) -> Self {
        let clock = Arc::new(ManualClock::default());
        let mut config = RxeConfig { workers: 0, clock: Arc::clone(&clock) as Arc<dyn Clock>, ..RxeConfig::default() };
        change(&mut config);
        let rxe = Rxe::new(config.clone()).unwrap();
        let Some((faults, seed)) = WIRE.get() else { return Self { rxe, clock, far: None, _uplinks: Vec::new() } };
        let far = Rxe::new(config).unwrap();
        let (near_end, far_end) = memory::pair(100_000);
        let plug = |rxe: &Rxe, number, link, seed| {
            let uplink: Arc<dyn Link> = Arc::new(FaultLink::new(link, faults, seed));
            rxe.plug(mac(number), PortConfig { uplink, nic: None, mtu: CABLE_MTU }).unwrap()
        };
        let uplinks = vec![plug(&rxe, 1, near_end, seed * 2), plug(&far, 2, far_end, seed * 2 + 1)];
        Self { rxe, clock, far: Some(far), _uplinks: uplinks }
    }

    /// Both backends, or the one that there is.
    fn backends(&self) -> Vec<Rxe> {
        [Some(self.rxe.clone()), self.far.clone()].into_iter().flatten().collect()
    }

    pub(crate) fn node(&self, number: u8) -> Node {
        let memory = DmaSpace::new(PinPolicy::Off);
        let mapping = Arc::new(MmapRegion::new(usize::try_from(MEMORY).unwrap()).unwrap());
        // Two ranges, so that copies meet a border.
        let half = MEMORY / 2;
        for part in [0, half] {
            let backing = Some(Backing { mapping: Arc::clone(&mapping), offset: usize::try_from(part).unwrap() });
            memory.map(DmaRange { iova: BASE + part, len: half, writable: true, backing }).unwrap();
        }
        self.node_on(number, memory)
    }

    pub(crate) fn node_on(&self, number: u8, memory: Arc<DmaSpace>) -> Node {
        let events = Arc::new(Events::default());
        let rxe = self.far.as_ref().filter(|_| number.is_multiple_of(2)).unwrap_or(&self.rxe);
        let hca = rxe
            .attach(DeviceContext {
                name: format!("node{number}"),
                mac: mac(number),
                roce: GidType::RoceV2,
                memory: Arc::clone(&memory),
                events: Arc::clone(&events) as Arc<dyn EventSink>,
            })
            .unwrap();
        hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
        let pd = hca.create_pd().unwrap();
        Node {
            number,
            pd,
            hca,
            memory,
            events,
            wire: if self.far.is_some() { self.backends() } else { Vec::new() },
            next_page: AtomicU64::new(BASE + u64::from(number) * (16 << 20)),
            next_qpn: AtomicU32::new(0x100),
        }
    }

    /// Runs what is ready, then moves the clock to the next deadline, until nothing is left. Gives the time that passed.
    pub(crate) fn settle(&self) -> Duration {
        let start = self.clock.now();
        loop {
            run_all(&self.backends());
            let deadline = self.backends().iter().filter_map(Rxe::next_deadline).min();
            let Some(deadline) = deadline else { return self.clock.now() - start };
            self.clock.advance(deadline.saturating_sub(self.clock.now()));
        }
    }
}

/// Runs all backends until none has anything to do now.
fn run_all(backends: &[Rxe]) {
    while backends.iter().map(Rxe::run_ready).sum::<usize>() > 0 {}
}

/// `::ffff:10.0.0.number`
pub(crate) fn gid(number: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, number])
}

/// One device.
pub(crate) struct Node {
    pub(crate) number: u8,
    pub(crate) pd: RxePd,
    pub(crate) hca: RxeHca,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<Events>,
    /// What has to run for a packet to cross the cable and back.
    wire: Vec<Rxe>,
    next_page: AtomicU64,
    next_qpn: AtomicU32,
}

impl Node {
    /// Registered memory of `len` octets that begins `offset` octets into a page. Pages are in reverse order, so that none
    /// follows its neighbour.
    pub(crate) fn buffer_at(&self, offset: u64, len: u64, access: Access) -> Buffer {
        let count = (offset + len).div_ceil(PAGE_SIZE).max(1);
        let first = self.next_page.fetch_add((count + 1) * PAGE_SIZE, Ordering::SeqCst);
        let pages: Vec<u64> = (0..count).rev().map(|i| first + i * PAGE_SIZE).collect();
        self.register(&pages, offset, len, access)
    }

    pub(crate) fn buffer(&self, len: u64) -> Buffer {
        self.buffer_at(0, len, ALL)
    }

    /// As [`Self::buffer`], contiguous.
    pub(crate) fn flat(&self, len: u64) -> Buffer {
        let count = len.div_ceil(PAGE_SIZE);
        let first = self.next_page.fetch_add(count * PAGE_SIZE, Ordering::SeqCst);
        self.register(&(0..count).map(|i| first + i * PAGE_SIZE).collect::<Vec<_>>(), 0, len, ALL)
    }

    pub(crate) fn register(&self, pages: &[u64], offset: u64, len: u64, access: Access) -> Buffer {
        let start = 0x7f00_0000_0000 + pages[0] + offset;
        let mut list = PageListBuilder::default();
        for &page in pages {
            list.push(page).unwrap();
        }
        let request = MrRequest::User { start, length: len, pages: list.finish(), access };
        let mr = self.hca.register_mr(&self.pd, request).unwrap();
        Buffer { mr, start, len, offset, pages: pages.to_vec(), memory: Arc::clone(&self.memory) }
    }

    pub(crate) fn cq(&self) -> (RxeCq, Arc<Completions>) {
        let sink = Completions::new();
        (self.hca.create_cq(Arc::clone(&sink) as Arc<dyn CompletionSink>).unwrap(), sink)
    }

    pub(crate) fn qp(&self, qp_type: QpType) -> End {
        self.qp_with(qp_type, None, |_| {})
    }

    pub(crate) fn qp_with(
        &self,
        qp_type: QpType,
        srq: Option<&RxeSrq>,
        change: impl FnOnce(&mut QpInit<'_, RxeHca>),
    ) -> End {
        self.qp_on(qp_type, srq, (None, None), change)
    }

    /// With completion queues of the caller, for sends and receives.
    pub(crate) fn qp_on(
        &self,
        qp_type: QpType,
        srq: Option<&RxeSrq>,
        cqs: (Option<&RxeCq>, Option<&RxeCq>),
        change: impl FnOnce(&mut QpInit<'_, RxeHca>),
    ) -> End {
        let qpn = if qp_type == QpType::Gsi { 1 } else { self.next_qpn.fetch_add(1, Ordering::SeqCst) };
        let (sends, receives) = (Arc::new(Ring::default()), Arc::new(Ring::default()));
        let ((send_cq, scq), (recv_cq, rcq)) = (self.cq(), self.cq());
        let mut init = QpInit {
            cookie: qpn,
            qpn: Qpn::new(qpn),
            qp_type,
            pd: &self.pd,
            send_cq: cqs.0.unwrap_or(&send_cq),
            recv_cq: cqs.1.unwrap_or(&recv_cq),
            srq,
            send_queue: Box::new(Consumer(Arc::clone(&sends))),
            recv_queue: srq.is_none().then(|| Box::new(Consumer(Arc::clone(&receives))) as Box<dyn RecvSource>),
            caps: QpCaps::default(),
            signal_all: false,
        };
        change(&mut init);
        let qp = self.hca.create_qp(init).unwrap();
        End {
            wire: self.wire.clone(),
            node: self.number,
            qp,
            sends,
            receives,
            scq,
            rcq,
            cookie: qpn,
            _cqs: (send_cq, recv_cq),
        }
    }

    pub(crate) fn srq(&self, limit: u32) -> (RxeSrq, Arc<Ring<RecvWork>>) {
        let ring = Arc::new(Ring::default());
        let queue = Box::new(Consumer(Arc::clone(&ring)));
        let init = rdma_backend::SrqInit { cookie: 77, pd: &self.pd, queue, limit, max_wr: 64, max_sge: 4 };
        (self.hca.create_srq(init).unwrap(), ring)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.hca.counters().into_iter().find(|(n, _)| *n == name).unwrap().1
    }
}

/// Registered memory.
pub(crate) struct Buffer {
    pub(crate) mr: RxeMr,
    pub(crate) start: u64,
    pub(crate) len: u64,
    offset: u64,
    pages: Vec<u64>,
    memory: Arc<DmaSpace>,
}

impl Buffer {
    pub(crate) fn sge(&self, offset: u64, length: u64) -> Sge {
        Sge { addr: self.start + offset, length: u32::try_from(length).unwrap(), lkey: self.mr.lkey() }
    }

    pub(crate) fn all(&self) -> Sge {
        self.sge(0, self.len)
    }

    pub(crate) fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { addr: self.start + offset, rkey: self.mr.rkey() }
    }

    /// Bus addresses of the pieces behind `offset..offset+len`.
    fn pieces(&self, offset: u64, len: u64) -> Vec<(u64, usize)> {
        let mut pieces = Vec::new();
        let (mut at, end) = (self.offset + offset, self.offset + offset + len);
        while at < end {
            let count = (PAGE_SIZE - at % PAGE_SIZE).min(end - at);
            let page = self.pages[usize::try_from(at / PAGE_SIZE).unwrap()];
            pieces.push((page + at % PAGE_SIZE, usize::try_from(count).unwrap()));
            at += count;
        }
        pieces
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        let view = self.memory.view();
        let mut rest = data;
        for (bus, count) in self.pieces(offset, data.len() as u64) {
            view.write(bus, &rest[..count]).unwrap();
            rest = &rest[count..];
        }
    }

    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let view = self.memory.view();
        let mut data = vec![0; usize::try_from(len).unwrap()];
        let mut done = 0;
        for (bus, count) in self.pieces(offset, len) {
            view.read(bus, &mut data[done..done + count]).unwrap();
            done += count;
        }
        data
    }
}

/// A QP with everything that belongs to it.
pub(crate) struct End {
    pub(crate) node: u8,
    pub(crate) qp: RxeQp,
    pub(crate) sends: Arc<Ring<SendWork>>,
    pub(crate) receives: Arc<Ring<RecvWork>>,
    pub(crate) scq: Arc<Completions>,
    pub(crate) rcq: Arc<Completions>,
    pub(crate) cookie: u32,
    wire: Vec<Rxe>,
    _cqs: (RxeCq, RxeCq),
}

impl End {
    /// Posts a signaled request without a doorbell.
    pub(crate) fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let work = SendWork { wr_id, op, flags: SendFlags::SIGNALED, sges: sges.to_vec() };
        self.sends.posted.lock().push_back(work);
    }

    /// Posts a signaled request.
    pub(crate) fn submit(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post(wr_id, op, sges);
        self.qp.notify_send();
        // Local delivery is done by now.
        if !self.wire.is_empty() {
            run_all(&self.wire);
        }
    }

    pub(crate) fn send(&self, wr_id: u64, sges: &[Sge]) {
        self.submit(wr_id, SEND, sges);
    }

    pub(crate) fn recv(&self, wr_id: u64, sges: &[Sge]) {
        self.receives.posted.lock().push_back(RecvWork { wr_id, sges: sges.to_vec(), malformed: false });
        self.qp.notify_recv();
    }

    pub(crate) fn state(&self) -> QpState {
        self.qp.query().state
    }

    pub(crate) fn to(&self, state: QpState) {
        self.change(state, |_| {}, QpAttrMask::empty());
    }

    pub(crate) fn change(&self, state: QpState, set: impl FnOnce(&mut QpAttrs), mask: QpAttrMask) {
        let mut attrs = QpAttrs { state, ..QpAttrs::default() };
        set(&mut attrs);
        self.qp.modify(&attrs, mask | QpAttrMask::STATE).unwrap();
    }

    /// Brings a connected QP to RTR.
    pub(crate) fn rtr(&self, peer: &Self, set: impl Fn(&mut QpAttrs)) {
        use QpAttrMask as M;
        let mut attrs = peer_attrs(peer);
        set(&mut attrs);
        let set = |a: &mut QpAttrs, state| *a = QpAttrs { state, ..attrs };
        self.change(QpState::Init, |a| set(a, QpState::Init), M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
        self.change(
            QpState::Rtr,
            |a| set(a, QpState::Rtr),
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        );
    }

    /// Brings a connected QP to RTS.
    pub(crate) fn connect(&self, peer: &Self, set: impl Fn(&mut QpAttrs)) {
        use QpAttrMask as M;
        self.rtr(peer, &set);
        let mut attrs = peer_attrs(peer);
        set(&mut attrs);
        self.change(
            QpState::Rts,
            |a| *a = QpAttrs { state: QpState::Rts, ..attrs },
            M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
        );
    }

    /// Brings a datagram QP to RTS.
    pub(crate) fn start_datagrams(&self, qkey: u32) {
        use QpAttrMask as M;
        let port = if self.qp.qpn() == Qpn::GSI { M::empty() } else { M::PORT };
        let set = |a: &mut QpAttrs| (a.qkey, a.port_num) = (qkey, 1);
        self.change(QpState::Init, set, M::PKEY_INDEX | M::QKEY | port);
        self.to(QpState::Rtr);
        self.change(QpState::Rts, |_| {}, M::SQ_PSN);
    }
}

fn peer_attrs(peer: &End) -> QpAttrs {
    QpAttrs {
        dest_qpn: peer.qp.qpn(),
        av: AddressVector { dgid: gid(peer.node), dmac: mac(peer.node), hop_limit: 64, ..AddressVector::default() },
        access: ALL,
        path_mtu: Mtu::M1024,
        rq_psn: Psn::new(5),
        sq_psn: Psn::new(5),
        max_dest_rd_atomic: 16,
        max_rd_atomic: 16,
        min_rnr_timer: 12,
        port_num: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttrs::default()
    }
}

/// Two devices with a connected QP each.
pub(crate) struct Pair {
    pub(crate) world: World,
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) left: End,
    pub(crate) right: End,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(World::new(), |_| {}, |_| {})
    }

    /// `left` and `right` change the attributes of the two QPs.
    pub(crate) fn with(world: World, left: impl Fn(&mut QpAttrs), right: impl Fn(&mut QpAttrs)) -> Self {
        let (a, b) = (world.node(1), world.node(2));
        let pair = Self { left: a.qp(QpType::Rc), right: b.qp(QpType::Rc), world, a, b };
        pair.left.connect(&pair.right, left);
        pair.right.connect(&pair.left, right);
        pair
    }

    /// Runs everything to its end on virtual time.
    pub(crate) fn settle(&self) -> Duration {
        self.world.settle()
    }
}

pub(crate) const SEND: SendOp = SendOp::Send { data: SendData::None, to: None };

pub(crate) const fn write(remote: RemoteAddress) -> SendOp {
    SendOp::Write { remote, immediate: None }
}

/// Octets that differ from place to place.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

/// A send queue that stays empty.
pub(crate) fn queue() -> Box<dyn SendSource> {
    Box::new(Consumer(Arc::new(Ring::default())))
}
