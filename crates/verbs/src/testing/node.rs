//! A device on an adapter, with its memory and queue pairs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pvrdma_base::Random;
use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, MemoryBudget, PinPolicy};
use pvrdma_packet::MacAddr;
use pvrdma_pages::{PAGE_SIZE, PageList, PageListBuilder};
use pvrdma_verbs_types::{
    Access, AddressVector, Gid, GidType, Mtu, Psn, QpAttrMask, QpAttrs, QpCaps, QpState, QpType, Qpn, RecvWr,
    RemoteAddress, SendFlags, SendOp, SendWr, Sge,
};

use super::queues::Consumer;
use super::{ALL, Completions, Events, Ring, SEND, shared_memory};
use crate::context::DeviceContext;
use crate::error::VerbsError;
use crate::hca::{Backend, Hca, MemoryRegion, MrRequest, QpInit, QueuePair, SharedReceiveQueue, SrqInit, Station};
use crate::queue::{CompletionSink, EventSink, RecvSource};
use crate::rules::{AddressRule, Rules};
use crate::save::SaveHca;

/// First bus address of a node's memory.
const BASE: u64 = 0x1000_0000;
/// Size of a node's memory in bytes.
const MEMORY: u64 = 8 << 20;
/// Border between the two ranges of a node's memory.
pub const BORDER: u64 = BASE + MEMORY / 2;
/// First bus address of a node's buffers. It lies before the border, so that buffers cross it.
const BUFFERS: u64 = BORDER - 64 * PAGE_SIZE;
/// Requests in each ring.
const DEPTH: u32 = 64;

/// Returns the GID `::ffff:10.0.0.number`.
pub const fn gid(number: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, number])
}

/// Returns the MAC address of a node.
pub const fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number])
}

/// Function that runs an adapter which has no threads of its own.
pub type Drive = Arc<dyn Fn() + Send + Sync>;

/// A device.
#[expect(missing_debug_implementations, reason = "adapters' objects need not have it")]
pub struct Node<H: Hca> {
    /// Number of the node, which is part of its GID.
    pub number: u8,
    /// A protection domain.
    pub pd: H::Pd,
    /// The adapter.
    pub hca: H,
    /// Guest memory.
    pub memory: Arc<DmaSpace>,
    /// Its asynchronous events.
    pub events: Arc<Events>,
    /// Budget of the memory that it may make this process allocate.
    pub budget: Arc<MemoryBudget>,
    /// Called after each request that its queue pairs submit.
    pub drive: Option<Drive>,
    next_page: AtomicU64,
    buffers_end: u64,
    next_qpn: AtomicU32,
}

impl<H: Hca> Node<H> {
    /// Attaches a device with the GID of its number.
    ///
    /// # Panics
    /// The backend refuses.
    pub fn new<B: Backend<Hca = H>>(backend: &B, number: u8) -> Self {
        Self::with_memory(backend, number, MEMORY)
    }

    /// As [`Self::new`], with a memory of `bytes` bytes.
    ///
    /// # Panics
    /// The backend refuses.
    pub fn with_memory<B: Backend<Hca = H>>(backend: &B, number: u8, bytes: u64) -> Self {
        Self::on(backend, number, memory_of(bytes), BUFFERS..BASE + bytes)
    }

    /// As [`Self::with_memory`], with these rules, and without a GID.
    ///
    /// # Panics
    /// The backend refuses.
    pub fn with_rules<B: Backend<Hca = H>>(backend: &B, number: u8, bytes: u64, rules: Rules) -> Self {
        Self::attach(backend, number, memory_of(bytes), BUFFERS..BASE + bytes, rules, MemoryBudget::DEFAULT_LIMIT)
    }

    /// Attaches a device to this memory. The bus addresses `buffers` are for its buffers.
    ///
    /// # Panics
    /// The backend refuses.
    pub fn on<B: Backend<Hca = H>>(backend: &B, number: u8, memory: Arc<DmaSpace>, buffers: Range<u64>) -> Self {
        Self::with_budget(backend, number, memory, buffers, MemoryBudget::DEFAULT_LIMIT)
    }

    /// As [`Self::on`], with a limit of the memory that the device may make this process allocate.
    ///
    /// # Panics
    /// The backend refuses.
    pub fn with_budget<B: Backend<Hca = H>>(
        backend: &B,
        number: u8,
        memory: Arc<DmaSpace>,
        buffers: Range<u64>,
        limit: u64,
    ) -> Self {
        let rules = Rules::default().with_addresses(AddressRule::ANY);
        let node = Self::attach(backend, number, memory, buffers, rules, limit);
        node.hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
        node
    }

    fn attach<B: Backend<Hca = H>>(
        backend: &B,
        number: u8,
        memory: Arc<DmaSpace>,
        buffers: Range<u64>,
        rules: Rules,
        limit: u64,
    ) -> Self {
        let budget = MemoryBudget::new(limit);
        let events = Arc::new(Events::default());
        let sink: Arc<dyn EventSink> = Arc::clone(&events) as _;
        let context = DeviceContext::new(format!("node{number}"), Arc::clone(&memory), sink, Arc::clone(&budget))
            .with_random(Random::Seed(number.into()))
            .with_rules(rules);
        let hca = backend.station(mac(number)).unwrap().attach(context).unwrap();
        let pd = hca.create_pd().unwrap();
        let (next_page, next_qpn) = (AtomicU64::new(buffers.start), AtomicU32::new(0x100));
        Self { number, pd, hca, memory, events, budget, drive: None, next_page, buffers_end: buffers.end, next_qpn }
    }

    /// Allocates pages, in descending order, so that no two are adjacent in the list.
    ///
    /// # Panics
    /// There are not enough pages left.
    pub fn pages(&self, count: u64) -> Vec<u64> {
        let first = self.next_page.fetch_add((count + 1) * PAGE_SIZE, Ordering::SeqCst);
        assert!(first + count * PAGE_SIZE <= self.buffers_end, "the node's memory is used up");
        (0..count).rev().map(|i| first + i * PAGE_SIZE).collect()
    }

    /// Registers memory of `len` bytes that begins at byte `offset` of a page.
    pub fn buffer_at(&self, offset: u64, len: u64, access: Access) -> Buffer<H> {
        let pages = self.pages((offset + len).div_ceil(PAGE_SIZE).max(1));
        self.register(&self.pd, &pages, offset, len, access)
    }

    /// Registers memory with all rights.
    pub fn buffer(&self, len: u64) -> Buffer<H> {
        self.buffer_at(0, len, ALL)
    }

    /// Registers pages in a protection domain.
    ///
    /// # Panics
    /// The adapter refuses.
    pub fn register(&self, pd: &H::Pd, pages: &[u64], offset: u64, len: u64, access: Access) -> Buffer<H> {
        let start = 0x7f00_0000_0000 + pages[0] + offset;
        let request = MrRequest::User { start, length: len, pages: page_list(pages), access };
        let mr = self.hca.register_mr(pd, request).unwrap();
        Buffer { mr, start, len, offset, pages: pages.to_vec(), memory: Arc::clone(&self.memory) }
    }

    /// Creates a completion queue.
    ///
    /// # Panics
    /// The adapter refuses.
    pub fn cq(&self) -> (H::Cq, Arc<Completions>) {
        let sink = Arc::new(Completions::default());
        (self.hca.create_cq(Arc::clone(&sink) as Arc<dyn CompletionSink>).unwrap(), sink)
    }

    /// Creates a queue pair with its own completion queues.
    pub fn qp(&self, qp_type: QpType) -> End<H> {
        self.qp_with(qp_type, None, |_| {})
    }

    /// As [`Self::qp`], with a shared receive queue, and with the changes that `change` makes to the request.
    ///
    /// # Panics
    /// The adapter refuses.
    pub fn qp_with(&self, qp_type: QpType, srq: Option<&H::Srq>, change: impl FnOnce(&mut QpInit<'_, H>)) -> End<H> {
        self.qp_on(qp_type, srq, [None, None], change).unwrap()
    }

    /// As [`Self::qp_with`], with completion queues of the caller, for sends and receives.
    ///
    /// # Errors
    /// The adapter refuses.
    pub fn qp_on(
        &self,
        qp_type: QpType,
        srq: Option<&H::Srq>,
        cqs: [Option<&H::Cq>; 2],
        change: impl FnOnce(&mut QpInit<'_, H>),
    ) -> Result<End<H>, VerbsError> {
        let cookie = if qp_type == QpType::Gsi { 1 } else { self.next_qpn.fetch_add(1, Ordering::SeqCst) };
        let (sends, receives) = (Arc::new(Ring::default()), Arc::new(Ring::default()));
        let ((send_cq, scq), (recv_cq, rcq)) = (self.cq(), self.cq());
        let mut init = QpInit {
            cookie,
            qpn: Qpn::new(cookie),
            qp_type,
            pd: &self.pd,
            send_cq: cqs[0].unwrap_or(&send_cq),
            recv_cq: cqs[1].unwrap_or(&recv_cq),
            srq,
            send_queue: Box::new(Consumer(Arc::clone(&sends))),
            recv_queue: srq.is_none().then(|| Box::new(Consumer(Arc::clone(&receives))) as Box<dyn RecvSource>),
            caps: QpCaps { max_send_wr: DEPTH, max_recv_wr: DEPTH, max_send_sge: 4, max_recv_sge: 4 },
            signal_all: false,
        };
        change(&mut init);
        let cookie = init.cookie;
        let qp = self.hca.create_qp(init)?;
        let (node, drive) = (self.number, self.drive.clone());
        Ok(End { node, qp_type, qp, sends, receives, scq, rcq, cookie, drive, cqs: (send_cq, recv_cq) })
    }

    /// Restores a queue pair from the adapter's part of a saved one, with the rings and completions of `end`, whose QP
    /// is destroyed.
    ///
    /// # Errors
    /// The adapter refuses.
    pub fn restore(&self, end: End<H>, adapter: &[u8]) -> Result<End<H>, VerbsError>
    where
        H: SaveHca,
    {
        end.qp.destroy();
        let caps = QpCaps { max_send_wr: DEPTH, max_recv_wr: DEPTH, max_send_sge: 4, max_recv_sge: 4 };
        let init = QpInit {
            cookie: end.cookie,
            qpn: end.qp.qpn(),
            qp_type: end.qp_type,
            pd: &self.pd,
            send_cq: &end.cqs.0,
            recv_cq: &end.cqs.1,
            srq: None,
            send_queue: Box::new(Consumer(Arc::clone(&end.sends))),
            recv_queue: Some(Box::new(Consumer(Arc::clone(&end.receives)))),
            caps,
            signal_all: false,
        };
        let qp = self.hca.restore_qp(init, adapter)?;
        Ok(End { qp, ..end })
    }

    /// Creates a shared receive queue, with cookie 77.
    ///
    /// # Panics
    /// The adapter refuses.
    pub fn srq(&self, limit: u32) -> (H::Srq, Arc<Ring<RecvWr>>) {
        let ring = Arc::new(Ring::default());
        let queue = Box::new(Consumer(Arc::clone(&ring)));
        let init = SrqInit { cookie: 77, pd: &self.pd, queue, limit, max_wr: DEPTH, max_sge: 4 };
        (self.hca.create_srq(init).unwrap(), ring)
    }

    /// Returns the value of a counter of the adapter.
    ///
    /// # Panics
    /// The adapter has no counter of this name.
    pub fn counter(&self, name: &str) -> u64 {
        self.hca.counters().into_iter().find(|counter| counter.name == name).unwrap().value
    }
}

/// Creates a memory of `bytes` bytes.
fn memory_of(bytes: u64) -> Arc<DmaSpace> {
    let memory = DmaSpace::new(PinPolicy::Off);
    let mapping = shared_memory(usize::try_from(bytes).unwrap());
    // There are two ranges, so that copies cross a border.
    for (iova, end) in [(BASE, BORDER), (BORDER, BASE + bytes)] {
        let offset = usize::try_from(iova - BASE).unwrap();
        let backing = Some(Backing { mapping: Arc::clone(&mapping), offset });
        memory.map(DmaRange { iova, len: end - iova, writable: true, backing }).unwrap();
    }
    memory
}

/// Posts receives without memory to a shared queue.
pub fn post_shared<S: SharedReceiveQueue>(srq: &S, ring: &Ring<RecvWr>, wr_ids: Range<u64>) {
    ring.posted.lock().extend(wr_ids.map(|wr_id| RecvWr { wr_id, ..RecvWr::default() }));
    srq.notify_recv();
}

/// Returns the list of these pages.
///
/// # Panics
/// One of the addresses is not a page address.
pub fn page_list(pages: &[u64]) -> PageList {
    let mut list = PageListBuilder::default();
    for &page in pages {
        list.push(page).unwrap();
    }
    list.finish()
}

/// Registered memory.
#[expect(missing_debug_implementations, reason = "adapters' objects need not have it")]
pub struct Buffer<H: Hca> {
    /// Memory region.
    pub mr: H::Mr,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    offset: u64,
    pages: Vec<u64>,
    memory: Arc<DmaSpace>,
}

impl<H: Hca> Buffer<H> {
    /// Returns an SGE for a part of it.
    ///
    /// # Panics
    /// The part is longer than an SGE can be.
    pub fn sge(&self, offset: u64, length: u64) -> Sge {
        Sge { addr: self.start + offset, length: u32::try_from(length).unwrap(), lkey: self.mr.lkey() }
    }

    /// Returns an SGE for all of it.
    pub fn all(&self) -> Sge {
        self.sge(0, self.len)
    }

    /// Returns the address of a place in it, for a peer.
    pub fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { addr: self.start + offset, rkey: self.mr.rkey() }
    }

    /// Returns the bus addresses of the pieces of `offset..offset+len`.
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

    /// Writes to it as the guest's processor does.
    ///
    /// # Panics
    /// The bytes are outside of its memory.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let view = self.memory.view();
        let mut rest = data;
        for (bus, count) in self.pieces(offset, data.len() as u64) {
            view.write(bus, &rest[..count]).unwrap();
            rest = &rest[count..];
        }
    }

    /// Reads from it as the guest's processor does.
    ///
    /// # Panics
    /// The bytes are outside of its memory.
    pub fn read(&self, offset: u64, len: u64) -> Vec<u8> {
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

/// A QP with its queues.
#[expect(missing_debug_implementations, reason = "adapters' objects need not have it")]
pub struct End<H: Hca> {
    /// Number of its node.
    pub node: u8,
    /// Transport service.
    pub qp_type: QpType,
    /// The queue pair.
    pub qp: H::Qp,
    /// Send ring.
    pub sends: Arc<Ring<SendWr>>,
    /// Receive ring.
    pub receives: Arc<Ring<RecvWr>>,
    /// Completions of its sends.
    pub scq: Arc<Completions>,
    /// Completions of its receives.
    pub rcq: Arc<Completions>,
    /// Identifier in completions and events.
    pub cookie: u32,
    /// Called after each request.
    pub drive: Option<Drive>,
    /// Queues of `scq` and `rcq`.
    pub cqs: (H::Cq, H::Cq),
}

impl<H: Hca> End<H> {
    /// Posts a signaled request without a doorbell.
    pub fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post_with(wr_id, op, sges, SendFlags::SIGNALED);
    }

    /// As [`Self::post`], with any flags.
    pub fn post_with(&self, wr_id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) {
        self.sends.posted.lock().push_back(SendWr { wr_id, op, flags, sges: sges.to_vec() });
    }

    /// Posts a signaled request.
    pub fn submit(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post(wr_id, op, sges);
        self.qp.notify_send();
        if let Some(drive) = &self.drive {
            drive();
        }
    }

    /// Posts a signaled SEND.
    pub fn send(&self, wr_id: u64, sges: &[Sge]) {
        self.submit(wr_id, SEND, sges);
    }

    /// Posts a receive.
    pub fn recv(&self, wr_id: u64, sges: &[Sge]) {
        self.receives.posted.lock().push_back(RecvWr { wr_id, sges: sges.to_vec(), malformed: false });
        self.qp.notify_recv();
    }

    /// Returns the current state.
    pub fn state(&self) -> QpState {
        self.qp.query().state
    }

    /// Changes only the state.
    pub fn to(&self, state: QpState) {
        self.change(state, QpAttrs::default(), QpAttrMask::empty());
    }

    /// Changes state and attributes.
    ///
    /// # Panics
    /// The adapter refuses.
    pub fn change(&self, state: QpState, attrs: QpAttrs, mask: QpAttrMask) {
        self.qp.modify(&QpAttrs { state, ..attrs }, mask | QpAttrMask::STATE).unwrap();
    }

    /// Returns attributes for a connection to `peer`.
    pub fn toward(peer: &Self) -> QpAttrs {
        QpAttrs {
            dest_qpn: peer.qp.qpn(),
            av: AddressVector { dgid: gid(peer.node), dmac: mac(peer.node), hop_limit: 64, ..AddressVector::default() },
            access: ALL,
            path_mtu: Mtu::M1024,
            rq_psn: Psn::new(5),
            sq_psn: Psn::new(5),
            max_dest_rd_atomic: 8,
            max_rd_atomic: 8,
            min_rnr_timer: 12,
            port_num: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttrs::default()
        }
    }

    /// Moves a connected QP to RTR. `set` changes the attributes for this peer.
    pub fn rtr(&self, peer: &Self, set: impl FnOnce(&mut QpAttrs)) {
        self.rtr_with(&Self::attrs(peer, set));
    }

    /// Moves a connected QP to RTS. `set` changes the attributes for this peer.
    pub fn connect(&self, peer: &Self, set: impl FnOnce(&mut QpAttrs)) {
        use QpAttrMask as M;
        let attrs = Self::attrs(peer, set);
        self.rtr_with(&attrs);
        let mask = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
        self.change(QpState::Rts, attrs, mask);
    }

    fn attrs(peer: &Self, set: impl FnOnce(&mut QpAttrs)) -> QpAttrs {
        let mut attrs = Self::toward(peer);
        set(&mut attrs);
        attrs
    }

    fn rtr_with(&self, attrs: &QpAttrs) {
        use QpAttrMask as M;
        self.change(QpState::Init, *attrs, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
        let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.change(QpState::Rtr, *attrs, mask);
    }

    /// Moves a datagram QP to RTS.
    pub fn start_datagrams(&self, qkey: u32) {
        use QpAttrMask as M;
        let attrs = QpAttrs { qkey, port_num: 1, ..QpAttrs::default() };
        let port = if self.qp_type == QpType::Gsi { M::empty() } else { M::PORT };
        self.change(QpState::Init, attrs, M::PKEY_INDEX | M::QKEY | port);
        self.to(QpState::Rtr);
        self.change(QpState::Rts, attrs, M::SQ_PSN);
    }
}
