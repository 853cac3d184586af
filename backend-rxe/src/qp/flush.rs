//! End of a QP, or of its send half: the request in flight fails, and the queues are flushed (IBA 10.3.1.7).

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{QpEvent, QueueError};
use pvrdma_verbs_types::{QpAttrs, QpState, WcStatus};

use super::Qp;
use super::error_cause::ErrorCause;
use super::flight::FlightEvent;
use super::requester::Requester;
use super::responder::Responder;
use crate::budget::Budget;
use crate::counters::{Counters, Tally};
use crate::failures::QpFailure;

impl Qp {
    /// Releases the queues for good. The caller holds both halves.
    pub(crate) fn end(&self, requester: &mut Requester, responder: &mut Responder) {
        self.state.reset();
        requester.end(self);
        responder.end();
    }

    /// Ends the request in flight with an error, and with it the QP, or the send half of a datagram QP. The new state
    /// triggers the flush in the next iteration of the caller's loop.
    pub(crate) fn fail_request(&self, requester: &mut Requester, view: &DmaView<'_>, status: WcStatus) {
        Counters::bump(&self.adapter.counters.request_errors);
        self.record(FlightEvent::Request(status));
        requester.end_request(self, view, status);
        if self.qp_type.is_datagram() {
            // Datagram QPs continue to receive; the consumer moves them back to RTS.
            if self.state.change(QpState::Rts, QpState::Sqe) || self.state.change(QpState::Sqd, QpState::Sqe) {
                return;
            }
        }
        self.state.enter_error(ErrorCause::Requester);
    }

    /// Ends the QP after the peer's completion queue had no room for the receive of a request. That request has its
    /// completion already, with the status that follows from the NAK of a responder beyond the wire.
    #[cold]
    pub(crate) fn fail_lost_receive(&self) {
        Counters::bump(&self.adapter.counters.request_errors);
        self.record(FlightEvent::Request(WcStatus::RemoteOperation));
        self.state.enter_error(ErrorCause::Requester);
    }

    /// Records a rare event.
    #[cold]
    pub(crate) fn record(&self, event: FlightEvent) {
        self.state.flight.record(self.adapter.engine.now(), event);
    }

    /// Logs the history of a failed queue pair when it is flushed for the first time.
    #[cold]
    pub(crate) fn tell_failure(&self, attrs: &QpAttrs) {
        let Some(failure) = self.state.flight.take_failure(self.adapter.engine.now()) else { return };
        let (qpn, peer) = (self.qpn, attrs.av.dgid);
        let (cause, history) = (failure.cause(), failure.to_string());
        let line = format_args!("QP {qpn} to {peer} failed ({}) by {history}", cause.word());
        let logged = self.adapter.log.warn_or_not(module_path!(), line);
        self.adapter.failures.tell(&QpFailure { qpn, peer, cause, history, logged });
    }

    /// Handles a send ring that can no longer be read.
    pub(crate) fn fail_ring(&self, view: &DmaView<'_>, error: QueueError) {
        self.adapter.log.warn(module_path!(), format_args!("send queue of QP {}: {error}", self.qpn));
        Counters::bump(&self.adapter.counters.request_errors);
        self.record(FlightEvent::SendQueue);
        if self.state.enter_error(ErrorCause::Requester) {
            self.event(view, QpEvent::Fatal);
        }
    }
}

impl Requester {
    /// Flushes the request in flight and those in the ring. Returns `false` if the budget ended first.
    pub(crate) fn flush(&mut self, qp: &Qp, view: &DmaView<'_>, budget: &mut Budget, tally: &mut Tally) -> bool {
        self.stop_waiting();
        loop {
            if self.current.is_some() {
                self.end_request(qp, view, WcStatus::Flushed);
                tally.flushed += 1;
            }
            if budget.spent() {
                return false;
            }
            budget.take_request();
            // A broken ring has no requests that could be flushed.
            if !matches!(self.next(view), Ok(true)) {
                return true;
            }
        }
    }
}

impl Responder {
    /// Flushes the receive in use and those in the ring. Returns `false` if the budget ended first.
    pub(crate) fn flush(&mut self, qp: &Qp, view: &DmaView<'_>, budget: &mut Budget, tally: &mut Tally) -> bool {
        self.forget_message();
        self.end_receive(qp, view, WcStatus::Flushed);
        if qp.srq.is_some() {
            if !std::mem::replace(&mut self.last_wqe_raised, true) {
                qp.event(view, QpEvent::LastWqeReached);
            }
            return true;
        }
        while !self.broken
            && let Some(source) = &mut self.source
        {
            if budget.spent() {
                return false;
            }
            budget.take_request();
            match source.pop(view, &mut self.recv) {
                Ok(true) => {
                    self.in_use = true;
                    self.end_receive(qp, view, WcStatus::Flushed);
                    tally.flushed += 1;
                }
                Ok(false) => break,
                Err(_) => self.broken = true,
            }
        }
        true
    }
}
