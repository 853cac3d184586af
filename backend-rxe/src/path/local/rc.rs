//! Reliable connections, delivered locally.
//!
//! A batch holds the guest memory of both sides and the responder of the peer for as many requests as the budget allows.
//! Each request is checked in the order of the transport (local memory first, then what the responder checks), moved in
//! chunks, and completed first at the responder, then at the requester; small ones several at a time. A request begins when the one before has ended, so
//! a fence asks for nothing that is not so already.

use std::sync::Arc;

use parking_lot::FairMutexGuard;
use pvrdma_verbs::{
    Access, QpState, QueueError, RemoteAddress, SendData, SendFlags, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
};

use crate::capture::local::Sender;
use crate::counters::{Counters, Tally};
use crate::hca::MAX_MESSAGE;
use crate::qp::requester::{Progress, Requester, check_request};
use crate::qp::responder::{Nak, Responder, remote_sge, rnr_delay};
use crate::qp::{Budget, Qp, Run};
use crate::sg::MemoryGuard;
use crate::sg::{Fault, Memory, SgList, transfer};
use pvrdma_roce::Outcome;

/// The responder of the peer, held.
struct Target<'a> {
    responder: FairMutexGuard<'a, Responder>,
    /// Whether it is connected to us.
    connected: bool,
}

/// One step of a request.
enum Step {
    /// It ended with success; bytes for its completion.
    Done(u32),
    /// A part was moved.
    Moved,
    /// Our side of it is wrong.
    Failed(WcStatus),
    /// The responder did not execute it.
    Refused(Nak),
}

impl From<Nak> for Step {
    fn from(nak: Nak) -> Self {
        Self::Refused(nak)
    }
}

/// Why a batch ended.
enum End {
    /// As it should.
    Run(Run),
    /// The request under way failed.
    Failed(WcStatus),
    /// The ring cannot be read any more.
    Broken(QueueError),
}

/// Runs requests of a connected QP.
pub(crate) fn run(qp: &Qp, requester: &mut Requester, budget: &mut Budget, tally: &mut Tally) -> Run {
    let peer = requester.resolve(qp);
    let held = MemoryGuard::open(&qp.adapter, peer.as_ref().map(|peer| &*peer.adapter));
    // From here on an unbind waits for us; one that came before the views has changed the generation.
    if requester.route.generation != qp.adapter.shared.fabric.generation() {
        return Run::Again;
    }
    let view = held.own().view;
    let mut target = None;
    let end = batch(qp, requester, peer.as_ref(), &held, &mut target, budget, tally);
    let told = publish(qp, requester, peer.as_ref(), &held, target.as_mut());
    // Our own responder may be flushed next, and a thread holds one responder at most.
    drop(target);
    match end {
        _ if !told => {
            Counters::bump(&qp.adapter.counters.request_errors);
            qp.set_error();
            Run::Again
        }
        End::Run(run) => run,
        End::Failed(status) => {
            qp.fail_request(requester, view, status);
            Run::Again
        }
        End::Broken(error) => {
            qp.fail_ring(view, error);
            Run::Again
        }
    }
}

/// Reports what has ended, at the responder first. `false`: the responder's side could not be told of everything.
#[inline]
fn publish(
    qp: &Qp,
    requester: &mut Requester,
    peer: Option<&Arc<Qp>>,
    held: &MemoryGuard<'_>,
    target: Option<&mut Target<'_>>,
) -> bool {
    let told = peer.zip(target).and_then(|(peer, target)| target.responder.end_batch(peer, held.peer().view));
    requester.publish(qp, held.own().view, told)
}

/// Runs requests until one of them, the budget or something else ends the batch. What ended last is not reported yet.
fn batch<'p>(
    qp: &Qp,
    requester: &mut Requester,
    peer: Option<&'p Arc<Qp>>,
    held: &MemoryGuard<'_>,
    target: &mut Option<Target<'p>>,
    budget: &mut Budget,
    tally: &mut Tally,
) -> End {
    let own = held.own();
    let capturing = qp.adapter.shared.captures.is_active();
    loop {
        let state = qp.state();
        if !matches!(state, QpState::Rts | QpState::Sqd) {
            return End::Run(Run::Again);
        }
        if requester.current.is_none() {
            if state == QpState::Sqd {
                return End::Run(Run::Idle);
            }
            match requester.next(own.view) {
                Ok(true) => {}
                Ok(false) => return End::Run(Run::Idle),
                Err(error) => return End::Broken(error),
            }
        }
        // Only now: a budget that ends with the last request leaves nothing to wake a worker for.
        if budget.spent() {
            return End::Run(Run::More);
        }
        match step(qp, requester, own, peer, held.peer(), target, capturing, budget, tally) {
            Step::Done(byte_len) => {
                budget.take_request();
                let length = requester.current.map_or(0, |progress| progress.length);
                requester.note_success(qp, own.view, byte_len);
                let drained = qp.state() == QpState::Sqd;
                if (drained || requester.news.is_due(length)) && !publish(qp, requester, peer, held, target.as_mut()) {
                    return End::Failed(WcStatus::RemoteOperation);
                }
                if drained {
                    requester.drained(qp, own.view);
                }
            }
            Step::Moved => {}
            // Nobody here has the address, but there may be somebody elsewhere.
            Step::Refused(Nak::Silence) if peer.is_none() && requester.take_wire(qp) => return End::Run(Run::Again),
            Step::Refused(Nak::Silence) => {
                if capturing {
                    write_down_loss(qp, requester, own);
                }
                requester.wait_for_answer(qp);
                return End::Run(Run::Idle);
            }
            Step::Refused(Nak::NotReady(code)) => match requester.wait_for_receive(qp, rnr_delay(code)) {
                Ok(()) => return End::Run(Run::Idle),
                Err(status) => return End::Failed(status),
            },
            Step::Refused(Nak::InvalidRequest) => return End::Failed(WcStatus::RemoteInvalidRequest),
            Step::Refused(Nak::RemoteAccess) => return End::Failed(WcStatus::RemoteAccess),
            Step::Refused(Nak::RemoteOperation) => return End::Failed(WcStatus::RemoteOperation),
            Step::Failed(status) => return End::Failed(status),
        }
    }
}

/// Takes the request under way one step further.
#[expect(clippy::too_many_arguments, reason = "the parts of a batch, which are borrowed separately")]
#[inline]
fn step<'p>(
    qp: &Qp,
    requester: &mut Requester,
    own: Memory<'_>,
    peer: Option<&'p Arc<Qp>>,
    peer_memory: Memory<'_>,
    target: &mut Option<Target<'p>>,
    capturing: bool,
    budget: &mut Budget,
    tally: &mut Tally,
) -> Step {
    let Requester { work, current, attrs, route, notes, .. } = requester;
    let Some(progress) = current else { return Step::Failed(WcStatus::General) };
    if !progress.checked {
        match check_request(work, own, qp.pd, attrs, MAX_MESSAGE) {
            Ok(length) => *progress = Progress { checked: true, length, ..Progress::default() },
            Err(status) => return Step::Failed(status),
        }
        let done = match &mut work.op {
            SendOp::LocalInvalidate(invalidate) => Some(own.mrs.invalidate(invalidate.key, qp.pd)),
            SendOp::FastRegister(request) => {
                Some(own.mrs.fast_register(request, qp.pd, |pages| qp.adapter.pin(own.view, pages)))
            }
            _ => None,
        };
        if let Some(done) = done {
            tally.key_operations += 1;
            return if done { Step::Done(0) } else { Step::Failed(WcStatus::LocalQpOperation) };
        }
    }
    let (Some(peer), Some(source)) = (peer, route.source) else { return Step::Refused(Nak::Silence) };
    let target = target.get_or_insert_with(|| {
        let mut responder = peer.responder.lock();
        let connected = responder.is_connected_to(peer, qp, source)
            && responder.own_address().is_some_and(|own| own.gid == attrs.av.dgid)
            && peer.qp_type == qp.qp_type;
        Target { responder, connected }
    });
    if !target.connected || !peer.receives() {
        return Step::Refused(Nak::Silence);
    }
    target.responder.first_request(peer, peer_memory.view);
    let responder = &mut *target.responder;
    let capture = capturing.then_some(Sender { qp, own, attrs, source, notes });
    let mut exchange = Exchange { qp, own, peer, memory: peer_memory, responder, work, progress, budget, capture };
    exchange.execute(tally).unwrap_or_else(Step::Refused)
}

/// Nobody answered the request under way.
#[cold]
fn write_down_loss(qp: &Qp, requester: &mut Requester, own: Memory<'_>) {
    let Requester { work, current: Some(progress), attrs, route, notes, .. } = requester else { return };
    if let Some(source) = route.source {
        let mut capture = Sender { qp, own, attrs, source, notes };
        capture.step(work, progress, progress.done, Outcome::Silence, None);
    }
}

/// A request meets the responder.
struct Exchange<'a> {
    qp: &'a Qp,
    own: Memory<'a>,
    peer: &'a Qp,
    memory: Memory<'a>,
    responder: &'a mut Responder,
    work: &'a SendWr,
    progress: &'a mut Progress,
    budget: &'a mut Budget,
    /// Somebody may be watching.
    capture: Option<Sender<'a>>,
}

impl<'a> Exchange<'a> {
    #[inline]
    fn execute(&mut self, tally: &mut Tally) -> Result<Step, Nak> {
        if self.progress.done == 0 {
            self.progress.epoch = self.responder.epoch;
        } else if self.progress.epoch != self.responder.epoch {
            // The responder was reset in the middle: what it had is lost.
            return Err(Nak::Silence);
        }
        let (length, before) = (self.progress.length, self.progress.done);
        let result = match self.work.op {
            SendOp::Send { data, .. } => self.send(data),
            SendOp::Write { remote, immediate } => self.write(remote, immediate),
            SendOp::Read { remote } => self.read(remote),
            SendOp::CompareSwap { remote, compare, swap } => {
                self.atomic(remote, |old| (old == compare).then_some(swap))
            }
            SendOp::FetchAdd { remote, add } => self.atomic(remote, |old| Some(old.wrapping_add(add))),
            // Handled before a peer is needed.
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                Ok(Step::Failed(WcStatus::LocalQpOperation))
            }
        };
        if let Some(capture) = &mut self.capture {
            let outcome = match result {
                Ok(Step::Done(_)) => Some(Outcome::Done),
                Ok(Step::Moved) => Some(Outcome::Moved),
                Ok(Step::Failed(_)) | Err(Nak::Silence) => None,
                Ok(Step::Refused(nak)) | Err(nak) => Some(nak.into()),
            };
            if let Some(outcome) = outcome {
                capture.step(self.work, self.progress, before, outcome, Some((self.peer, self.responder)));
            }
        }
        let step = result?;
        if matches!(step, Step::Done(_)) {
            match self.work.op {
                SendOp::Send { .. } => {
                    tally.rc_sends += 1;
                    tally.rc_send_bytes += length;
                }
                SendOp::Write { .. } => {
                    tally.rc_writes += 1;
                    tally.rc_write_bytes += length;
                }
                SendOp::Read { .. } => {
                    tally.rc_reads += 1;
                    tally.rc_read_bytes += length;
                }
                _ => tally.rc_atomics += 1,
            }
        }
        Ok(step)
    }

    fn send(&mut self, data: SendData) -> Result<Step, Nak> {
        let (peer, view) = (self.peer, self.memory.view);
        self.responder.take_receive(peer, view, Some(self.qp))?;
        let length = self.progress.length;
        if self.progress.done == 0 {
            self.responder.check_receive(peer, self.memory, length)?;
        }
        let list = self.responder.receive_list(peer, self.memory);
        match move_chunk(self.source(), list, self.progress, self.budget, false) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(Fault::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(Fault::Target) => {
                return Err(self.responder.fail_receive(peer, view, WcStatus::LocalProtection, Nak::RemoteOperation));
            }
        }
        if let SendData::Invalidate(key) = data
            && !self.memory.mrs.invalidate(key, peer.pd)
        {
            // The message arrived but is not what it says: both ends learn of it (interface specification 8.7).
            let status = WcStatus::RemoteInvalidRequest;
            return Err(self.responder.fail_receive(peer, view, status, Nak::RemoteOperation));
        }
        self.receive(WcOpcode::Recv, data);
        Ok(Step::Done(0))
    }

    fn write(&mut self, remote: RemoteAddress, immediate: Option<[u8; 4]>) -> Result<Step, Nak> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_WRITE)?;
            // A message of one packet needs its receive at once; a longer one with its last packet.
            if immediate.is_some() && length <= u64::from(self.responder.attrs.path_mtu.bytes()) {
                self.responder.take_receive(peer, view, Some(self.qp))?;
            }
            self.responder.check_remote(peer, self.memory, remote, length, Access::REMOTE_WRITE)?;
        }
        let sges = [remote_sge(remote, length)];
        let list = SgList { memory: self.memory, sges: &sges, pd: peer.pd, need: Access::REMOTE_WRITE };
        match move_chunk(self.source(), list, self.progress, self.budget, true) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(Fault::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(Fault::Target) => return Err(self.responder.refuse(peer, view, Nak::RemoteAccess)),
        }
        if let Some(immediate) = immediate {
            self.responder.take_receive(peer, view, Some(self.qp))?;
            self.receive(WcOpcode::RecvRdmaWithImmediate, SendData::Immediate(immediate));
        }
        Ok(Step::Done(0))
    }

    fn read(&mut self, remote: RemoteAddress) -> Result<Step, Nak> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_READ)?;
            self.responder.check_remote(peer, self.memory, remote, length, Access::REMOTE_READ)?;
        }
        let sges = [remote_sge(remote, length)];
        let source = SgList { memory: self.memory, sges: &sges, pd: peer.pd, need: Access::REMOTE_READ };
        let target = SgList { need: Access::LOCAL_WRITE, ..self.source() };
        match move_chunk(source, target, self.progress, self.budget, true) {
            Ok(true) => Ok(Step::Done(u32::try_from(length).unwrap_or(u32::MAX))),
            Ok(false) => Ok(Step::Moved),
            Err(Fault::Source) => Err(self.responder.refuse(peer, view, Nak::RemoteAccess)),
            Err(Fault::Target) => Ok(Step::Failed(WcStatus::LocalProtection)),
        }
    }

    fn atomic(&mut self, remote: RemoteAddress, change: impl Fn(u64) -> Option<u64>) -> Result<Step, Nak> {
        let (peer, view) = (self.peer, self.memory.view);
        self.responder.check_enabled(peer, view, Access::REMOTE_ATOMIC)?;
        if !remote.addr.is_multiple_of(8) {
            return Err(self.responder.refuse(peer, view, Nak::InvalidRequest));
        }
        self.responder.check_remote(peer, self.memory, remote, 8, Access::REMOTE_ATOMIC)?;
        let old = self
            .memory
            .mrs
            .lookup(remote.rkey, peer.pd, remote.addr, 8, Access::REMOTE_ATOMIC)
            .and_then(|region| region.locate(remote.addr))
            .and_then(|(bus, _)| view.update_u64(bus, change).ok());
        let Some(old) = old else { return Err(self.responder.refuse(peer, view, Nak::RemoteAccess)) };
        let target = SgList { need: Access::LOCAL_WRITE, ..self.source() };
        match target.write(0, &old.to_le_bytes()) {
            Ok(()) => Ok(Step::Done(8)),
            Err(_) => Ok(Step::Failed(WcStatus::LocalProtection)),
        }
    }

    /// The request's own list, for reading.
    fn source(&self) -> SgList<'a> {
        SgList { memory: self.own, sges: &self.work.sges, pd: self.qp.pd, need: Access::empty() }
    }

    /// Ends the receive in use.
    fn receive(&mut self, opcode: WcOpcode, data: SendData) {
        let byte_len = u32::try_from(self.progress.length).unwrap_or(u32::MAX);
        let solicited = self.work.flags.contains(SendFlags::SOLICITED);
        self.responder.note_receive(self.peer, opcode, |completion| {
            completion.byte_len = byte_len;
            completion.solicited = solicited;
            match data {
                SendData::None => {}
                SendData::Immediate(bytes) => {
                    completion.flags = WcFlags::IMMEDIATE;
                    completion.immediate = bytes;
                }
                SendData::Invalidate(key) => {
                    completion.flags = WcFlags::INVALIDATED;
                    completion.invalidated_key = key;
                }
            }
        });
    }
}

/// Moves as much of a message as the budget allows. `true` when all of it has been moved.
#[inline]
fn move_chunk(
    from: SgList<'_>,
    to: SgList<'_>,
    progress: &mut Progress,
    budget: &mut Budget,
    ordered: bool,
) -> Result<bool, Fault> {
    let left = progress.length.saturating_sub(progress.done);
    if left == 0 {
        return Ok(true);
    }
    let count = left.min(budget.bytes().max(1));
    transfer((from, progress.done), (to, progress.done), count, ordered && count == left)?;
    budget.take_bytes(count);
    progress.done += count;
    Ok(count == left)
}
