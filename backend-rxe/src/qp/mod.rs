//! Queue pairs: the state that both halves share, and the responder half, which peers in the same process access
//! directly.
//!
//! This module depends neither on the path of requests nor on the thread that runs the QP: see [`crate::path`] and
//! [`crate::drive`].

pub(crate) mod contact;
mod epoch;
pub(crate) mod error_cause;
pub(crate) mod flight;
mod flush;
pub(crate) mod modify;
mod no_queue;
pub(crate) mod payload;
mod pending_completions;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod saved;
pub(crate) mod send_gate;
mod spoil;
pub(crate) mod state;

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::{FairMutex, Mutex};
use pvrdma_guest_memory::DmaView;
use pvrdma_handover::WaitFlag;
use pvrdma_verbs::{AsyncEvent, CqOverrun, QpEvent};
use pvrdma_verbs_types::{Completion, QpState, QpType, Qpn, WcOpcode, WcStatus};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::cq::Cq;
use crate::faults::{Fault, Site};
use crate::gid::BoundGid;
use crate::srq::Srq;
use crate::task::{Task, TaskInspect};
use responder::Responder;
use state::StateCell;

/// Parameters of a queue pair, except for its queues.
pub(crate) struct QpParts {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    /// Number of the protection domain.
    pub(crate) pd: u64,
    /// Identifier that the device uses in completions and events.
    pub(crate) cookie: u32,
    pub(crate) signal_all: bool,
    /// Maximum number of SGEs of a send request.
    pub(crate) max_send_sge: u8,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
}

/// A queue pair without its requester half, which is in [`crate::drive`].
pub(crate) struct Qp {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) pd: u64,
    cookie: u32,
    signal_all: bool,
    pub(crate) max_send_sge: u8,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
    pub(crate) state: Arc<StateCell>,
    /// Set while a requester waits for a receive of this QP. The requester is in `waiter`.
    awaited: WaitFlag,
    waiter: Mutex<Weak<StateCell>>,
    /// Source GID of the connection. The address vector has only its index, and an address that is removed and added
    /// again may get another index.
    source: Mutex<Option<BoundGid>>,
    // The mutex is fair, so that a command does not starve behind the batches of a busy QP.
    pub(crate) responder: FairMutex<Responder>,
}

/// State that both halves share, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct QpInspect {
    state: QpState,
    #[serde(rename = "type")]
    qp_type: QpType,
    /// The QP is in SQD with a request still in flight.
    draining: bool,
    /// A requester in this process waits for a receive.
    awaited: bool,
    task: TaskInspect,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Qp {
    pub(crate) fn new(parts: QpParts, task: Arc<Task>, responder: Responder) -> Arc<Self> {
        let QpParts { adapter, qpn, qp_type, pd, cookie, signal_all, max_send_sge, send_cq, recv_cq, srq } = parts;
        let state = StateCell::new(task, (qp_type, qpn));
        send_cq.attach(qpn.get(), &state);
        recv_cq.attach(qpn.get(), &state);
        Arc::new(Self {
            adapter,
            qpn,
            qp_type,
            pd,
            cookie,
            signal_all,
            max_send_sge,
            send_cq,
            recv_cq,
            srq,
            state,
            awaited: WaitFlag::new(),
            waiter: Mutex::default(),
            source: Mutex::default(),
            responder: FairMutex::new(responder),
        })
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        self.state.get()
    }

    /// Counts that the QP has reached a place where faults are requested. Returns the fault that happens there.
    #[inline]
    pub(crate) fn fault(&self, site: Site) -> Option<Fault> {
        self.adapter.faults.at(site, self.state.id(), || self.adapter.engine.now())
    }

    /// Returns the state of the QP for inspection.
    pub(crate) fn inspect(&self) -> QpInspect {
        QpInspect {
            state: self.state(),
            qp_type: self.qp_type,
            draining: self.state.is_draining(),
            awaited: self.awaited.is_set(),
            task: self.task().inspect(),
        }
    }

    /// Returns the task that runs the QP.
    pub(crate) fn task(&self) -> &Arc<Task> {
        self.state.task()
    }

    /// Returns the source GID of the connection: the GID that was bound at the index of the address vector when the
    /// vector was set, or the first one that has been bound there since.
    pub(crate) fn source(&self, index: u8) -> Option<BoundGid> {
        let source = &mut *self.source.lock();
        *source = source.or_else(|| self.adapter.gids.source(index));
        *source
    }

    /// Returns the source GID of the connection, if it can be used now.
    pub(crate) fn usable_source(&self, index: u8) -> Option<BoundGid> {
        self.source(index).filter(|source| self.adapter.gids.contains_at(index, *source))
    }

    /// Returns `true` if every send generates a completion.
    pub(crate) const fn signal_all(&self) -> bool {
        self.signal_all
    }

    /// Forgets the source GID, because the address vector has changed or was reset.
    fn forget_source(&self) {
        *self.source.lock() = None;
    }

    /// Publishes an entry in the send CQ. `byte_len` is the length of the data that was read, in bytes.
    #[inline]
    pub(crate) fn complete_send(
        &self,
        view: &DmaView<'_>,
        wr_id: u64,
        opcode: WcOpcode,
        status: WcStatus,
        byte_len: u32,
    ) -> Result<(), CqOverrun> {
        let completion = Completion { byte_len, ..Completion::new(self.cookie, wr_id, opcode, status) };
        self.send_cq.push(&self.state, view, &completion)
    }

    pub(crate) fn event(&self, view: &DmaView<'_>, event: QpEvent) {
        self.adapter.events.event(view, AsyncEvent::Qp(event, self.cookie));
    }

    /// Registers `waiter` to be woken by the next receive of this QP.
    pub(crate) fn await_receive(&self, waiter: &Arc<StateCell>) {
        *self.waiter.lock() = Arc::downgrade(waiter);
        // The flag is set after the waiter is stored, and the caller checks the ring again afterwards. A receive whose
        // post missed the flag is found by that check; any later post sees the flag.
        self.awaited.set();
    }

    /// Wakes the waiter, if there is one, after a receive was posted.
    pub(crate) fn receive_posted(&self) {
        if self.awaited.take() {
            let waiter = self.waiter.lock().upgrade();
            if let Some(waiter) = waiter {
                waiter.task().wake();
            }
        }
    }

    /// Marks the QP as destroyed. Returns `false` if it was destroyed before.
    pub(crate) fn kill(&self) -> bool {
        self.state.kill()
    }

    /// Removes the QP from its completion queues.
    pub(crate) fn detach(&self) {
        self.send_cq.detach(self.qpn.get());
        self.recv_cq.detach(self.qpn.get());
    }
}
