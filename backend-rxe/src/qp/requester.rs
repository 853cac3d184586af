//! The requester half: the request under way, and when it may be tried again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    Access, Completion, QpAttrs, QpEvent, QpState, QueueError, SendFlags, SendOp, SendSource, SendWr, WcStatus,
};

use super::Qp;
use super::no_queue::NoQueue;
use super::pending_completions::PendingCompletions;
use crate::capture::local::Notes;
use crate::counters::{Counters, Tally};
use crate::hca::{BoundGid, MAX_MESSAGE};
use crate::path::wire::rc::WireRequester;
use crate::sg::{self, Memory, SgList};
use crate::timer::TimerKey;
use pvrdma_roce::DatagramSender;

/// Wait before an unanswered request is sent again when the QP has no timeout.
const NO_TIMEOUT: Duration = Duration::from_millis(500);

/// How far the request under way has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Whether the local checks have passed.
    pub(crate) checked: bool,
    /// Bytes of the message.
    pub(crate) length: u64,
    /// Bytes moved.
    pub(crate) done: u64,
    /// [`super::responder::Responder::epoch`] when the first byte moved. The peer forgets half a message when it changes.
    pub(crate) epoch: u32,
}

/// What the requester waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wait {
    Nothing,
    /// The peer had no receive; ends at the deadline or when it posts one.
    Receive(Duration),
    /// There was no answer.
    Answer(Duration),
}

/// Whether the requester may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readiness {
    Ready,
    Waiting,
    /// The request under way has been tried often enough.
    Failed(WcStatus),
}

/// The way to a peer, remembered from request to request.
#[derive(Debug, Default)]
pub(crate) struct Route {
    /// [`crate::path::directory::Fabric::generation`] when it was looked up.
    pub(crate) generation: u64,
    /// The GID we send from.
    pub(crate) source: Option<BoundGid>,
    pub(crate) peer: Weak<Qp>,
}

/// The requester half of a QP.
pub(crate) struct Requester {
    source: Box<dyn SendSource>,
    /// The ring cannot be read any more.
    broken: bool,
    /// The request under way, if `current` says that there is one.
    pub(crate) work: SendWr,
    pub(crate) current: Option<Progress>,
    wait: Wait,
    retries: u8,
    rnr_retries: u8,
    /// Our timer, which may have fired since.
    armed: Option<TimerKey>,
    pub(crate) attrs: QpAttrs,
    /// Raise an event when SQD is reached.
    pub(super) notify_drained: bool,
    pub(crate) route: Route,
    /// Local delivery has found the peer: the QP stays with it until RESET.
    local: bool,
    /// Requests that have ended and were not reported yet. Empty while nobody holds the requester.
    pub(crate) news: PendingCompletions,
    /// State of a QP whose peer is on the wire.
    pub(crate) wire: Option<Box<WireRequester>>,
    /// State of a datagram QP that has sent to the wire.
    pub(crate) datagrams: Option<Box<DatagramSender>>,
    /// What a capture knows of our requests to local peers.
    pub(crate) notes: Option<Box<Notes>>,
}

impl Requester {
    pub(super) fn new(source: Box<dyn SendSource>) -> Self {
        Self {
            source,
            broken: false,
            work: SendWr::default(),
            current: None,
            wait: Wait::Nothing,
            retries: 0,
            rnr_retries: 0,
            armed: None,
            attrs: QpAttrs::default(),
            notify_drained: false,
            route: Route::default(),
            local: false,
            news: PendingCompletions::default(),
            wire: None,
            datagrams: None,
            notes: None,
        }
    }

    /// Forgets everything, as the guest does with a QP in RESET.
    pub(super) fn reset(&mut self, qp: &Qp) {
        let source = std::mem::replace(&mut self.source, Box::new(NoQueue));
        self.end(qp);
        self.source = source;
        self.source.reset();
    }

    /// Lets go of the ring for good.
    pub(super) fn end(&mut self, qp: &Qp) {
        if let Some(armed) = self.armed {
            qp.adapter.shared.engine.disarm(armed);
        }
        *self = Self::new(Box::new(NoQueue));
    }

    /// Takes over new attributes: the route and the number of retries may have changed.
    pub(super) fn set_attrs(&mut self, qp: &Qp, attrs: QpAttrs) {
        self.attrs = attrs;
        self.route = Route::default();
        self.datagrams = None;
        // They have the key.
        self.notes.take_if(|notes| matches!(**notes, Notes::Datagrams(_)));
        if let Some(wire) = &mut self.wire {
            wire.set_attrs(qp, &attrs);
        }
        self.refill();
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none() && self.wire.as_ref().is_none_or(|wire| wire.is_idle())
    }

    /// Goes over to the wire if that is where the peer is. Called when local delivery has not found it.
    #[cold]
    pub(crate) fn take_wire(&mut self, qp: &Qp) -> bool {
        if self.local || qp.adapter.port.is_none() {
            return false;
        }
        self.wire = WireRequester::new(qp, &self.attrs);
        if let Some(wire) = &mut self.wire {
            wire.set_draining(qp.state() == QpState::Sqd);
            self.wait = Wait::Nothing;
        }
        self.wire.is_some()
    }

    fn refill(&mut self) {
        self.retries = self.attrs.retry_cnt;
        self.rnr_retries = self.attrs.rnr_retry;
    }

    /// Makes the next request the one under way. `false`: there is none.
    #[inline]
    pub(crate) fn next(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        if self.broken {
            return Ok(false);
        }
        // An empty ring is looked at once more: a post that just came in saves a doorbell's way.
        for _ in 0..2 {
            if self.source.pop(view, &mut self.work).inspect_err(|_| self.broken = true)? {
                self.current = Some(Progress::default());
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        Ok(false)
    }

    /// Copies the next request into `work`.
    pub(crate) fn pop(&mut self, view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        if self.current.take().is_some() {
            // Local delivery took it from the ring before the peer turned out to be on the wire.
            std::mem::swap(work, &mut self.work);
            return Ok(true);
        }
        if self.broken {
            return Ok(false);
        }
        self.source.pop(view, work).inspect_err(|_| self.broken = true)
    }

    /// Ends a request that was popped, in the order of the ring.
    pub(crate) fn finish(&mut self, qp: &Qp, view: &DmaView<'_>, work: &SendWr, status: WcStatus, byte_len: u32) {
        // First the slot, then the news, as in `succeed`.
        self.source.retire(view);
        if status != WcStatus::Success || qp.signal_all || work.flags.contains(SendFlags::SIGNALED) {
            let _ = qp.complete_send(view, work.wr_id, work.op.completion_opcode(), status, byte_len);
        }
    }

    /// Whether the request under way may be run now.
    pub(super) fn readiness(&mut self, qp: &Qp) -> Readiness {
        let (Wait::Receive(deadline) | Wait::Answer(deadline)) = self.wait else { return Readiness::Ready };
        let woken = qp.woken.swap(false, Ordering::SeqCst) && matches!(self.wait, Wait::Receive(_));
        if woken {
            // The wait stays: if another took the receive, it goes on with the same deadline and costs nothing.
            return Readiness::Ready;
        }
        let counters = &qp.adapter.counters;
        if qp.adapter.shared.engine.now() < deadline {
            self.arm(qp, deadline);
            return Readiness::Waiting;
        }
        match self.wait {
            Wait::Nothing => {}
            Wait::Receive(_) => {
                Counters::bump(&counters.rnr_retries);
                if self.attrs.rnr_retry < 7 {
                    self.rnr_retries = self.rnr_retries.saturating_sub(1);
                }
            }
            Wait::Answer(_) => {
                if self.attrs.timeout != 0 {
                    let Some(left) = self.retries.checked_sub(1) else {
                        return Readiness::Failed(WcStatus::RetryExceeded);
                    };
                    self.retries = left;
                }
                Counters::bump(&counters.retries);
            }
        }
        self.wait = Wait::Nothing;
        Readiness::Ready
    }

    /// The peer had no receive and asks to wait that long. An error when the request was tried often enough.
    pub(crate) fn wait_for_receive(&mut self, qp: &Qp, delay: Duration) -> Result<(), WcStatus> {
        let engine = &qp.adapter.shared.engine;
        if let Wait::Receive(deadline) = self.wait {
            self.arm(qp, deadline);
            return Ok(());
        }
        if self.attrs.rnr_retry < 7 && self.rnr_retries == 0 {
            return Err(WcStatus::RnrRetryExceeded);
        }
        Counters::bump(&qp.adapter.counters.rnr_waits);
        let deadline = engine.now().saturating_add(delay);
        self.wait = Wait::Receive(deadline);
        self.arm(qp, deadline);
        Ok(())
    }

    /// There was no answer: start over after a while.
    pub(crate) fn wait_for_answer(&mut self, qp: &Qp) {
        Counters::bump(&qp.adapter.counters.unanswered);
        if let Some(progress) = &mut self.current {
            progress.done = 0;
        }
        let timeout = match self.attrs.timeout {
            0 => NO_TIMEOUT,
            exponent => Duration::from_nanos(4096 << exponent.min(31)),
        };
        let deadline = qp.adapter.shared.engine.now().saturating_add(timeout);
        self.wait = Wait::Answer(deadline);
        self.arm(qp, deadline);
    }

    /// Sees to it that we run at `deadline`. An earlier timer serves as well, because it leads here again.
    pub(crate) fn arm(&mut self, qp: &Qp, deadline: Duration) {
        let engine = &qp.adapter.shared.engine;
        let serves = |armed: TimerKey| armed.deadline <= deadline && armed.deadline > engine.now();
        if !self.armed.is_some_and(serves) {
            self.armed = Some(engine.arm(qp, deadline, self.armed));
        }
    }

    /// Ends the request under way with success.
    #[inline]
    pub(crate) fn succeed(&mut self, qp: &Qp, view: &DmaView<'_>, byte_len: u32) {
        self.note_success(qp, view, byte_len);
        self.publish(qp, view, None);
        if qp.state() == QpState::Sqd {
            self.drained(qp, view);
        }
    }

    /// The same, but its completion comes with [`Self::publish`].
    #[inline]
    pub(crate) fn note_success(&mut self, qp: &Qp, view: &DmaView<'_>, byte_len: u32) {
        self.current = None;
        self.wait = Wait::Nothing;
        self.retries = self.attrs.retry_cnt;
        self.rnr_retries = self.attrs.rnr_retry;
        // First the slot, then the news: who polls the completion may post at once.
        self.source.retire(view);
        let opcode = self.work.op.completion_opcode();
        let completion =
            Completion { byte_len, ..Completion::new(qp.cookie, self.work.wr_id, opcode, WcStatus::Success) };
        let wanted = qp.signal_all || self.work.flags.contains(SendFlags::SIGNALED);
        self.news.note(completion, wanted, self.work.op.takes_receive());
    }

    /// Publishes the completions of requests that have ended. `told` is how many receives of them the peer could be told
    /// of, if not all. `false` if one of the requests failed after all for that reason.
    #[inline]
    pub(crate) fn publish(&mut self, qp: &Qp, view: &DmaView<'_>, told: Option<usize>) -> bool {
        self.news.publish(qp, view, told)
    }

    /// Ends the request under way with a status that always gets an entry.
    pub(super) fn end_request(&mut self, qp: &Qp, view: &DmaView<'_>, status: WcStatus) {
        if self.current.take().is_none() {
            return;
        }
        self.wait = Wait::Nothing;
        self.source.retire(view);
        let _ = qp.complete_send(view, self.work.wr_id, self.work.op.completion_opcode(), status, 0);
    }

    /// Flushes the request under way and those in the ring. `false`: the budget ended first.
    pub(super) fn flush(&mut self, qp: &Qp, memory: Memory<'_>, budget: &mut super::Budget, tally: &mut Tally) -> bool {
        let view = memory.view;
        self.wait = Wait::Nothing;
        if let Some(mut wire) = self.wire.take() {
            wire.flush(qp, self, memory, tally);
        }
        loop {
            if self.current.is_some() {
                self.end_request(qp, view, WcStatus::Flushed);
                tally.flushed += 1;
            }
            if budget.spent() {
                return false;
            }
            budget.take_request();
            // A broken ring has nothing that could be flushed.
            if !matches!(self.next(view), Ok(true)) {
                return true;
            }
        }
    }

    /// The send queue stands still.
    pub(crate) fn drained(&mut self, qp: &Qp, view: &DmaView<'_>) {
        qp.draining.store(false, Ordering::Release);
        if std::mem::take(&mut self.notify_drained) {
            qp.event(view, QpEvent::SendQueueDrained);
        }
    }

    /// The peer of a connected QP, and where we send from.
    #[inline]
    pub(crate) fn resolve(&mut self, qp: &Qp) -> Option<Arc<Qp>> {
        let fabric = &qp.adapter.shared.fabric;
        let generation = fabric.generation();
        if self.route.generation == generation
            && let Some(peer) = self.route.peer.upgrade()
            && !peer.is_dead()
        {
            return Some(peer);
        }
        let source = qp.adapter.gid(self.attrs.av.sgid_index);
        let peer = source
            .and_then(|from| fabric.find(from.beside(self.attrs.av.dgid)))
            .and_then(|adapter| adapter.qp(self.attrs.dest_qpn));
        self.local |= peer.is_some();
        let weak = peer.as_ref().map_or_else(Weak::new, Arc::downgrade);
        self.route = Route { generation, source, peer: weak };
        peer
    }
}

/// Checks of a request that need nobody else. Gives the bytes of the message.
pub(crate) fn check_request(
    work: &SendWr,
    own: Memory<'_>,
    pd: u32,
    attrs: &QpAttrs,
    max_message: u32,
) -> Result<u64, WcStatus> {
    let length = sg::total(&work.sges);
    let need = match &work.op {
        SendOp::Send { .. } | SendOp::Write { .. } => Access::empty(),
        SendOp::Read { .. } => Access::LOCAL_WRITE,
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
            if length < 8 {
                return Err(WcStatus::LocalLength);
            }
            Access::LOCAL_WRITE
        }
        SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) => return Ok(0),
        SendOp::Unsupported { .. } | SendOp::Malformed => return Err(WcStatus::LocalQpOperation),
    };
    if need == Access::LOCAL_WRITE && attrs.max_rd_atomic == 0 {
        // With no initiator resources the request could never be sent.
        return Err(WcStatus::LocalQpOperation);
    }
    if length > u64::from(max_message.min(MAX_MESSAGE)) {
        return Err(WcStatus::LocalLength);
    }
    let list = SgList { memory: own, sges: &work.sges, pd, need };
    if list.allowed() { Ok(length) } else { Err(WcStatus::LocalProtection) }
}
