//! Stand-ins for unit tests: an interrupt sink that takes notes, and an adapter that carries nothing but keeps books.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use pvrdma_verbs::{
    Backend, CompletionQueue, CompletionSink, Counter, DeviceContext, EventSink, Gid, GidType, Hca, HcaLimits,
    MemoryRegion, MrRequest, Mtu, PortAttributes, PortState, QpAttrMask, QpAttrs, QpInit, QpType, Qpn, QueuePair,
    SharedReceiveQueue, SrqInit, VerbsError, qp_state,
};

use crate::pci_function::InterruptSink;

/// Limits of an adapter that can do everything.
pub(crate) const LIMITS: HcaLimits = HcaLimits {
    max_qp: 65_536,
    max_qp_wr: 32_768,
    max_sge: 32,
    max_cq: 65_536,
    max_cqe: 1 << 22,
    max_mr: 1 << 20,
    max_mr_size: 1 << 40,
    max_pd: 1 << 20,
    max_srq: 65_536,
    max_rd_atomic: 16,
    atomics: true,
    memory_management: true,
};

/// Writes down what it is told.
#[derive(Debug, Default)]
pub(crate) struct RecordingSink(Mutex<Vec<String>>);

impl RecordingSink {
    /// What it was told since the last call.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }
}

impl InterruptSink for RecordingSink {
    fn msix(&self, vector: u16) {
        self.0.lock().push(format!("msix {vector}"));
    }

    fn intx(&self, asserted: bool) {
        self.0.lock().push(format!("intx {asserted}"));
    }
}

/// What the adapter was asked to do.
#[derive(Default)]
pub(crate) struct Books {
    calls: Mutex<Vec<String>>,
    /// Refuse whatever is made next.
    pub(crate) refuse: AtomicBool,
    pub(crate) port_down: AtomicBool,
    pub(crate) events: Mutex<Option<Arc<dyn EventSink>>>,
    /// The sinks of live CQs.
    pub(crate) sinks: Mutex<Vec<Arc<dyn CompletionSink>>>,
    next_key: AtomicU32,
}

impl Books {
    fn note(&self, call: String) {
        self.calls.lock().push(call);
    }

    /// Calls since the last time.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    fn make(&self, what: &'static str) -> Result<(), VerbsError> {
        if self.refuse.swap(false, Ordering::Relaxed) {
            return Err(VerbsError::Exhausted(what));
        }
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct NullBackend(pub(crate) Arc<Books>);

pub(crate) struct NullHca(Arc<Books>);

impl Backend for NullBackend {
    type Hca = NullHca;

    fn attach(&self, context: DeviceContext) -> Result<NullHca, VerbsError> {
        *self.0.events.lock() = Some(context.events);
        Ok(NullHca(Arc::clone(&self.0)))
    }
}

pub(crate) struct NullMr {
    books: Arc<Books>,
    key: u32,
}

pub(crate) struct NullCq;

impl CompletionQueue for NullCq {}

pub(crate) struct NullSrq {
    books: Arc<Books>,
    cookie: u32,
    limit: AtomicU32,
}

pub(crate) struct NullQp {
    books: Arc<Books>,
    cookie: u32,
    qpn: Qpn,
    qp_type: QpType,
    attrs: Mutex<QpAttrs>,
}

impl Hca for NullHca {
    type Pd = ();
    type Mr = NullMr;
    type Cq = NullCq;
    type Srq = NullSrq;
    type Qp = NullQp;

    fn limits(&self) -> HcaLimits {
        LIMITS
    }

    fn port(&self) -> PortAttributes {
        let state = if self.0.port_down.load(Ordering::Relaxed) { PortState::Down } else { PortState::Active };
        PortAttributes { state, max_mtu: Mtu::M4096, active_mtu: Mtu::M1024, max_message: 1 << 30 }
    }

    fn bind_gid_in_vlan(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        self.0.make("GID")?;
        let vlan = vlan.map_or(String::new(), |vlan| format!(" VLAN {vlan}"));
        self.0.note(format!("bind {index} {gid} {kind:?}{vlan}"));
        Ok(())
    }

    fn unbind_gid(&self, index: u8) {
        self.0.note(format!("unbind {index}"));
    }

    fn create_pd(&self) -> Result<(), VerbsError> {
        self.0.make("PD")
    }

    fn register_mr(&self, _pd: &(), request: MrRequest) -> Result<NullMr, VerbsError> {
        self.0.make("MR")?;
        let key = self.0.next_key.fetch_add(0x101, Ordering::Relaxed) + 0x101;
        self.0.note(match request {
            MrRequest::User { start, length, pages, access } => {
                format!("user MR {start:#x}+{length:#x} in {} pages, {access:?}", pages.pages())
            }
            MrRequest::Dma { access } => format!("DMA MR {access:?}"),
            MrRequest::FastRegister { max_pages } => format!("fast-register MR of {max_pages} pages"),
        });
        Ok(NullMr { books: Arc::clone(&self.0), key })
    }

    fn create_cq(&self, sink: Arc<dyn CompletionSink>) -> Result<NullCq, VerbsError> {
        self.0.make("CQ")?;
        self.0.sinks.lock().push(sink);
        Ok(NullCq)
    }

    fn create_srq(&self, init: SrqInit<'_, Self>) -> Result<NullSrq, VerbsError> {
        self.0.make("SRQ")?;
        Ok(NullSrq { books: Arc::clone(&self.0), cookie: init.cookie, limit: AtomicU32::new(init.limit) })
    }

    fn create_qp(&self, init: QpInit<'_, Self>) -> Result<NullQp, VerbsError> {
        self.0.make("QP")?;
        let QpInit { cookie, qpn, qp_type, .. } = init;
        let has_ring = init.recv_queue.is_some();
        self.0.note(format!("{qp_type:?} QP {cookie} {qpn}, own receives: {has_ring}, all: {}", init.signal_all));
        let attrs = Mutex::new(QpAttrs::default());
        Ok(NullQp { books: Arc::clone(&self.0), cookie, qpn, qp_type, attrs })
    }

    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

impl MemoryRegion for NullMr {
    fn lkey(&self) -> u32 {
        self.key
    }

    fn rkey(&self) -> u32 {
        self.key
    }

    fn destroy(&self) {
        self.books.note(format!("destroy MR {:#x}", self.key));
    }
}

impl SharedReceiveQueue for NullSrq {
    fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    fn notify_recv(&self) {
        self.books.note(format!("SRQ {} recv", self.cookie));
    }

    fn destroy(&self) {
        self.books.note(format!("destroy SRQ {}", self.cookie));
    }
}

impl QueuePair for NullQp {
    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        let mut current = self.attrs.lock();
        let to = if mask.contains(QpAttrMask::STATE) { attrs.state } else { current.state };
        qp_state::check(self.qp_type, current.state, to, mask)?;
        current.merge(attrs, mask);
        current.state = to;
        self.books.note(format!("QP {} {to:?}", self.cookie));
        Ok(())
    }

    fn query(&self) -> QpAttrs {
        *self.attrs.lock()
    }

    fn notify_send(&self) {
        self.books.note(format!("QP {} send", self.cookie));
    }

    fn notify_recv(&self) {
        self.books.note(format!("QP {} recv", self.cookie));
    }

    fn destroy(&self) {
        self.books.note(format!("destroy QP {}", self.cookie));
    }
}
