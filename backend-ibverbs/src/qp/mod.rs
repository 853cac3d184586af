//! Queue pairs.
//!
//! The host's QP is in RESET, INIT, RTR, RTS or ERROR. The states in between are ours: in SQD requests are left in the guest's
//! ring while those that were posted end, in SQE they are flushed.

mod complete;
mod modify;
pub(crate) mod recv;
mod send;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock};
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    AsyncEvent, Completion, QpAttrMask, QpAttrs, QpEvent, QpInit, QpState, QpType, Qpn, QueuePair, VerbsError,
    WcOpcode, WcStatus,
};

use crate::adapter::Adapter;
use crate::cq::Cq;
use crate::gsi::Gsi;
use crate::hca::IbvHca;
use crate::inflight::{RecvInflight, SendInflight};
use crate::srq::Srq;
use crate::sys::{QPT_RC, QPT_UD, QpCap};
use crate::verbs::{HostPd, HostQp, HostQpInit};
use recv::RecvSide;
use send::SendSide;

/// Elements flushed in one go: a guest that posts as fast as we flush does not keep us for ever.
const FLUSH_BUDGET: usize = 1 << 16;

/// A queue pair of the host and the guest's rings behind it.
pub(crate) struct Qp {
    adapter: Arc<Adapter>,
    pd: Arc<HostPd>,
    cookie: u32,
    qp_type: QpType,
    qpn: Qpn,
    address: usize,
    signal_all: bool,
    /// Sends that may be under way.
    depth: usize,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    /// Completions that it may cause in each queue.
    reserved: [u32; 2],
    attrs: Mutex<QpAttrs>,
    state: AtomicU8,
    /// `None` when it was destroyed.
    send: Mutex<Option<SendSide>>,
    /// `None` with a shared receive queue, and when it was destroyed.
    recv: Mutex<Option<RecvSide>>,
    host: RwLock<Option<Arc<HostQp>>>,
    send_inflight: Mutex<SendInflight>,
    recv_inflight: Mutex<RecvInflight>,
    /// Nothing may be published. Changed with both of the above held.
    muted: AtomicBool,
    /// Work was left because something is under way.
    send_waits: AtomicBool,
    recv_waits: AtomicBool,
    /// The host's QP is to go to its error state.
    failing: AtomicBool,
    /// SQD was asked for with a notification.
    notify_drained: AtomicBool,
    /// Events that come once in a life.
    last_wqe: AtomicBool,
    /// Largest datagram.
    datagram: AtomicU32,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("type", &self.qp_type).finish_non_exhaustive()
    }
}

impl Qp {
    pub(crate) fn create(adapter: &Arc<Adapter>, init: QpInit<'_, IbvHca>) -> Result<Arc<Self>, VerbsError> {
        let caps = init.caps;
        let srq = init.srq.map(|srq| Arc::clone(&srq.0));
        let max_recv_wr = if srq.is_some() { 0 } else { caps.max_recv_wr.max(1) };
        let max_send_wr = caps.max_send_wr.max(1);
        let (send_cq, recv_cq) = (Arc::clone(&init.send_cq.0), Arc::clone(&init.recv_cq.0));
        let reserved = [max_send_wr, srq.as_ref().map_or(max_recv_wr, |srq| srq.max_wr)];
        send_cq.reserve(reserved[0])?;
        recv_cq.reserve(reserved[1]).inspect_err(|_| send_cq.release(reserved[0]))?;
        let pd = Arc::clone(&init.pd.0);
        let made = Self::make_host(
            &pd,
            &send_cq,
            &recv_cq,
            srq.as_deref(),
            init.qp_type,
            QpCap {
                max_send_wr,
                max_recv_wr,
                max_send_sge: caps.max_send_sge.max(1),
                max_recv_sge: if srq.is_some() { 0 } else { caps.max_recv_sge.max(1) },
                max_inline_data: 0,
            },
        );
        let host = made.inspect_err(|_| {
            send_cq.release(reserved[0]);
            recv_cq.release(reserved[1]);
        })?;
        let qpn = Qpn::new(host.number());
        let qp = Arc::new(Self {
            adapter: Arc::clone(adapter),
            pd,
            cookie: init.cookie,
            qp_type: init.qp_type,
            qpn,
            address: host.address(),
            signal_all: init.signal_all,
            depth: max_send_wr as usize,
            send_cq,
            recv_cq,
            srq,
            reserved,
            attrs: Mutex::default(),
            state: AtomicU8::new(QpState::Reset as u8),
            send: Mutex::new(Some(SendSide::new(init.send_queue))),
            recv: Mutex::new(init.recv_queue.map(RecvSide::new)),
            host: RwLock::new(Some(Arc::new(host))),
            send_inflight: Mutex::new(SendInflight::new()),
            recv_inflight: Mutex::new(RecvInflight::new(max_recv_wr)),
            muted: AtomicBool::new(false),
            send_waits: AtomicBool::new(false),
            recv_waits: AtomicBool::new(false),
            failing: AtomicBool::new(false),
            notify_drained: AtomicBool::new(false),
            last_wqe: AtomicBool::new(false),
            datagram: AtomicU32::new(0),
        });
        adapter.qps.write().insert(qpn.get(), Arc::downgrade(&qp));
        Ok(qp)
    }

    fn make_host(
        pd: &Arc<HostPd>,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        qp_type: QpType,
        cap: QpCap,
    ) -> Result<HostQp, VerbsError> {
        let srq = srq.map(|srq| srq.host().ok_or(VerbsError::Gone)).transpose()?;
        Ok(HostQp::new(HostQpInit {
            pd: Arc::clone(pd),
            send_cq: Arc::clone(&send_cq.host),
            recv_cq: Arc::clone(&recv_cq.host),
            srq,
            cap,
            qp_type: if qp_type == QpType::Rc { QPT_RC } else { QPT_UD },
        })?)
    }

    /// Names it in the host's events.
    pub(crate) const fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn uses(&self, cq: &Cq) -> bool {
        std::ptr::eq(&raw const *self.send_cq, cq) || std::ptr::eq(&raw const *self.recv_cq, cq)
    }

    fn host(&self) -> Option<Arc<HostQp>> {
        self.host.read().clone()
    }

    fn state(&self) -> QpState {
        QpState::try_from(u32::from(self.state.load(Ordering::Acquire))).unwrap_or(QpState::Error)
    }

    fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Whether this is the change that brings it to the error state. RESET stays.
    fn set_error(&self) -> bool {
        let error = QpState::Error as u8;
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                (old != error && old != QpState::Reset as u8).then_some(error)
            })
            .is_ok()
    }

    fn is_muted(&self) -> bool {
        self.muted.load(Ordering::Acquire)
    }

    fn mute(&self, muted: bool) {
        let _send = self.send_inflight.lock();
        let _recv = self.recv_inflight.lock();
        self.muted.store(muted, Ordering::Release);
    }

    fn event(&self, view: &DmaView<'_>, event: QpEvent) {
        self.adapter.events.event(view, AsyncEvent::Qp(event, self.cookie));
    }

    /// The host says something of it.
    pub(crate) fn host_event(&self, event: QpEvent) {
        {
            let view = self.adapter.memory.view();
            let inflight = self.send_inflight.lock();
            let repeated = event == QpEvent::LastWqeReached && self.last_wqe.swap(true, Ordering::AcqRel);
            // Draining is ours, and so are its events.
            if self.is_muted() || repeated || event == QpEvent::SendQueueDrained {
                return;
            }
            self.event(&view, event);
            drop(inflight);
        }
        if matches!(event, QpEvent::Fatal | QpEvent::RequestError | QpEvent::AccessError) {
            self.set_error();
            self.kick();
        }
    }

    /// Goes on where something waited, or flushes.
    pub(crate) fn kick(&self) {
        self.run_send();
        if self.failing.swap(false, Ordering::AcqRel) {
            self.stop_host();
        }
        match &self.srq {
            Some(srq) => srq.run(),
            None => self.run_recv(),
        }
    }

    /// Brings the host's QP to its error state.
    fn stop_host(&self) {
        if let Some(host) = self.host() {
            modify::to_error(&self.adapter, &host);
        }
    }

    /// Posts receives, or flushes them.
    fn run_recv(&self) {
        // The side first: who ends the QP takes the host's object and then waits for us to be done with it.
        let mut guard = self.recv.lock();
        let Some(side) = guard.as_mut() else { return };
        let Some(host) = self.host() else { return };
        loop {
            let view = self.adapter.memory.view();
            match self.state() {
                QpState::Reset => return,
                QpState::Error => return self.flush_recv(&view, side),
                QpState::Init | QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => {}
            }
            // First: a completion from here on is one more reason to look.
            self.recv_waits.store(true, Ordering::SeqCst);
            match side.fill(&self.adapter, &view, &self.pd, &self.recv_inflight) {
                Ok(0) => {
                    if self.recv_inflight.lock().has_room() {
                        self.recv_waits.store(false, Ordering::SeqCst);
                    }
                    return;
                }
                Ok(_) => {}
                Err(error) => return self.broken_ring(&view, &error),
            }
            let (refused, result) = side.post(&self.adapter, |batch| host.post_recv(batch), &self.recv_inflight);
            if let Err(error) = result {
                log::warn!("{}: the host takes no receive for QP {}: {error}", self.adapter.name, self.qpn);
                self.set_error();
                self.failing.store(true, Ordering::Release);
                for wr_id in refused {
                    self.publish_recv(&view, wr_id, WcStatus::Flushed);
                }
            }
            drop(view);
            if self.failing.swap(false, Ordering::AcqRel) {
                modify::to_error(&self.adapter, &host);
            }
        }
    }

    fn publish_recv(&self, view: &DmaView<'_>, wr_id: u64, status: WcStatus) {
        let _flight = self.recv_inflight.lock();
        if !self.is_muted() {
            let completion = Completion::new(self.cookie, wr_id, WcOpcode::Recv, status);
            self.recv_cq.publish(&self.adapter, view, &completion);
        }
    }

    /// The host flushes what it has; then comes what is in the guest's ring.
    fn flush_recv(&self, view: &DmaView<'_>, side: &mut RecvSide) {
        self.recv_waits.store(true, Ordering::SeqCst);
        if !self.recv_inflight.lock().is_empty() {
            return;
        }
        for _ in 0..FLUSH_BUDGET {
            match side.source.pop(view, &mut side.work) {
                Ok(true) => self.publish_recv(view, side.work.wr_id, WcStatus::Flushed),
                Ok(false) | Err(_) => break,
            }
        }
    }

    /// A ring of the guest cannot be read: the QP ends.
    fn broken_ring(&self, view: &DmaView<'_>, error: &dyn fmt::Display) {
        log::warn!("{}: a ring of QP {}: {error}", self.adapter.name, self.qpn);
        if self.set_error() {
            self.failing.store(true, Ordering::Release);
            self.event(view, QpEvent::Fatal);
        }
    }

    fn destroy(&self) {
        self.mute(true);
        let Some(host) = self.host.write().take() else { return };
        self.set_state(QpState::Error);
        // What the host gives back now belongs to a shared queue, or to nobody.
        modify::to_error(&self.adapter, &host);
        self.recv_cq.drain(&self.adapter);
        self.adapter.mrs.end_with(self.qpn.get());
        // Whoever posts now has the host's object, and both sides are theirs until they have done so.
        let sides = (self.send.lock().take(), self.recv.lock().take());
        drop(host);
        self.recv_cq.drain(&self.adapter);
        self.adapter.qps.write().remove(&self.qpn.get());
        let entries = self.send_inflight.lock().restart();
        self.recv_inflight.lock().restart();
        self.send_cq.release(self.reserved[0]);
        self.recv_cq.release(self.reserved[1]);
        drop((sides, entries));
    }
}

/// A queue pair. Dropping it ends it.
#[derive(Debug)]
pub enum IbvQp {
    /// Of the host.
    #[doc(hidden)]
    Host(#[expect(private_interfaces, reason = "opaque")] Arc<Qp>),
    /// The connection manager's, which user space does not get from the host.
    #[doc(hidden)]
    Gsi(#[expect(private_interfaces, reason = "opaque")] Arc<Gsi>),
}

impl QueuePair for IbvQp {
    fn qpn(&self) -> Qpn {
        match self {
            Self::Host(qp) => qp.qpn,
            Self::Gsi(_) => Qpn::GSI,
        }
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        match self {
            Self::Host(qp) => qp.modify(attrs, mask),
            Self::Gsi(qp) => qp.modify(attrs, mask),
        }
    }

    fn query(&self) -> QpAttrs {
        match self {
            Self::Host(qp) => qp.query(),
            Self::Gsi(qp) => qp.query(),
        }
    }

    fn notify_send(&self) {
        match self {
            Self::Host(qp) => {
                qp.run_send();
                // A request that fails ends both sides.
                if qp.state() == QpState::Error {
                    qp.kick();
                }
            }
            Self::Gsi(qp) => qp.run_send(),
        }
    }

    fn notify_recv(&self) {
        match self {
            Self::Host(qp) => qp.run_recv(),
            Self::Gsi(_) => {}
        }
    }

    fn destroy(&self) {
        match self {
            Self::Host(qp) => qp.destroy(),
            Self::Gsi(qp) => qp.destroy(),
        }
    }
}

impl Drop for IbvQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
