//! What the transport wants from the engine, answered with the checks and completions that local delivery uses.

use std::sync::atomic::{Ordering, fence};

use pvrdma_verbs::{Access, QpState, RemoteAddress, SendOp, SendWr, Sge, WcFlags, WcStatus};

use crate::counters::{Counters, Tally};
use crate::hca::MAX_MESSAGE;
use crate::qp::Qp;
use crate::qp::requester::{Requester, check_request};
use crate::qp::responder::{Nak, Responder, remote_sge};
use crate::sg::{Memory, SgList, total};
use pvrdma_roce::{AtomicChange, Fault, NakReason, Received, RequesterOps, ResponderOps};

/// The requester's side.
pub(crate) struct RequesterHooks<'a> {
    pub(crate) qp: &'a Qp,
    /// Without its state for the wire, which is what calls us.
    pub(crate) requester: &'a mut Requester,
    pub(crate) memory: Memory<'a>,
    pub(crate) tally: &'a mut Tally,
}

impl RequesterHooks<'_> {
    fn count(&mut self, work: &SendWr) {
        let (length, tally) = (total(&work.sges), &mut *self.tally);
        let (requests, bytes) = match work.op {
            SendOp::Send { .. } => (&mut tally.rc_sends, &mut tally.rc_send_bytes),
            SendOp::Write { .. } => (&mut tally.rc_writes, &mut tally.rc_write_bytes),
            SendOp::Read { .. } => (&mut tally.rc_reads, &mut tally.rc_read_bytes),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => return tally.rc_atomics += 1,
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                return;
            }
        };
        *requests += 1;
        *bytes += length;
    }

    fn list<'s>(&'s self, sges: &'s [Sge], need: Access) -> SgList<'s> {
        SgList { memory: self.memory, sges, pd: self.qp.pd, need }
    }
}

impl RequesterOps for RequesterHooks<'_> {
    fn begin(&mut self, work: &mut SendWr) -> Result<(), WcStatus> {
        check_request(work, self.memory, self.qp.pd, &self.requester.attrs, MAX_MESSAGE)?;
        let mrs = self.memory.mrs;
        let done = match &mut work.op {
            SendOp::LocalInvalidate(invalidate) => mrs.invalidate(invalidate.key, self.qp.pd),
            SendOp::FastRegister(request) => {
                let (adapter, view) = (&self.qp.adapter, self.memory.view);
                mrs.fast_register(request, self.qp.pd, |pages| adapter.pin(view, pages))
            }
            _ => return Ok(()),
        };
        self.tally.key_operations += 1;
        if done { Ok(()) } else { Err(WcStatus::LocalQpOperation) }
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.list(sges, Access::empty()).read(offset, out).map_err(|_| Fault)
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), Fault> {
        self.list(sges, Access::LOCAL_WRITE).write(offset, data).map_err(|_| Fault)
    }

    fn finish(&mut self, work: &SendWr, status: WcStatus, byte_len: u32) {
        match status {
            WcStatus::Success => self.count(work),
            WcStatus::Flushed => self.tally.flushed += 1,
            _ => Counters::bump(&self.qp.adapter.counters.request_errors),
        }
        self.requester.finish(self.qp, self.memory.view, work, status, byte_len);
    }

    fn failed(&mut self) {
        self.qp.set_error();
    }
}

impl From<Nak> for NakReason {
    fn from(nak: Nak) -> Self {
        match nak {
            Nak::Silence => Self::Silence,
            Nak::NotReady(timer) => Self::NotReady(timer),
            Nak::InvalidRequest => Self::InvalidRequest,
            Nak::RemoteAccess => Self::RemoteAccess,
            Nak::RemoteOperation => Self::RemoteOperation,
        }
    }
}

/// The responder's side.
pub(crate) struct ResponderHooks<'a> {
    pub(crate) qp: &'a Qp,
    /// Without its state for the wire, which is what calls us.
    pub(crate) responder: &'a mut Responder,
    pub(crate) memory: Memory<'a>,
}

impl ResponderHooks<'_> {
    fn remote<'s>(&'s self, sges: &'s [Sge], need: Access) -> SgList<'s> {
        SgList { memory: self.memory, sges, pd: self.qp.pd, need }
    }
}

impl ResponderOps for ResponderHooks<'_> {
    fn request_arrived(&mut self) {
        self.responder.first_request(self.qp, self.memory.view);
    }

    fn take_receive(&mut self) -> Result<(), NakReason> {
        Ok(self.responder.take_receive(self.qp, self.memory.view, None)?)
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        let (qp, memory) = (self.qp, self.memory);
        self.responder.check_receive(qp, memory, offset.saturating_add(data.len() as u64))?;
        let copied = self.responder.receive_list(qp, memory).write(offset, data);
        copied.map_err(|_| {
            let status = WcStatus::LocalProtection;
            self.responder.fail_receive(qp, memory.view, status, Nak::RemoteOperation).into()
        })
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        let published = self.responder.complete_receive(self.qp, self.memory.view, received.opcode, |completion| {
            completion.byte_len = received.length;
            completion.solicited = received.solicited;
            if let Some(immediate) = received.immediate {
                completion.flags |= WcFlags::IMMEDIATE;
                completion.immediate = immediate;
            }
            if let Some(key) = received.invalidated {
                completion.flags |= WcFlags::INVALIDATED;
                completion.invalidated_key = key;
            }
        });
        // The receiver lost the news of this message; its QP is in the error state already.
        published.map_err(|_| NakReason::RemoteOperation)
    }

    fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        if self.memory.mrs.invalidate(key, self.qp.pd) {
            return Ok(());
        }
        // The message arrived but is not what it says: both ends learn of it (interface specification 8.7).
        let status = WcStatus::RemoteInvalidRequest;
        Err(self.responder.fail_receive(self.qp, self.memory.view, status, Nak::RemoteOperation).into())
    }

    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason> {
        Ok(self.responder.check_enabled(self.qp, self.memory.view, need)?)
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), NakReason> {
        Ok(self.responder.check_remote(self.qp, self.memory, remote, length, need)?)
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), Fault> {
        // Who polls the end of a buffer must find the rest there: the last word, or byte where it is not aligned, comes
        // after all others.
        let end = remote.addr.wrapping_add(data.len() as u64);
        let tail = if end.is_multiple_of(8) { 8 } else { 1 };
        let (body, tail) = data.split_at(data.len().saturating_sub(tail));
        let sges = [remote_sge(remote, data.len() as u64)];
        let list = self.remote(&sges, Access::REMOTE_WRITE);
        list.write(0, body).map_err(|_| Fault)?;
        fence(Ordering::Release);
        list.write(body.len() as u64, tail).map_err(|_| Fault)
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), Fault> {
        let sges = [remote_sge(remote, out.len() as u64)];
        self.remote(&sges, Access::REMOTE_READ).read(0, out).map_err(|_| Fault)
    }

    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, Fault> {
        let Memory { view, mrs } = self.memory;
        mrs.lookup(remote.rkey, self.qp.pd, remote.addr, 8, Access::REMOTE_ATOMIC)
            .and_then(|region| region.locate(remote.addr))
            .and_then(|(bus, _)| view.update_u64(bus, |old| change.apply(old)).ok())
            .ok_or(Fault)
    }

    fn refuse(&mut self, refusal: NakReason) {
        let nak = match refusal {
            NakReason::Silence => Nak::Silence,
            NakReason::NotReady(timer) => Nak::NotReady(timer),
            NakReason::InvalidRequest => Nak::InvalidRequest,
            NakReason::RemoteAccess => Nak::RemoteAccess,
            NakReason::RemoteOperation => Nak::RemoteOperation,
        };
        self.responder.refuse(self.qp, self.memory.view, nak);
    }
}

/// Whether requests of this QP are sent, and answers to them taken.
pub(crate) fn requests(qp: &Qp) -> bool {
    matches!(qp.state(), QpState::Rts | QpState::Sqd)
}
