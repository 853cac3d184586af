//! Queue pairs: what both halves share, and how a QP gets to run.

pub(crate) mod flush;
mod modify;
mod no_queue;
mod pending_completions;
pub(crate) mod requester;
pub(crate) mod responder;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, Weak};

use parking_lot::{FairMutex, Mutex};
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    AsyncEvent, Completion, CqOverrun, QpAttrMask, QpAttrs, QpEvent, QpInit, QpState, QpType, Qpn, QueuePair,
    VerbsError, WcOpcode, WcStatus,
};

use crate::counters::Tally;
use crate::cq::Cq;
use crate::hca::{Adapter, RxeHca};
use crate::path::local;
use crate::path::wire;
use crate::path::wire::rate_limiter::RateLimiter;
use crate::srq::Srq;
use requester::{Readiness, Requester};
use responder::Responder;

/// How much one run may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    bytes: u64,
    requests: u32,
}

impl Budget {
    pub(crate) const fn new(bytes: u64, requests: u32) -> Self {
        Self { bytes, requests }
    }

    /// Whether nothing more may be started.
    #[inline]
    pub(crate) const fn spent(&self) -> bool {
        self.bytes == 0 || self.requests == 0
    }

    /// Bytes that may be copied in one go.
    #[inline]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    #[inline]
    pub(crate) const fn take_bytes(&mut self, count: u64) {
        self.bytes = self.bytes.saturating_sub(count);
    }

    #[inline]
    pub(crate) const fn take_request(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }
}

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Run {
    /// Nothing to do, or waiting for a timer or a peer.
    Idle,
    /// The budget is used up.
    More,
    /// The state or the route changed: decide anew what to do.
    Again,
}

/// A queue pair of the engine.
pub(crate) struct Qp {
    pub(crate) me: Weak<Self>,
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) pd: u32,
    cookie: u32,
    signal_all: bool,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
    /// [`QpState`]. Read anywhere; set with a half held, except for the step into the error state.
    state: AtomicU8,
    dead: AtomicBool,
    /// In SQD with a request still under way.
    draining: AtomicBool,
    /// On the ready queue.
    pub(crate) scheduled: AtomicBool,
    /// There may be work that the holder of the requester has not seen.
    pending: AtomicBool,
    /// A peer has posted a receive since this requester found none.
    woken: AtomicBool,
    /// In the list of waiters of an SRQ.
    pub(crate) queued_at_srq: AtomicBool,
    /// A requester waits for a receive of this QP: `waiter`.
    awaited: AtomicBool,
    waiter: Mutex<Weak<Self>>,
    /// What slows both halves down on the wire.
    pub(crate) brake: RateLimiter,
    // Fair: a command must not starve behind the batches of a busy QP.
    requester: FairMutex<Requester>,
    pub(crate) responder: FairMutex<Responder>,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Qp {
    pub(crate) fn new(adapter: Arc<Adapter>, qpn: Qpn, init: QpInit<'_, RxeHca>) -> Arc<Self> {
        // A QP with an SRQ has no receives of its own, even if the caller brought a ring.
        let srq = init.srq.map(|srq| Arc::clone(&srq.0));
        let recv_queue = init.recv_queue.filter(|_| srq.is_none());
        let qp = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            adapter,
            qpn,
            qp_type: init.qp_type,
            pd: init.pd.id,
            cookie: init.cookie,
            signal_all: init.signal_all,
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            srq,
            state: AtomicU8::new(QpState::Reset as u8),
            dead: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            scheduled: AtomicBool::new(false),
            pending: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            queued_at_srq: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            waiter: Mutex::default(),
            brake: RateLimiter::default(),
            requester: FairMutex::new(Requester::new(init.send_queue)),
            responder: FairMutex::new(Responder::new(recv_queue)),
        });
        qp.send_cq.attach(qpn.get(), Weak::clone(&qp.me));
        qp.recv_cq.attach(qpn.get(), Weak::clone(&qp.me));
        qp
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        // Only states are stored.
        QpState::try_from(u32::from(self.state.load(Ordering::Acquire))).unwrap_or(QpState::Error)
    }

    /// Whether the responder takes requests.
    #[inline]
    pub(crate) fn receives(&self) -> bool {
        matches!(self.state(), QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Goes to the error state. `false` when the QP is in RESET or destroyed, where there is nothing to flush.
    pub(crate) fn set_error(&self) -> bool {
        self.step(|state| (state != QpState::Reset as u8).then_some(QpState::Error as u8))
    }

    /// Goes to the error state without the help of its halves, which may be held, even by the caller: the ready queue
    /// flushes them.
    #[cold]
    pub(crate) fn fail_later(&self) {
        if self.state() != QpState::Error && self.set_error() {
            self.kick();
        }
    }

    /// Changes state unless somebody else did meanwhile.
    fn change_state(&self, from: QpState, to: QpState) -> bool {
        self.step(|state| (state == from as u8).then_some(to as u8))
    }

    fn step(&self, change: impl Fn(u8) -> Option<u8>) -> bool {
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    /// Puts the QP on the ready queue.
    pub(crate) fn kick(&self) {
        self.adapter.shared.engine.kick(self);
    }

    /// A receive that this requester waits for may have been posted.
    pub(crate) fn wake(&self) {
        self.woken.store(true, Ordering::SeqCst);
        self.kick();
    }

    /// Runs the requester on a thread that has something else to do afterwards; workers do the rest.
    pub(crate) fn drive_inline(&self) {
        if self.drive(self.adapter.shared.inline_budget) {
            self.kick();
        }
    }

    /// Runs the requester, or leaves it to the thread that has it. `true`: the budget ended first.
    pub(crate) fn drive(&self, mut budget: Budget) -> bool {
        let mut held = self.requester.try_lock();
        if held.is_none() {
            // Between our mark and our second attempt, and between the holder's unlock and its look at the mark: one of
            // us sees the other.
            self.pending.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            held = self.requester.try_lock();
        }
        while let Some(mut requester) = held {
            // A swap and not a store: whose mark we take away, whose request we must see.
            self.pending.swap(false, Ordering::SeqCst);
            let more = self.run(&mut requester, &mut budget);
            drop(requester);
            if more {
                return true;
            }
            fence(Ordering::SeqCst);
            if !self.pending.load(Ordering::SeqCst) {
                return false;
            }
            held = self.requester.try_lock();
        }
        false
    }

    /// Waits for the requester. What was left to us meanwhile is done when the QP is driven next, which the caller sees to.
    pub(crate) fn with_requester<R>(&self, act: impl FnOnce(&mut Requester) -> R) -> R {
        act(&mut self.requester.lock())
    }

    /// Runs the requester until it is dry, waits, or has used the budget up. `true`: the budget.
    fn run(&self, requester: &mut Requester, budget: &mut Budget) -> bool {
        if self.brake.release_responder() {
            wire::rc::resume_answers(self);
        }
        let mut tally = Tally::default();
        let more = loop {
            let run = match self.state() {
                QpState::Rts | QpState::Sqd => match requester.readiness(self) {
                    Readiness::Waiting => Run::Idle,
                    Readiness::Failed(status) => {
                        let held = crate::sg::MemoryGuard::open(&self.adapter, None);
                        self.fail_request(requester, held.own().view, status);
                        Run::Again
                    }
                    Readiness::Ready if self.qp_type.is_datagram() => {
                        local::ud::run(self, requester, budget, &mut tally)
                    }
                    Readiness::Ready if requester.wire.is_some() => wire::rc::run(self, requester, budget, &mut tally),
                    Readiness::Ready => local::rc::run(self, requester, budget, &mut tally),
                },
                QpState::Sqe | QpState::Error => self.flush(requester, budget, &mut tally),
                QpState::Reset | QpState::Init | QpState::Rtr => Run::Idle,
            };
            match run {
                Run::Idle => break false,
                Run::More => break true,
                Run::Again if budget.spent() => break true,
                Run::Again => {}
            }
        };
        self.adapter.counters.fold(&mut tally);
        more
    }

    /// An entry for the send CQ.
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
        self.send_cq.push(self, view, &completion)
    }

    pub(crate) fn event(&self, view: &DmaView<'_>, event: QpEvent) {
        self.adapter.events.event(view, AsyncEvent::Qp(event, self.cookie));
    }

    /// Leaves word that `waiter` wants a receive of this QP.
    pub(crate) fn await_receive(&self, waiter: &Self) {
        *self.waiter.lock() = Weak::clone(&waiter.me);
        self.awaited.store(true, Ordering::SeqCst);
        // The caller looks at the ring again; a post before that saw no mark, a later one sees it.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn notify_recv(&self) {
        fence(Ordering::SeqCst);
        if self.awaited.load(Ordering::SeqCst) && self.awaited.swap(false, Ordering::SeqCst) {
            let waiter = self.waiter.lock().upgrade();
            if let Some(waiter) = waiter {
                waiter.wake();
            }
        }
        if self.state() == QpState::Error {
            self.drive_inline();
        }
    }

    /// Ends the QP. When this returns nothing uses its rings, its requests' memory or its CQs on its behalf.
    pub(crate) fn destroy(&self) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        {
            let mut requester = self.requester.lock();
            let mut responder = self.responder.lock();
            self.state.store(QpState::Reset as u8, Ordering::Release);
            requester.end(self);
            responder.end();
        }
        self.adapter.forget_qp(self);
        self.send_cq.detach(self.qpn.get());
        self.recv_cq.detach(self.qpn.get());
    }
}

/// A queue pair. Dropping it ends it.
#[derive(Debug)]
pub struct RxeQp(pub(crate) Arc<Qp>);

impl QueuePair for RxeQp {
    fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    fn modify(&self, attrs: &QpAttrs, mask: QpAttrMask) -> Result<(), VerbsError> {
        self.0.modify(attrs, mask)
    }

    fn query(&self) -> QpAttrs {
        self.0.query()
    }

    fn notify_send(&self) {
        self.0.drive_inline();
    }

    fn notify_recv(&self) {
        self.0.notify_recv();
    }

    fn destroy(&self) {
        self.0.destroy();
    }
}

impl Drop for RxeQp {
    fn drop(&mut self) {
        self.0.destroy();
    }
}
