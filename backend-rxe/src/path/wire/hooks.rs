//! Callbacks of the transport for a queue pair. They use the same checks and completions as local delivery.

use std::sync::atomic::{Ordering, fence};

use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RemoteAddress, RequesterOps, ResponderOps, SendWr, Sge,
    WcStatus,
};

use super::turns::PortTurns;
use crate::counters::{Counters, Tally};
use crate::qp::Qp;
use crate::qp::error_cause::ErrorCause;
use crate::qp::flight::FlightEvent;
use crate::qp::requester::{Requester, begin_counted_request, begin_request};
use crate::qp::responder::{Responder, check_remote, execute_atomic, remote_list, remote_sge};
use crate::sg::{Memory, SgList};

/// Callbacks of the requester.
pub(in crate::path) struct RequesterHooks<'a> {
    pub(in crate::path) qp: &'a Qp,
    pub(in crate::path) requester: &'a mut Requester,
    pub(in crate::path) memory: Memory<'a>,
    pub(in crate::path) tally: &'a mut Tally,
    /// The next request that begins was counted for the faults of the device before.
    pub(in crate::path) counted: &'a mut bool,
}

impl RequesterHooks<'_> {
    fn list<'s>(&'s self, sges: &'s [Sge], need: Access) -> SgList<'s> {
        SgList { memory: self.memory, sges, pd: self.qp.pd, need }
    }
}

impl RequesterOps for RequesterHooks<'_> {
    fn begin(&mut self, work: &mut SendWr) -> Result<(), WcStatus> {
        let Self { qp, requester, memory, tally, counted } = self;
        let begun = if std::mem::take(*counted) {
            begin_counted_request(qp, &requester.attrs, work, *memory, tally)
        } else {
            begin_request(qp, &requester.attrs, work, *memory, tally)
        };
        begun.map(|_| ())
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.list(sges, Access::empty()).read(offset, out)
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.list(sges, Access::LOCAL_WRITE).write(offset, data)
    }

    fn finish(&mut self, work: &SendWr, status: WcStatus, byte_len: u32) {
        match status {
            WcStatus::Success => self.tally.count_request(&work.op, Sge::total_length(&work.sges)),
            WcStatus::Flushed => self.tally.flushed += 1,
            _ => {
                Counters::bump(&self.qp.adapter.counters.request_errors);
                self.qp.record(FlightEvent::Request(status));
            }
        }
        self.requester.finish(self.qp, self.memory.view, work, status, byte_len);
    }

    fn failed(&mut self) {
        self.qp.state.enter_error(ErrorCause::Requester);
    }
}

/// Callbacks of the responder.
pub(in crate::path) struct ResponderHooks<'a> {
    pub(in crate::path) qp: &'a Qp,
    pub(in crate::path) responder: &'a mut Responder,
    pub(in crate::path) memory: Memory<'a>,
    /// Record of requests that wait for the guest to post a receive. `None`: such a request is answered by an RNR NAK
    /// immediately.
    pub(in crate::path) wait: Option<&'a PortTurns>,
    /// The request waits for a receive. It was not executed, and must be passed in again.
    pub(in crate::path) waits: bool,
}

impl ResponderOps for ResponderHooks<'_> {
    fn request_arrived(&mut self) {
        self.responder.first_request(self.qp, self.memory.view);
    }

    fn take_receive(&mut self) -> Result<(), NakReason> {
        let taken = self.responder.take_receive(self.qp, self.memory.view, None);
        let (Err(NakReason::NotReady(_)), Some(turns)) = (taken, self.wait) else { return taken };
        if self.qp.adapter.faults.is_active() {
            // A requested fault may have withheld the receive, and then no post ends the wait.
            return taken;
        }
        // The flag is set before the second check. A receive that is posted after that check wakes the queue pair,
        // whose run must find the flag set: in the other order it might not, and the request would wait for nothing.
        turns.hold_responder();
        let taken = self.responder.take_receive(self.qp, self.memory.view, Some(&self.qp.state));
        self.waits = matches!(taken, Err(NakReason::NotReady(_)));
        if self.waits { Err(NakReason::Silence) } else { taken }
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        let (qp, memory) = (self.qp, self.memory);
        self.responder.check_receive(qp, memory, offset.saturating_add(data.len() as u64))?;
        let copied = self.responder.receive_list(qp, memory).write(offset, data);
        copied.map_err(|_| self.responder.receive_fault(qp, memory.view))
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        let published = self.responder.complete_receive(self.qp, self.memory.view, &received);
        // The receiver lost the completion of this message, so its QP is already in the error state.
        published.map_err(|_| NakReason::RemoteOperation)
    }

    fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        self.responder.invalidate(self.qp, self.memory, key)
    }

    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason> {
        self.responder.check_enabled(self.qp, self.memory.view, need)
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), AccessError> {
        check_remote(self.qp, self.memory, remote, length, need)
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        // A program that polls the end of a buffer must find the rest of the data there. So the last word, or the last
        // byte if it is not aligned, is written after all others.
        let end = remote.addr.wrapping_add(data.len() as u64);
        let tail = if end.is_multiple_of(8) { 8 } else { 1 };
        let (body, tail) = data.split_at(data.len().saturating_sub(tail));
        let sges = [remote_sge(remote, data.len() as u64)];
        let list = remote_list(self.qp, self.memory, &sges, Access::REMOTE_WRITE);
        list.write(0, body)?;
        fence(Ordering::Release);
        list.write(body.len() as u64, tail)
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        let sges = [remote_sge(remote, out.len() as u64)];
        remote_list(self.qp, self.memory, &sges, Access::REMOTE_READ).read(0, out)
    }

    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, AccessError> {
        execute_atomic(self.qp, self.memory, remote, change)
    }

    fn refuse(&mut self, refusal: NakReason) {
        self.responder.refuse(self.qp, self.memory.view, refusal);
    }

    fn refuse_immediate(&mut self) {
        self.responder.refuse_immediate(self.qp, self.memory.view);
    }
}
