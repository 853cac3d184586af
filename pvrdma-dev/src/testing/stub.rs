//! A backend that does nothing by itself: the test takes requests from the rings and puts completions and events where it
//! wants, so that each step can be looked at.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use pvrdma_verbs::{
    AsyncEvent, Backend, Completion, CompletionQueue, CompletionSink, Counter, CqOverrun, DeviceContext, Gid, GidType,
    Hca, HcaLimits, MemoryRegion, MrRequest, Mtu, PortAttributes, PortState, QpAttrMask, QpAttrs, QpInit, QpState, Qpn,
    QueueError, QueuePair, RecvSource, RecvWr, SendSource, SendWr, SharedReceiveQueue, SrqInit, VerbsError,
};

/// Makes adapters that the test drives.
#[derive(Debug, Default)]
pub struct StubBackend {
    devices: Mutex<Vec<Arc<StubDevice>>>,
}

impl StubBackend {
    /// No device is attached.
    pub fn new() -> Self {
        Self::default()
    }

    /// The test's side of the adapter that was attached last.
    ///
    /// # Panics
    /// There is none.
    pub fn device(&self) -> Arc<StubDevice> {
        Arc::clone(self.devices.lock().last().expect("no device is attached"))
    }
}

impl Backend for StubBackend {
    type Hca = StubHca;

    fn attach(&self, context: DeviceContext) -> Result<StubHca, VerbsError> {
        let device = Arc::new(StubDevice {
            context,
            qps: Mutex::default(),
            srqs: Mutex::default(),
            next_key: AtomicU32::new(0x100),
        });
        self.devices.lock().push(Arc::clone(&device));
        Ok(StubHca(device))
    }
}

/// The test's side of an adapter.
#[derive(Debug)]
pub struct StubDevice {
    context: DeviceContext,
    qps: Mutex<HashMap<u32, Arc<QpShared>>>,
    srqs: Mutex<HashMap<u32, Arc<SrqShared>>>,
    next_key: AtomicU32,
}

struct QpShared {
    qpn: Qpn,
    send: Mutex<Option<Box<dyn SendSource>>>,
    recv: Mutex<Option<Box<dyn RecvSource>>>,
    send_cq: Arc<dyn CompletionSink>,
    recv_cq: Arc<dyn CompletionSink>,
    attrs: Mutex<QpAttrs>,
    sends_notified: AtomicUsize,
    recvs_notified: AtomicUsize,
}

impl std::fmt::Debug for QpShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QpShared").field("qpn", &self.qpn).finish_non_exhaustive()
    }
}

struct SrqShared {
    recv: Mutex<Option<Box<dyn RecvSource>>>,
    limit: AtomicU32,
    notified: AtomicUsize,
}

impl std::fmt::Debug for SrqShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SrqShared")
    }
}

impl StubDevice {
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

    /// Gives the slot of the oldest request back.
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

    /// Publishes on the queue for sends of a QP.
    ///
    /// # Errors
    /// It is full or dead.
    pub fn complete_send(&self, qp: u32, completion: &Completion) -> Result<(), CqOverrun> {
        self.qp(qp).send_cq.complete(&self.context.memory.view(), completion)
    }

    /// Publishes on the queue for receives of a QP.
    ///
    /// # Errors
    /// It is full or dead.
    pub fn complete_recv(&self, qp: u32, completion: &Completion) -> Result<(), CqOverrun> {
        self.qp(qp).recv_cq.complete(&self.context.memory.view(), completion)
    }

    /// Raises an asynchronous event.
    pub fn event(&self, event: AsyncEvent) {
        self.context.events.event(&self.context.memory.view(), event);
    }

    /// How often a QP was told of sends and of receives.
    pub fn notified(&self, qp: u32) -> (usize, usize) {
        let qp = self.qp(qp);
        (qp.sends_notified.load(Ordering::Relaxed), qp.recvs_notified.load(Ordering::Relaxed))
    }

    /// How often an SRQ was told of receives.
    pub fn srq_notified(&self, srq: u32) -> usize {
        self.srq(srq).notified.load(Ordering::Relaxed)
    }
}

/// The device's side of an adapter.
#[derive(Debug)]
pub struct StubHca(Arc<StubDevice>);

/// A completion queue.
#[expect(missing_debug_implementations, reason = "holds a trait object of the device")]
pub struct StubCq(Arc<dyn CompletionSink>);

impl CompletionQueue for StubCq {}

/// A memory region.
#[derive(Debug)]
pub struct StubMr(u32);

/// A shared receive queue.
#[derive(Debug)]
pub struct StubSrq(Arc<SrqShared>);

/// A queue pair.
#[derive(Debug)]
pub struct StubQp(Arc<QpShared>);

impl Hca for StubHca {
    type Pd = ();
    type Mr = StubMr;
    type Cq = StubCq;
    type Srq = StubSrq;
    type Qp = StubQp;

    fn limits(&self) -> HcaLimits {
        HcaLimits {
            max_qp: 65_536,
            max_qp_wr: 32_768,
            max_sge: 128,
            max_cq: 65_536,
            max_cqe: 1 << 20,
            max_mr: 1 << 20,
            max_mr_size: 1 << 40,
            max_pd: 1 << 20,
            max_srq: 65_536,
            max_rd_atomic: 16,
            atomics: true,
            memory_management: true,
        }
    }

    fn port(&self) -> PortAttributes {
        let (max_mtu, active_mtu) = (Mtu::M4096, Mtu::M1024);
        PortAttributes { state: PortState::Active, max_mtu, active_mtu, max_message: 1 << 30 }
    }

    fn bind_gid_in_vlan(&self, _: u8, _: Gid, _: GidType, _: Option<u16>) -> Result<(), VerbsError> {
        Ok(())
    }

    fn unbind_gid(&self, _index: u8) {}

    fn create_pd(&self) -> Result<(), VerbsError> {
        Ok(())
    }

    fn register_mr(&self, _pd: &(), _request: MrRequest) -> Result<StubMr, VerbsError> {
        Ok(StubMr(self.0.next_key.fetch_add(0x100, Ordering::Relaxed)))
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<StubCq, VerbsError> {
        Ok(StubCq(sink))
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<StubSrq, VerbsError> {
        let limit = AtomicU32::new(init.limit);
        let srq = Arc::new(SrqShared { recv: Mutex::new(Some(init.queue)), limit, notified: AtomicUsize::new(0) });
        self.0.srqs.lock().insert(init.cookie, Arc::clone(&srq));
        Ok(StubSrq(srq))
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<StubQp, VerbsError> {
        let qp = Arc::new(QpShared {
            qpn: init.qpn,
            send: Mutex::new(Some(init.send_queue)),
            recv: Mutex::new(init.recv_queue),
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            attrs: Mutex::default(),
            sends_notified: AtomicUsize::new(0),
            recvs_notified: AtomicUsize::new(0),
        });
        self.0.qps.lock().insert(init.cookie, Arc::clone(&qp));
        Ok(StubQp(qp))
    }

    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

impl MemoryRegion for StubMr {
    fn lkey(&self) -> u32 {
        self.0
    }

    fn rkey(&self) -> u32 {
        self.0
    }

    fn destroy(&self) {}
}

impl SharedReceiveQueue for StubSrq {
    fn set_limit(&self, limit: u32) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }

    fn limit(&self) -> u32 {
        self.0.limit.load(Ordering::Relaxed)
    }

    fn notify_recv(&self) {
        self.0.notified.fetch_add(1, Ordering::Relaxed);
    }

    fn destroy(&self) {
        self.0.recv.lock().take();
    }
}

impl QueuePair for StubQp {
    fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let mut current = self.0.attrs.lock();
        current.merge(attrs, mask);
        if mask.contains(QpAttrMask::STATE) {
            current.state = attrs.state;
            if attrs.state == QpState::Reset {
                if let Some(source) = &mut *self.0.send.lock() {
                    source.reset();
                }
                if let Some(source) = &mut *self.0.recv.lock() {
                    source.reset();
                }
            }
        }
        Ok(())
    }

    fn query(&self) -> QpAttrs {
        *self.0.attrs.lock()
    }

    fn notify_send(&self) {
        self.0.sends_notified.fetch_add(1, Ordering::Relaxed);
    }

    fn notify_recv(&self) {
        self.0.recvs_notified.fetch_add(1, Ordering::Relaxed);
    }

    fn destroy(&self) {
        self.0.send.lock().take();
        self.0.recv.lock().take();
    }
}
