//! Execution of a request at the responder of a peer on this host.

use pvrdma_guest_memory::Direction;
use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RemoteAddress, SendData, SendFlags, SendOp, SendWr,
    WcOpcode, WcStatus,
};
use vm_memory::VolatileSlice;

use super::own_side::{Moving, OwnSide};
use crate::budget::Budget;
use crate::capture::StepOutcome;
use crate::capture::local::{Answering, ConnectionTrace, refusal};
use crate::counters::Tally;
use crate::faults::{Fault, Site};
use crate::qp::Qp;
use crate::qp::requester::Progress;
use crate::qp::responder::{Responder, check_remote, execute_atomic, is_revoked, remote_list, remote_sge};
use crate::sg::{FaultyList, Located, Memory, SgList};

/// One step of a request.
pub(super) enum Step {
    /// The request succeeded; bytes for its completion.
    Done(u32),
    /// A part of the message was moved.
    Moved,
    /// The requester's side of the request is invalid.
    Failed(WcStatus),
    /// The responder did not execute the request.
    Refused(NakReason),
}

impl Step {
    /// Returns the outcome that captures show. `None`: the responder was not involved.
    pub(super) const fn outcome(&self) -> Option<StepOutcome> {
        match self {
            Self::Done(_) => Some(StepOutcome::Completed),
            Self::Moved => Some(StepOutcome::Moved),
            Self::Failed(_) => None,
            Self::Refused(nak) => Some(refusal(*nak)),
        }
    }
}

/// Execution of a request at the responder.
pub(super) struct Exchange<'a, O> {
    pub(super) qp: &'a Qp,
    pub(super) own: O,
    pub(super) peer: &'a Qp,
    pub(super) memory: Memory<'a>,
    pub(super) responder: &'a mut Responder,
    pub(super) work: &'a SendWr,
    pub(super) progress: &'a mut Progress,
    pub(super) budget: &'a mut Budget,
    /// One of the two devices has requested faults.
    pub(super) faults: bool,
    /// Present while captures are active.
    pub(super) trace: Option<ConnectionTrace<'a>>,
}

/// Checks a list of the responder. A step that moves the whole message passes its `length`, and gets the memory for
/// [`Located`] if it is contiguous. A step that moves only a part passes `None`, because memory that is returned for
/// writing counts as written, all of it.
#[inline(always)]
fn check<'m>(
    memory: Memory<'m>,
    list: SgList<'_>,
    length: Option<u64>,
    direction: Direction,
) -> Result<Option<VolatileSlice<'m>>, AccessError> {
    match length {
        Some(length) => memory.check(list.sges, (list.pd, list.need), length, direction),
        None if list.allowed() => Ok(None),
        None => Err(AccessError),
    }
}

impl<'a, O: OwnSide> Exchange<'a, O> {
    /// Advances the request by one step.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(super) fn execute(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        if self.faults {
            return self.execute_with_faults(tally);
        }
        self.execute_once(tally)
    }

    /// As [`Self::execute`], with the faults of the requester's device.
    #[cold]
    fn execute_with_faults(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        let step = if self.progress.executed {
            // The responder recognises a duplicate, and answers it again (IBA 9.7.5.1.4). The previous value of an
            // atomic is in the request's memory already.
            let is_atomic = matches!(self.work.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
            Step::Done(if is_atomic { 8 } else { 0 })
        } else {
            self.execute_once(tally)?
        };
        if !matches!(step, Step::Done(_)) {
            return Ok(step);
        }
        match self.qp.fault(Site::Response) {
            Some(Fault::BadResponse) => Ok(Step::Failed(WcStatus::BadResponse)),
            Some(_) => {
                // A duplicate READ is executed again.
                self.progress.executed = !matches!(self.work.op, SendOp::Read { .. });
                Err(NakReason::Silence)
            }
            None => Ok(step),
        }
    }

    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    fn execute_once(&mut self, tally: &mut Tally) -> Result<Step, NakReason> {
        if self.progress.done == 0 {
            self.progress.epoch = self.responder.epoch;
        } else if self.progress.epoch != self.responder.epoch {
            // The responder was reset in the middle of the message and no longer has the received part.
            return Err(NakReason::Silence);
        }
        let before = self.progress.done;
        let result = match self.work.op {
            SendOp::Send { data, .. } => self.send(data),
            SendOp::Write { remote, immediate } => self.write(remote, immediate),
            SendOp::Read { remote } => self.read(remote),
            SendOp::CompareSwap { remote, compare, swap } => {
                self.atomic(remote, AtomicChange::CompareSwap { compare, swap })
            }
            SendOp::FetchAdd { remote, add } => self.atomic(remote, AtomicChange::FetchAdd { add }),
            // Handled before a peer is needed.
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                Ok(Step::Failed(WcStatus::LocalQpOperation))
            }
        };
        self.record(&result, before);
        let step = result?;
        if matches!(step, Step::Done(_)) {
            tally.count_request(&self.work.op, self.progress.length);
        }
        Ok(step)
    }

    /// Records a step in active captures.
    #[inline]
    fn record(&mut self, result: &Result<Step, NakReason>, before: u64) {
        // The trace is moved out of `self` for the call: passing a reference to a field to a function that is not
        // inlined would force the whole exchange into memory instead of registers.
        let Some(mut trace) = self.trace.take() else { return };
        let outcome = match result {
            Ok(step) => step.outcome(),
            Err(NakReason::Silence) => None,
            Err(nak) => Some(refusal(*nak)),
        };
        let Some(outcome) = outcome else { return };
        let answering = Answering::of(self.peer, self.responder, self.qp.qpn);
        trace.step(self.work, self.progress, before, outcome, Some(answering));
    }

    fn send(&mut self, data: SendData) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        self.responder.take_receive(peer, view, Some(&self.qp.state))?;
        let length = self.progress.length;
        let mut memory = None;
        if self.progress.done == 0 {
            let whole = self.is_one_step();
            memory = self.responder.check_receive_by(peer, self.memory, length, |list| {
                check(self.memory, list, whole.then_some(length), Direction::Write)
            })?;
        }
        let list = Located { list: self.responder.receive_list(peer, self.memory), memory };
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.put(moving, list, false) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(FaultyList::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(FaultyList::Target) => return Err(self.responder.receive_fault(peer, view)),
        }
        if let SendData::Invalidate(key) = data {
            self.responder.invalidate(peer, self.memory, key)?;
        }
        self.receive(WcOpcode::Recv, data);
        Ok(Step::Done(0))
    }

    #[inline(always)]
    fn write(&mut self, remote: RemoteAddress, immediate: Option<[u8; 4]>) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        // A message of one packet needs its receive immediately; a longer one needs it only with its last packet.
        let takes_first = immediate.is_some() && length <= u64::from(self.responder.attrs.path_mtu.bytes());
        let sges = [remote_sge(remote, length)];
        let mut list = Located::from(remote_list(peer, self.memory, &sges, Access::REMOTE_WRITE));
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_WRITE)?;
            if takes_first {
                self.responder.take_receive(peer, view, Some(&self.qp.state))?;
            }
            match self.check_range(list.list, remote, Direction::Write) {
                Ok(memory) => list.memory = memory,
                Err(AccessError) => return Err(self.deny_write(takes_first)),
            }
        }
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.put(moving, list, true) {
            Ok(true) => {}
            Ok(false) => return Ok(Step::Moved),
            Err(FaultyList::Source) => return Ok(Step::Failed(WcStatus::LocalProtection)),
            Err(FaultyList::Target) => return Err(self.deny_write(takes_first)),
        }
        if let Some(immediate) = immediate {
            self.responder.take_receive(peer, view, Some(&self.qp.state))?;
            self.receive(WcOpcode::RecvRdmaWithImmediate, SendData::Immediate(immediate));
        }
        Ok(Step::Done(0))
    }

    /// Returns `true` if this step can move the whole message.
    #[inline]
    const fn is_one_step(&self) -> bool {
        self.progress.length <= self.budget.bytes()
    }

    /// Checks the range of a WRITE or READ, as [`check_remote`] does. Returns its memory for [`Located`].
    #[inline(always)]
    fn check_range(
        &self,
        list: SgList<'_>,
        remote: RemoteAddress,
        direction: Direction,
    ) -> Result<Option<VolatileSlice<'a>>, AccessError> {
        let length = self.progress.length;
        if length == 0 {
            return Ok(None);
        }
        let memory = check(self.memory, list, self.is_one_step().then_some(length), direction)?;
        if is_revoked(self.peer, remote.rkey) { Err(AccessError) } else { Ok(memory) }
    }

    /// Refuses a WRITE to memory that cannot be accessed.
    fn deny_write(&mut self, took_receive: bool) -> NakReason {
        let (peer, view) = (self.peer, self.memory.view);
        if took_receive {
            self.responder.refuse_immediate(peer, view)
        } else {
            self.responder.refuse(peer, view, NakReason::RemoteAccess)
        }
    }

    fn read(&mut self, remote: RemoteAddress) -> Result<Step, NakReason> {
        let (peer, view) = (self.peer, self.memory.view);
        let length = self.progress.length;
        let sges = [remote_sge(remote, length)];
        let mut source = Located::from(remote_list(peer, self.memory, &sges, Access::REMOTE_READ));
        if self.progress.done == 0 {
            self.responder.check_enabled(peer, view, Access::REMOTE_READ)?;
            match self.check_range(source.list, remote, Direction::Read) {
                Ok(memory) => source.memory = memory,
                Err(AccessError) => return Err(self.responder.refuse(peer, view, NakReason::RemoteAccess)),
            }
        }
        let moving = Moving { qp: self.qp, work: self.work, progress: self.progress, budget: self.budget };
        match self.own.get(moving, source) {
            Ok(true) => Ok(Step::Done(u32::try_from(length).unwrap_or(u32::MAX))),
            Ok(false) => Ok(Step::Moved),
            Err(FaultyList::Source) => Err(self.responder.refuse(peer, view, NakReason::RemoteAccess)),
            Err(FaultyList::Target) => Ok(Step::Failed(WcStatus::LocalProtection)),
        }
    }

    /// Changes eight bytes of the peer and writes the previous value to the request's SGE list.
    fn atomic(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<Step, NakReason> {
        let (peer, memory) = (self.peer, self.memory);
        self.responder.check_enabled(peer, memory.view, Access::REMOTE_ATOMIC)?;
        if !remote.addr.is_multiple_of(8) {
            return Err(self.responder.refuse(peer, memory.view, NakReason::InvalidRequest));
        }
        let checked = check_remote(peer, memory, remote, 8, Access::REMOTE_ATOMIC);
        let Ok(old) = checked.and_then(|()| execute_atomic(peer, memory, remote, change)) else {
            return Err(self.responder.refuse(peer, memory.view, NakReason::RemoteAccess));
        };
        let stored = self.own.store(self.qp, self.work, old.to_le_bytes());
        Ok(stored.map_or(Step::Failed(WcStatus::LocalProtection), |()| Step::Done(8)))
    }

    /// Completes the receive in use.
    fn receive(&mut self, opcode: WcOpcode, data: SendData) {
        let (immediate, invalidated) = match data {
            SendData::None => (None, None),
            SendData::Immediate(bytes) => (Some(bytes), None),
            SendData::Invalidate(key) => (None, Some(key)),
        };
        let length = u32::try_from(self.progress.length).unwrap_or(u32::MAX);
        let solicited = self.work.flags.contains(SendFlags::SOLICITED);
        self.responder.push_receive(self.peer, &Received { opcode, length, immediate, invalidated, solicited });
    }
}
