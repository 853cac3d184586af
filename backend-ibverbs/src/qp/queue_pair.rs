//! A queue pair: its components, state, and processing.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{AsyncEvent, QpEvent, VerbsError};
use pvrdma_verbs_types::{QpAttrs, QpState, QpType, Qpn};
use serde::Serialize;

use super::address_handles::LookUp;
use super::host_state;
use super::parts::QpParts;
use super::recv_side::RecvSide;
use super::send_side::SendSide;
use crate::adapter::Adapter;
use crate::cm_paths::Connectable;
use crate::cq::Cq;
use crate::directory::Directory;
use crate::inflight::{RecvInflight, SendInflight};
use crate::mr::MrTable;
use crate::srq::Srq;
use crate::sys::{QPT_RC, QPT_UD, QpCap};
use crate::verbs::{HostPd, HostQp, HostQpInit};

/// Maximum number of elements flushed in one call, so that a guest that posts as fast as elements are flushed cannot
/// occupy the thread forever.
pub(super) const FLUSH_BUDGET: usize = 1 << 16;

/// A queue pair of the host, and the guest's rings that feed it.
pub(crate) struct Qp {
    pub(super) adapter: Arc<Adapter>,
    pub(super) mrs: Arc<MrTable>,
    pub(super) qps: Arc<Directory<u32, Self>>,
    pub(super) pd: Arc<HostPd>,
    pub(super) cookie: u32,
    pub(super) qp_type: QpType,
    pub(super) qpn: Qpn,
    pub(super) address: usize,
    pub(super) signal_all: bool,
    /// Maximum number of sends in flight.
    pub(super) depth: usize,
    pub(super) send_cq: Arc<Cq>,
    pub(super) recv_cq: Arc<Cq>,
    pub(super) srq: Option<Arc<Srq>>,
    /// Number of completions reserved in each queue.
    pub(super) reserved: [u32; 2],
    pub(super) attrs: Mutex<QpAttrs>,
    pub(super) state: AtomicU8,
    /// `None` once it is destroyed.
    pub(super) send: Mutex<Option<SendSide>>,
    /// `None` with a shared receive queue, and once it is destroyed.
    pub(super) recv: Mutex<Option<RecvSide>>,
    pub(super) host: RwLock<Option<Arc<HostQp>>>,
    /// Held while the host's QP is reset, stopped or queried, which are short operations. The transition to RTR, for
    /// which the host looks up the peer, does not need it, because it cannot leave the error state.
    pub(super) host_state: Mutex<()>,
    pub(super) send_inflight: Mutex<SendInflight>,
    pub(super) recv_inflight: Mutex<RecvInflight>,
    /// Nothing may be published. Changed only with both sides held.
    pub(super) muted: AtomicBool,
    /// Sends were left in the ring because requests are in flight.
    pub(super) send_waits: AtomicBool,
    pub(super) recv_waits: AtomicBool,
    /// State of the destination look-up.
    pub(super) look_up: Mutex<LookUp>,
    /// The host's QP must be moved to its error state.
    pub(super) failing: AtomicBool,
    /// A notification was requested with SQD.
    pub(super) notify_drained: AtomicBool,
    /// "Last WQE reached" was reported. It is reported once per epoch.
    pub(super) last_wqe: AtomicBool,
    /// Sends wait in the ring until the host has established the connection.
    pub(super) unconnected: AtomicBool,
    /// Maximum length of a datagram.
    pub(super) datagram: AtomicU32,
}

/// Snapshot of a queue pair.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct QpInspect {
    /// State as known to the daemon. The host is not queried.
    state: QpState,
    #[serde(rename = "type")]
    qp_type: QpType,
    /// QPN on the host, which is the QPN on the wire.
    host_qpn: Qpn,
    /// Number of sends posted to the host.
    sends_in_flight: Snapshot<usize>,
    /// Maximum number of sends posted to the host.
    max_sends_in_flight: usize,
    /// Number of receives posted to the host, without those of an SRQ.
    receives_in_flight: Snapshot<usize>,
    /// Sends wait in the ring because requests are in flight.
    send_waits: bool,
    /// Receives wait in the ring because requests are in flight.
    recv_waits: bool,
    /// Nothing may be published.
    muted: bool,
    /// The host's queue pair must still be moved to its error state.
    failing: bool,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("type", &self.qp_type).finish_non_exhaustive()
    }
}

impl Qp {
    /// Creates a queue pair in RESET.
    pub(crate) fn create(
        adapter: &Arc<Adapter>,
        mrs: &Arc<MrTable>,
        qps: &Arc<Directory<u32, Self>>,
        parts: QpParts,
    ) -> Result<Arc<Self>, VerbsError> {
        let cap = capacity(&parts);
        let recv_entries = parts.srq.as_ref().map_or(cap.max_recv_wr, |srq| srq.max_wr);
        let reserved = [cap.max_send_wr, recv_entries];
        parts.send_cq.reserve(reserved[0])?;
        parts.recv_cq.reserve(reserved[1]).inspect_err(|_| parts.send_cq.release(reserved[0]))?;
        let host = make_host(adapter, &parts, cap).inspect_err(|_| {
            parts.send_cq.release(reserved[0]);
            parts.recv_cq.release(reserved[1]);
        })?;
        let qpn = Qpn::new(host.number());
        let qp = Arc::new(Self {
            adapter: Arc::clone(adapter),
            mrs: Arc::clone(mrs),
            qps: Arc::clone(qps),
            pd: parts.pd,
            cookie: parts.cookie,
            qp_type: parts.qp_type,
            qpn,
            address: host.address(),
            signal_all: parts.signal_all,
            depth: cap.max_send_wr as usize,
            send_cq: parts.send_cq,
            recv_cq: parts.recv_cq,
            srq: parts.srq,
            reserved,
            attrs: Mutex::default(),
            state: AtomicU8::new(QpState::Reset as u8),
            send: Mutex::new(Some(SendSide::new(parts.send_queue))),
            recv: Mutex::new(parts.recv_queue.map(RecvSide::new)),
            host: RwLock::new(Some(Arc::new(host))),
            host_state: Mutex::new(()),
            send_inflight: Mutex::new(SendInflight::new()),
            recv_inflight: Mutex::new(RecvInflight::new(cap.max_recv_wr)),
            muted: AtomicBool::new(false),
            send_waits: AtomicBool::new(false),
            recv_waits: AtomicBool::new(false),
            look_up: Mutex::default(),
            failing: AtomicBool::new(false),
            notify_drained: AtomicBool::new(false),
            last_wqe: AtomicBool::new(false),
            unconnected: AtomicBool::new(false),
            datagram: AtomicU32::new(0),
        });
        qps.insert(qpn.get(), &qp);
        if qp.qp_type == QpType::Rc {
            let weak: Weak<Self> = Arc::downgrade(&qp);
            adapter.cm_paths.add_qp(qpn.get(), weak);
        }
        Ok(qp)
    }

    /// Returns a snapshot. Does not wait for locks and does not query the host.
    pub(crate) fn inspect(&self) -> QpInspect {
        QpInspect {
            state: self.state(),
            qp_type: self.qp_type,
            host_qpn: self.qpn,
            sends_in_flight: self.send_inflight.try_lock().map(|inflight| inflight.len()).into(),
            max_sends_in_flight: self.depth,
            receives_in_flight: self.recv_inflight.try_lock().map(|inflight| inflight.len()).into(),
            send_waits: self.send_waits.load(Ordering::Relaxed),
            recv_waits: self.recv_waits.load(Ordering::Relaxed),
            muted: self.is_muted(),
            failing: self.failing.load(Ordering::Relaxed),
        }
    }

    /// Returns the QPN on the wire.
    pub(crate) const fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Returns the address that identifies the queue pair in the host's events.
    pub(crate) const fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn uses(&self, cq: &Cq) -> bool {
        std::ptr::eq(&raw const *self.send_cq, cq) || std::ptr::eq(&raw const *self.recv_cq, cq)
    }

    /// Returns the host's object, or `None` once it is destroyed.
    pub(super) fn host(&self) -> Option<Arc<HostQp>> {
        self.host.read().clone()
    }

    pub(crate) fn state(&self) -> QpState {
        QpState::try_from(u32::from(self.state.load(Ordering::Acquire))).unwrap_or(QpState::Error)
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Changes the state from `from` to `to`. Returns `false` if the state is no longer `from`, because another thread
    /// has changed it.
    pub(super) fn step(&self, from: QpState, to: QpState) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Enters the error state, unless the state is RESET. Returns `true` if this call made the change.
    pub(super) fn set_error(&self) -> bool {
        let error = QpState::Error as u8;
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                (old != error && old != QpState::Reset as u8).then_some(error)
            })
            .is_ok()
    }

    /// Waits until no thread posts under a previous state. A thread that starts posting later sees the current state,
    /// because it reads the state while it holds its side. The caller holds no lock that such a thread may wait for.
    pub(super) fn wait_for_posters(&self) {
        drop(self.send.lock());
        drop(self.recv.lock());
    }

    pub(super) fn is_muted(&self) -> bool {
        self.muted.load(Ordering::Acquire)
    }

    pub(super) fn mute(&self, muted: bool) {
        let _send = self.send_inflight.lock();
        let _recv = self.recv_inflight.lock();
        self.muted.store(muted, Ordering::Release);
    }

    pub(super) fn event(&self, view: &DmaView<'_>, event: QpEvent) {
        self.adapter.events.event(view, AsyncEvent::Qp(event, self.cookie));
    }

    /// Returns `true` if the host must establish the connection first.
    pub(super) fn is_unconnected(&self) -> bool {
        self.unconnected.load(Ordering::Acquire)
    }

    /// Handles an event of the host.
    pub(crate) fn host_event(&self, event: QpEvent) {
        // In another state the event would belong to an earlier epoch. The host's QP may enter the error state before
        // an event or a completion reports it, so the query asks the host.
        if event == QpEvent::LastWqeReached && self.query().state != QpState::Error {
            return;
        }
        let fatal = matches!(event, QpEvent::Fatal | QpEvent::RequestError | QpEvent::AccessError);
        {
            let view = self.adapter.memory.view();
            let inflight = self.send_inflight.lock();
            let repeated = event == QpEvent::LastWqeReached && self.last_wqe.swap(true, Ordering::AcqRel);
            // Draining is implemented here, so the host's drain events are ignored.
            if self.is_muted() || repeated || event == QpEvent::SendQueueDrained {
                return;
            }
            self.event(&view, event);
            // This must precede a reset, which could mute the QP and begin another epoch.
            if fatal {
                self.set_error();
            }
            drop(inflight);
        }
        if fatal {
            self.kick();
        }
    }

    /// Continues sending: the guest has posted sends, or the condition for which one of them waited has occurred. The
    /// caller holds no lock.
    pub(crate) fn continue_sending(&self) {
        self.run_send();
        // A failed request ends both sides.
        if self.state() == QpState::Error {
            self.kick();
        }
    }

    /// Continues waiting work, or flushes.
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

    /// Moves the host's QP to its error state.
    pub(super) fn stop_host(&self) {
        if let Some(host) = self.host() {
            self.stop(&host);
        }
    }

    /// Like [`Self::stop_host`], for a caller that holds the host's object. Does nothing if a command has begun a new
    /// epoch since the QP was marked as failing.
    pub(super) fn stop(&self, host: &HostQp) {
        let _changing = self.host_state.lock();
        if self.state() == QpState::Error {
            host_state::to_error(&self.adapter, host);
        }
    }

    /// Ends the QP because a ring of the guest cannot be read. Returns `true` if this call ended it.
    pub(super) fn broken_ring(&self, view: &DmaView<'_>, error: &dyn fmt::Display) -> bool {
        self.adapter.log.warn(module_path!(), format_args!("a ring of QP {}: {error}", self.qpn));
        let ended = self.set_error();
        if ended {
            self.failing.store(true, Ordering::Release);
            self.event(view, QpEvent::Fatal);
        }
        ended
    }
}

impl Connectable for Qp {
    fn connected(&self) {
        self.unconnected.store(false, Ordering::Release);
        self.continue_sending();
    }
}

/// Returns the capacities of the host's queues. The host does not accept queues of size 0, which a guest may request.
fn capacity(parts: &QpParts) -> QpCap {
    let caps = &parts.caps;
    // With an SRQ, receives come from the SRQ.
    let own_receives = parts.srq.is_none();
    QpCap {
        max_send_wr: caps.max_send_wr.max(1),
        max_recv_wr: if own_receives { caps.max_recv_wr.max(1) } else { 0 },
        max_send_sge: caps.max_send_sge.max(1),
        max_recv_sge: if own_receives { caps.max_recv_sge.max(1) } else { 0 },
        max_inline_data: 0,
    }
}

fn make_host(adapter: &Adapter, parts: &QpParts, cap: QpCap) -> Result<HostQp, VerbsError> {
    let srq = parts.srq.as_ref().map(|srq| srq.host().ok_or(VerbsError::Gone)).transpose()?;
    let make = |cap| {
        HostQp::new(HostQpInit {
            pd: Arc::clone(&parts.pd),
            send_cq: Arc::clone(&parts.send_cq.host),
            recv_cq: Arc::clone(&parts.recv_cq.host),
            srq: srq.clone(),
            cap,
            qp_type: if parts.qp_type == QpType::Rc { QPT_RC } else { QPT_UD },
        })
    };
    let max_send_sge = adapter.sges(cap.max_send_sge);
    let max_recv_sge = if parts.srq.is_none() { adapter.sges(cap.max_recv_sge) } else { cap.max_recv_sge };
    // An adapter may not have room for long queues with many SGEs per request. In that case the guest's own numbers are
    // tried.
    Ok(make(QpCap { max_send_sge, max_recv_sge, ..cap }).or_else(|_| make(cap))?)
}
