//! A queue pair: what it is made of, its state, and how it goes on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock};
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{AsyncEvent, QpAttrs, QpEvent, QpState, QpType, Qpn, Snapshot, VerbsError};
use serde::Serialize;

use super::address_handles::LookUp;
use super::host_state;
use super::parts::QpParts;
use super::recv_side::RecvSide;
use super::send_side::SendSide;
use crate::adapter::Adapter;
use crate::cq::Cq;
use crate::directory::Directory;
use crate::inflight::{RecvInflight, SendInflight};
use crate::mr::MrTable;
use crate::srq::Srq;
use crate::sys::{QPT_RC, QPT_UD, QpCap};
use crate::verbs::{HostPd, HostQp, HostQpInit};

/// Elements flushed in one go: a guest that posts as fast as we flush does not keep us for ever.
pub(super) const FLUSH_BUDGET: usize = 1 << 16;

/// A queue pair of the host and the guest's rings behind it.
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
    /// Sends that may be in flight.
    pub(super) depth: usize,
    pub(super) send_cq: Arc<Cq>,
    pub(super) recv_cq: Arc<Cq>,
    pub(super) srq: Option<Arc<Srq>>,
    /// Completions that it may cause in each queue.
    pub(super) reserved: [u32; 2],
    pub(super) attrs: Mutex<QpAttrs>,
    pub(super) state: AtomicU8,
    /// `None` when it was destroyed.
    pub(super) send: Mutex<Option<SendSide>>,
    /// `None` with a shared receive queue, and when it was destroyed.
    pub(super) recv: Mutex<Option<RecvSide>>,
    pub(super) host: RwLock<Option<Arc<HostQp>>>,
    /// Held by who resets the host's QP, stops it or asks for its state, which takes no time. The way to RTR, on which
    /// the host looks for the peer, needs it not: from the error state it leads nowhere.
    pub(super) host_state: Mutex<()>,
    pub(super) send_inflight: Mutex<SendInflight>,
    pub(super) recv_inflight: Mutex<RecvInflight>,
    /// Nothing may be published. Changed with both of the above held.
    pub(super) muted: AtomicBool,
    /// Work was left because something is in flight.
    pub(super) send_waits: AtomicBool,
    pub(super) recv_waits: AtomicBool,
    /// The destination that is being looked up.
    pub(super) look_up: Mutex<LookUp>,
    /// The host's QP is to go to its error state.
    pub(super) failing: AtomicBool,
    /// SQD was asked for with a notification.
    pub(super) notify_drained: AtomicBool,
    /// "Last WQE reached" was reported. It comes once in an epoch.
    pub(super) last_wqe: AtomicBool,
    /// Largest datagram.
    pub(super) datagram: AtomicU32,
}

/// A queue pair at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct QpInspect {
    /// Its state as the daemon knows it. The host is not asked.
    state: QpState,
    #[serde(rename = "type")]
    qp_type: QpType,
    /// Its number at the host, which is that on the wire.
    host_qpn: Qpn,
    /// Sends that the host has.
    sends_in_flight: Snapshot<usize>,
    /// Sends that it may have.
    max_sends_in_flight: usize,
    /// Receives that the host has, without those of an SRQ.
    receives_in_flight: Snapshot<usize>,
    /// Sends wait in the ring because something is in flight.
    send_waits: bool,
    /// Receives do.
    recv_waits: bool,
    /// Nothing may be published.
    muted: bool,
    /// The host's queue pair is yet to be brought to its error state.
    failing: bool,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("type", &self.qp_type).finish_non_exhaustive()
    }
}

impl Qp {
    /// Makes a queue pair in RESET.
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
            datagram: AtomicU32::new(0),
        });
        qps.insert(qpn.get(), &qp);
        Ok(qp)
    }

    /// Describes itself. Waits for nobody and does not ask the host.
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

    /// Returns its number on the wire.
    pub(crate) const fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Names it in the host's events.
    pub(crate) const fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn uses(&self, cq: &Cq) -> bool {
        std::ptr::eq(&raw const *self.send_cq, cq) || std::ptr::eq(&raw const *self.recv_cq, cq)
    }

    /// Returns the host's object, until it is destroyed.
    pub(super) fn host(&self) -> Option<Arc<HostQp>> {
        self.host.read().clone()
    }

    pub(crate) fn state(&self) -> QpState {
        QpState::try_from(u32::from(self.state.load(Ordering::Acquire))).unwrap_or(QpState::Error)
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Goes from one state to another. Returns `false` if it is not in the first, which others may have ended.
    pub(super) fn step(&self, from: QpState, to: QpState) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Brings it to the error state, unless it is in RESET. Returns `true` if this is the change that does so.
    pub(super) fn set_error(&self) -> bool {
        let error = QpState::Error as u8;
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                (old != error && old != QpState::Reset as u8).then_some(error)
            })
            .is_ok()
    }

    /// Waits until nobody posts by a state that it had before. Whoever begins after this sees the present one: they
    /// look at it with their side held. The caller holds nothing that they may want.
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

    /// The host says something of it.
    pub(crate) fn host_event(&self, event: QpEvent) {
        // Otherwise it is of an earlier life. The host's QP may be there before anything has told us.
        if event == QpEvent::LastWqeReached && self.query().state != QpState::Error {
            return;
        }
        let fatal = matches!(event, QpEvent::Fatal | QpEvent::RequestError | QpEvent::AccessError);
        {
            let view = self.adapter.memory.view();
            let inflight = self.send_inflight.lock();
            let repeated = event == QpEvent::LastWqeReached && self.last_wqe.swap(true, Ordering::AcqRel);
            // Draining is ours, and so are its events.
            if self.is_muted() || repeated || event == QpEvent::SendQueueDrained {
                return;
            }
            self.event(&view, event);
            // Before a reset can mute it, and give it another life.
            if fatal {
                self.set_error();
            }
            drop(inflight);
        }
        if fatal {
            self.kick();
        }
    }

    /// The guest has posted sends, or what one of them waited for has come. The caller holds no lock.
    pub(crate) fn go_on_sending(&self) {
        self.run_send();
        // A request that fails ends both sides.
        if self.state() == QpState::Error {
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
    pub(super) fn stop_host(&self) {
        if let Some(host) = self.host() {
            self.stop(&host);
        }
    }

    /// As [`Self::stop_host`], by who has the host's object. Does nothing if a command has given the QP another life
    /// since it was to stop.
    pub(super) fn stop(&self, host: &HostQp) {
        let _changing = self.host_state.lock();
        if self.state() == QpState::Error {
            host_state::to_error(&self.adapter, host);
        }
    }

    /// A ring of the guest cannot be read: the QP ends. Returns `true` if it was this that ended it.
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

/// Returns what the host's queues must hold. The host takes no queue of size 0, a guest may ask for one.
fn capacity(parts: &QpParts) -> QpCap {
    let caps = &parts.caps;
    // Receives come from the SRQ, if there is one.
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
    // An adapter may not have room for long queues of long requests.
    Ok(make(QpCap { max_send_sge, max_recv_sge, ..cap }).or_else(|_| make(cap))?)
}
