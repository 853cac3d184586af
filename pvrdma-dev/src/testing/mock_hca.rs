//! A backend that is passive: the test takes requests from the rings and puts completions and events where it wants, so
//! that each step can be checked. It records the verbs that the device calls, and refuses on demand.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{
    AsyncEvent, Backend, CompletionQueue, CompletionSink, CqOverrun, DeviceContext, Hca, HcaLimits, MemoryRegion,
    MrRequest, MrShape, Object, PauseHca, PortAttributes, QpInit, QueueError, QueuePair, RecvSource, SendSource,
    SharedReceiveQueue, SrqInit, Station, VerbsError,
};
use pvrdma_verbs_types::{
    Completion, Gid, GidType, Mtu, PortState, QpAttrMask, QpAttrs, QpState, QpType, Qpn, RecvWr, SendWr, qp_state,
};

/// Limits of an adapter that supports everything.
pub const MOCK_LIMITS: HcaLimits = HcaLimits::NONE
    .with_max_qp(65_536)
    .with_max_qp_wr(32_768)
    .with_max_sge(128)
    .with_max_cq(65_536)
    .with_max_cqe(1 << 22)
    .with_max_mr(1 << 20)
    .with_max_mr_size(1 << 40)
    .with_max_pd(1 << 20)
    .with_max_srq(65_536)
    .with_max_rd_atomic(16)
    .with_atomics(true)
    .with_memory_management(true);

/// Backend whose adapters the test drives.
#[derive(Debug, Default)]
pub struct MockBackend {
    devices: Arc<Mutex<Vec<Arc<MockDevice>>>>,
}

/// A station at a [`MockBackend`].
#[derive(Debug)]
pub struct MockStation {
    devices: Arc<Mutex<Vec<Arc<MockDevice>>>>,
    mac: MacAddr,
}

impl MockBackend {
    /// Creates a backend without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the test's side of the adapter that was attached last.
    ///
    /// # Panics
    /// There is none.
    pub fn device(&self) -> Arc<MockDevice> {
        Arc::clone(self.devices.lock().last().expect("no device is attached"))
    }
}

impl Backend for MockBackend {
    type Hca = MockHca;
    type Station = MockStation;

    fn station(&self, mac: MacAddr) -> Result<MockStation, VerbsError> {
        Ok(MockStation { devices: Arc::clone(&self.devices), mac })
    }
}

impl Station for MockStation {
    type Hca = MockHca;

    fn mac(&self) -> MacAddr {
        self.mac
    }

    fn attach(&self, context: DeviceContext) -> Result<MockHca, VerbsError> {
        let device = Arc::new(MockDevice {
            context,
            qps: Mutex::default(),
            srqs: Mutex::default(),
            next_key: AtomicU32::new(0x101),
            calls: Mutex::default(),
            refuse: AtomicBool::new(false),
            port_down: AtomicBool::new(false),
            carries_less: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            cqs_armed: AtomicUsize::new(0),
        });
        self.devices.lock().push(Arc::clone(&device));
        Ok(MockHca(device))
    }
}

/// Test's side of an adapter.
#[derive(Debug)]
pub struct MockDevice {
    context: DeviceContext,
    qps: Mutex<HashMap<u32, Arc<QpShared>>>,
    srqs: Mutex<HashMap<u32, Arc<SrqShared>>>,
    pub(super) next_key: AtomicU32,
    /// Verbs in the order of the calls; notifications are counted instead.
    calls: Mutex<Vec<String>>,
    refuse: AtomicBool,
    port_down: AtomicBool,
    carries_less: AtomicBool,
    paused: AtomicBool,
    cqs_armed: AtomicUsize,
}

pub(super) struct QpShared {
    cookie: u32,
    qpn: Qpn,
    qp_type: QpType,
    pub(super) signal_all: bool,
    pub(super) send: Mutex<Option<Box<dyn SendSource>>>,
    pub(super) recv: Mutex<Option<Box<dyn RecvSource>>>,
    send_cq: Arc<dyn CompletionSink>,
    recv_cq: Arc<dyn CompletionSink>,
    pub(super) attrs: Mutex<QpAttrs>,
    sends_notified: AtomicUsize,
    recvs_notified: AtomicUsize,
}

impl std::fmt::Debug for QpShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QpShared").field("qpn", &self.qpn).finish_non_exhaustive()
    }
}

pub(super) struct SrqShared {
    cookie: u32,
    pub(super) recv: Mutex<Option<Box<dyn RecvSource>>>,
    limit: AtomicU32,
    notified: AtomicUsize,
}

impl std::fmt::Debug for SrqShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SrqShared")
    }
}

impl MockDevice {
    /// Returns the verbs called since the last time, one line each.
    pub fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    /// Makes the next create verb fail.
    pub fn refuse_next(&self) {
        self.refuse.store(true, Ordering::Relaxed);
    }

    /// Sets the port state that queries return. No event is raised.
    pub fn set_port_down(&self, down: bool) {
        self.port_down.store(down, Ordering::Relaxed);
    }

    fn log(&self, call: String) {
        self.calls.lock().push(call);
    }

    pub(super) fn create(&self, what: &'static str) -> Result<(), VerbsError> {
        if self.refuse.swap(false, Ordering::Relaxed) {
            return Err(VerbsError::Exhausted(what));
        }
        Ok(())
    }

    fn qp(&self, handle: u32) -> Arc<QpShared> {
        Arc::clone(self.qps.lock().get(&handle).expect("no such QP"))
    }

    fn srq(&self, handle: u32) -> Arc<SrqShared> {
        Arc::clone(self.srqs.lock().get(&handle).expect("no such SRQ"))
    }

    /// Takes a send request from a QP's ring.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn pop_send(&self, qp: u32) -> Result<Option<SendWr>, QueueError> {
        let mut work = SendWr::default();
        let view = self.context.memory.view();
        let qp = self.qp(qp);
        let mut source = qp.send.lock();
        Ok(source.as_mut().expect("destroyed").pop(&view, &mut work)?.then_some(work))
    }

    /// Returns the slot of the oldest request to the guest.
    pub fn retire(&self, qp: u32) {
        let view = self.context.memory.view();
        self.qp(qp).send.lock().as_mut().expect("destroyed").retire(&view);
    }

    /// Takes a receive request from a QP's ring.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn pop_recv(&self, qp: u32) -> Result<Option<RecvWr>, QueueError> {
        self.pop_from(&self.qp(qp).recv)
    }

    /// Takes a receive request from a shared ring.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn pop_shared(&self, srq: u32) -> Result<Option<RecvWr>, QueueError> {
        self.pop_from(&self.srq(srq).recv)
    }

    fn pop_from(&self, source: &Mutex<Option<Box<dyn RecvSource>>>) -> Result<Option<RecvWr>, QueueError> {
        let mut work = RecvWr::default();
        let view = self.context.memory.view();
        Ok(source.lock().as_mut().expect("no ring").pop(&view, &mut work)?.then_some(work))
    }

    /// Publishes a completion to the send CQ of a QP.
    ///
    /// # Errors
    /// The queue is full or dead.
    pub fn complete_send(&self, qp: u32, completion: &Completion) -> Result<(), CqOverrun> {
        self.qp(qp).send_cq.complete(&self.context.memory.view(), completion)
    }

    /// Publishes a completion to the receive CQ of a QP.
    ///
    /// # Errors
    /// The queue is full or dead.
    pub fn complete_recv(&self, qp: u32, completion: &Completion) -> Result<(), CqOverrun> {
        self.qp(qp).recv_cq.complete(&self.context.memory.view(), completion)
    }

    /// Raises an asynchronous event.
    pub fn event(&self, event: AsyncEvent) {
        self.context.events.event(&self.context.memory.view(), event);
    }

    /// Returns how often a QP was notified of sends and of receives.
    pub fn notified(&self, qp: u32) -> (usize, usize) {
        let qp = self.qp(qp);
        (qp.sends_notified.load(Ordering::Relaxed), qp.recvs_notified.load(Ordering::Relaxed))
    }

    /// Returns how often completion queues were told that their guest will not poll before it is notified.
    pub fn cqs_armed(&self) -> usize {
        self.cqs_armed.load(Ordering::Relaxed)
    }

    /// Returns how often an SRQ was notified of receives.
    pub fn srq_notified(&self, srq: u32) -> usize {
        self.srq(srq).notified.load(Ordering::Relaxed)
    }
}

/// Device's side of an adapter.
#[derive(Debug)]
pub struct MockHca(pub(super) Arc<MockDevice>);

/// A completion queue.
#[expect(missing_debug_implementations, reason = "holds a trait object of the device")]
pub struct MockCq {
    device: Arc<MockDevice>,
    sink: Arc<dyn CompletionSink>,
}

impl CompletionQueue for MockCq {
    fn notify_arm(&self) {
        self.device.cqs_armed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A memory region.
#[derive(Debug)]
pub struct MockMr {
    device: Arc<MockDevice>,
    pub(super) key: u32,
    shape: MrShape,
    /// Request that creates such a region.
    pub(super) saved: MrRequest,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct MockSrq {
    device: Arc<MockDevice>,
    pub(super) shared: Arc<SrqShared>,
}

/// A queue pair.
#[derive(Debug)]
pub struct MockQp {
    device: Arc<MockDevice>,
    pub(super) shared: Arc<QpShared>,
}

/// Pausing has no effect on requests that the test completes itself.
impl PauseHca for MockHca {
    fn pause(&self) -> bool {
        !self.0.paused.swap(true, Ordering::SeqCst)
    }

    fn resume(&self) -> bool {
        self.0.paused.swap(false, Ordering::SeqCst)
    }

    fn is_paused(&self) -> bool {
        self.0.paused.load(Ordering::SeqCst)
    }
}

impl Hca for MockHca {
    type Pd = ();
    type Mr = MockMr;
    type Cq = MockCq;
    type Srq = MockSrq;
    type Qp = MockQp;

    fn limits(&self) -> HcaLimits {
        MOCK_LIMITS
    }

    fn port(&self) -> PortAttributes {
        let carries_less = self.0.carries_less.load(Ordering::Relaxed);
        let (max_mtu, active_mtu) = (Mtu::M4096, if carries_less { Mtu::M512 } else { Mtu::M1024 });
        let state = if self.0.port_down.load(Ordering::Relaxed) { PortState::Down } else { PortState::Active };
        PortAttributes { state, max_mtu, active_mtu, max_message: 1 << 30 }
    }

    fn set_link(&self, up: bool) -> Result<bool, VerbsError> {
        Ok(self.0.port_down.swap(!up, Ordering::Relaxed) == up)
    }

    fn set_uplink_mtu(&self, bytes: Option<u32>) -> bool {
        let less = bytes.is_some_and(|bytes| bytes < 1500);
        self.0.carries_less.swap(less, Ordering::Relaxed) != less
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        self.0.create("GID")?;
        let vlan = vlan.map_or_else(String::new, |vlan| format!(" VLAN {vlan}"));
        self.0.log(format!("bind {index} {gid} {kind:?}{vlan}"));
        Ok(())
    }

    fn unbind_gid(&self, index: u8) {
        self.0.log(format!("unbind {index}"));
    }

    fn create_pd(&self) -> Result<(), VerbsError> {
        self.0.create("PD")
    }

    fn register_mr(&self, _pd: &(), request: MrRequest) -> Result<MockMr, VerbsError> {
        self.0.create("MR")?;
        let (line, shape) = match request {
            MrRequest::User { start, length, ref pages, access } => {
                let line = format!("user MR {start:#x}+{length:#x} in {} pages, {access:?}", pages.pages());
                (line, MrShape::User { start, length, access })
            }
            MrRequest::Dma { access } => (format!("DMA MR {access:?}"), MrShape::Dma { access }),
            MrRequest::FastRegister { max_pages } => {
                (format!("fast-register MR of {max_pages} pages"), MrShape::fast_register(max_pages))
            }
        };
        self.0.log(line);
        let key = self.0.next_key.fetch_add(0x101, Ordering::Relaxed);
        Ok(MockMr { device: Arc::clone(&self.0), shape, key, saved: request })
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<MockCq, VerbsError> {
        self.0.create("CQ")?;
        Ok(MockCq { device: Arc::clone(&self.0), sink })
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<MockSrq, VerbsError> {
        self.0.create("SRQ")?;
        let (cookie, limit) = (init.cookie, AtomicU32::new(init.limit));
        let srq = SrqShared { cookie, recv: Mutex::new(Some(init.queue)), limit, notified: AtomicUsize::new(0) };
        let shared = Arc::new(srq);
        self.0.srqs.lock().insert(cookie, Arc::clone(&shared));
        Ok(MockSrq { device: Arc::clone(&self.0), shared })
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<MockQp, VerbsError> {
        self.0.create("QP")?;
        let QpInit { cookie, qpn, qp_type, .. } = init;
        let own_receives = init.recv_queue.is_some();
        self.0.log(format!("{qp_type:?} QP {cookie} {qpn}, own receives: {own_receives}, all: {}", init.signal_all));
        let shared = Arc::new(QpShared {
            cookie,
            qpn,
            qp_type,
            signal_all: init.signal_all,
            send: Mutex::new(Some(init.send_queue)),
            recv: Mutex::new(init.recv_queue),
            send_cq: Arc::clone(&init.send_cq.sink),
            recv_cq: Arc::clone(&init.recv_cq.sink),
            attrs: Mutex::default(),
            sends_notified: AtomicUsize::new(0),
            recvs_notified: AtomicUsize::new(0),
        });
        self.0.qps.lock().insert(cookie, Arc::clone(&shared));
        Ok(MockQp { device: Arc::clone(&self.0), shared })
    }

    fn bytes_of(&self, _object: Object) -> u64 {
        0
    }

    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

impl MemoryRegion for MockMr {
    fn shape(&self) -> Option<MrShape> {
        Some(self.shape)
    }

    fn lkey(&self) -> u32 {
        self.key
    }

    fn rkey(&self) -> u32 {
        self.key
    }

    fn destroy(&self) {
        self.device.log(format!("destroy MR {:#x}", self.key));
    }
}

impl SharedReceiveQueue for MockSrq {
    fn set_limit(&self, limit: u32) {
        self.shared.limit.store(limit, Ordering::Relaxed);
    }

    fn limit(&self) -> u32 {
        self.shared.limit.load(Ordering::Relaxed)
    }

    fn notify_recv(&self) {
        self.shared.notified.fetch_add(1, Ordering::Relaxed);
    }

    fn destroy(&self) {
        self.device.log(format!("destroy SRQ {}", self.shared.cookie));
        self.shared.recv.lock().take();
    }
}

impl QueuePair for MockQp {
    fn qpn(&self) -> Qpn {
        self.shared.qpn
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let mut current = self.shared.attrs.lock();
        let to = if mask.contains(QpAttrMask::STATE) { attrs.state } else { current.state };
        qp_state::check(self.shared.qp_type, current.state, to, mask)?;
        current.merge(attrs, mask);
        current.state = to;
        self.device.log(format!("QP {} {to:?}", self.shared.cookie));
        if mask.contains(QpAttrMask::STATE) && to == QpState::Reset {
            if let Some(source) = &mut *self.shared.send.lock() {
                source.reset();
            }
            if let Some(source) = &mut *self.shared.recv.lock() {
                source.reset();
            }
        }
        Ok(())
    }

    fn query(&self) -> QpAttrs {
        *self.shared.attrs.lock()
    }

    fn notify_send(&self) {
        self.shared.sends_notified.fetch_add(1, Ordering::Relaxed);
    }

    fn notify_recv(&self) {
        self.shared.recvs_notified.fetch_add(1, Ordering::Relaxed);
    }

    fn destroy(&self) {
        self.device.log(format!("destroy QP {}", self.shared.cookie));
        self.shared.send.lock().take();
        self.shared.recv.lock().take();
    }
}
