//! Requests of the peer: takes receives, executes requests, and ends the QP after a refusal.
//!
//! This module does not depend on the path of a request: local delivery copies between two regions, and the transport
//! of the wire scatters packets. Both perform the same checks, in the order of IBA 9.7.4.1, through the same methods. A
//! failed check returns a [`NakReason`]; by then the consumer has been notified by the completion of the receive or by
//! an event, and the QP is in its error state.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{CqOverrun, QpEvent, QueueError};
use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, Completion, NakReason, NetworkType, QpState, Qpn, Received, RemoteAddress, Sge,
    WcFlags, WcOpcode, WcStatus,
};
use std::sync::Arc;

use super::state::Responder;
use crate::budget::Budget;
use crate::counters::{Counters, Tally};
use crate::faults::Site;
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::error_cause::ErrorCause;
use crate::qp::flight::FlightEvent;
use crate::qp::state::StateCell;
use crate::sg::{FaultyList, Memory, SgList};
use crate::ud_header::HEADER_LEN;

/// Number of receives that a refusal flushes immediately. The ready queue flushes the rest.
const FLUSH_AT_ONCE: u32 = 64;

/// A received datagram, without its payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceivedDatagram {
    /// QPN of the sender.
    pub(crate) source: Qpn,
    /// Must be equal to the receiver's Q_Key.
    pub(crate) qkey: u32,
    pub(crate) immediate: Option<[u8; 4]>,
    /// The sender asked for a solicited event.
    pub(crate) solicited: bool,
    pub(crate) network: NetworkType,
    pub(crate) service_level: u8,
    /// The first bytes of the receive.
    pub(crate) header: [u8; HEADER_LEN],
    /// Number of bytes behind the header.
    pub(crate) payload_len: u64,
}

impl Responder {
    /// Returns `true` if `sender`, which sends from `from`, is the peer that this QP is connected to. `generation` is
    /// the directory's.
    pub(crate) fn is_connected_to(&mut self, qp: &Qp, sender: &Qp, from: BoundGid, generation: u64) -> bool {
        let own = match self.own_gid {
            Some((at, own)) if at == generation => own,
            _ => {
                let own = qp.usable_source(self.attrs.av.sgid_index);
                self.own_gid = Some((generation, own));
                own
            }
        };
        // Encapsulation and VLAN are part of the address.
        self.attrs.dest_qpn == sender.qpn && own.is_some_and(|own| own.beside(self.attrs.av.dgid) == from)
    }

    /// Returns the address to which requests must be sent, if the source index is bound.
    pub(crate) fn own_address(&self) -> Option<BoundGid> {
        self.own_gid.and_then(|(_, own)| own)
    }

    /// Handles the arrival of a request: the first one establishes the communication.
    #[inline]
    pub(crate) fn first_request(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if !self.established {
            self.established = true;
            if qp.state() == QpState::Rtr {
                qp.event(view, QpEvent::CommunicationEstablished);
            }
        }
    }

    /// Takes a receive from the queue, unless one is in use. If the queue is empty, the next post wakes `waiter`.
    #[inline]
    pub(crate) fn take_receive(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        waiter: Option<&Arc<StateCell>>,
    ) -> Result<(), NakReason> {
        if self.in_use {
            return Ok(());
        }
        if qp.adapter.faults.is_active() {
            return self.take_receive_with_faults(qp, view, waiter);
        }
        self.take_next_receive(qp, view, waiter)
    }

    #[inline]
    pub(in crate::qp) fn take_next_receive(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        waiter: Option<&Arc<StateCell>>,
    ) -> Result<(), NakReason> {
        match self.pop(qp, view, waiter) {
            Ok(true) => {}
            Ok(false) => return Err(NakReason::NotReady(self.attrs.min_rnr_timer)),
            Err(error) => return Err(self.broken_queue(qp, view, error)),
        }
        self.in_use = true;
        if self.recv.malformed {
            return Err(self.fail_receive(qp, view, WcStatus::LocalQpOperation, NakReason::RemoteOperation));
        }
        Ok(())
    }

    fn pop(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        waiter: Option<&Arc<StateCell>>,
    ) -> Result<bool, Option<QueueError>> {
        if self.broken {
            return Err(None);
        }
        if let Some(srq) = &qp.srq {
            return srq.pop(view, &mut self.recv, waiter);
        }
        let Some(source) = &mut self.source else { return Ok(false) };
        let mut popped = source.pop(view, &mut self.recv)?;
        if !popped && let Some(waiter) = waiter {
            qp.await_receive(waiter);
            popped = source.pop(view, &mut self.recv)?;
        }
        Ok(popped)
    }

    pub(in crate::qp) fn broken_queue(&mut self, qp: &Qp, view: &DmaView<'_>, error: Option<QueueError>) -> NakReason {
        self.broken = true;
        if let Some(error) = error {
            qp.adapter.log.warn(module_path!(), format_args!("receive queue of QP {}: {error}", qp.qpn));
        }
        qp.record(FlightEvent::ReceiveQueue);
        if qp.srq.is_none() {
            qp.event(view, QpEvent::Fatal);
        }
        self.enter_error(qp, view);
        NakReason::RemoteOperation
    }

    /// Returns the SGE list of the receive in use.
    #[inline]
    pub(crate) fn receive_list<'a>(&'a self, qp: &Qp, memory: Memory<'a>) -> SgList<'a> {
        // Keys of an SRQ's receives belong to the SRQ's protection domain.
        let pd = qp.srq.as_ref().map_or(qp.pd, |srq| srq.pd);
        SgList { memory, sges: &self.recv.sges, pd, need: Access::LOCAL_WRITE }
    }

    /// Checks that the receive in use has room for `length` bytes.
    #[inline]
    pub(crate) fn check_receive(&mut self, qp: &Qp, memory: Memory<'_>, length: u64) -> Result<(), NakReason> {
        self.check_receive_by(qp, memory, length, |list| if list.allowed() { Ok(()) } else { Err(AccessError) })
    }

    /// As [`Self::check_receive`]. `check` checks the elements of the receive.
    #[inline]
    pub(crate) fn check_receive_by<T>(
        &mut self,
        qp: &Qp,
        memory: Memory<'_>,
        length: u64,
        check: impl FnOnce(SgList<'_>) -> Result<T, AccessError>,
    ) -> Result<T, NakReason> {
        if length > Sge::total_length(&self.recv.sges) {
            return Err(self.fail_receive(qp, memory.view, WcStatus::LocalLength, NakReason::InvalidRequest));
        }
        check(self.receive_list(qp, memory)).map_err(|_| self.receive_fault(qp, memory.view))
    }

    /// Fails the receive in use, because its memory cannot be written.
    pub(crate) fn receive_fault(&mut self, qp: &Qp, view: &DmaView<'_>) -> NakReason {
        self.fail_receive(qp, view, WcStatus::LocalProtection, NakReason::RemoteOperation)
    }

    /// Checks that the QP allows its peer this kind of access.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(crate) fn check_enabled(&mut self, qp: &Qp, view: &DmaView<'_>, need: Access) -> Result<(), NakReason> {
        let forbidden = qp.fault(Site::Permission).is_some();
        let reads = need.intersects(Access::REMOTE_READ | Access::REMOTE_ATOMIC);
        if forbidden || !self.attrs.access.contains(need) || reads && self.attrs.max_dest_rd_atomic == 0 {
            return Err(self.refuse(qp, view, NakReason::InvalidRequest));
        }
        Ok(())
    }

    /// Invalidates a key for the peer, whose message has arrived.
    pub(crate) fn invalidate(&mut self, qp: &Qp, memory: Memory<'_>, key: u32) -> Result<(), NakReason> {
        if memory.mrs.invalidate(key, qp.pd) {
            return Ok(());
        }
        // The message arrived but its key is invalid: both sides get an error (interface specification 8.7).
        Err(self.fail_receive(qp, memory.view, WcStatus::RemoteInvalidRequest, NakReason::RemoteOperation))
    }

    /// Completes the receive in use and publishes the completion.
    #[inline]
    pub(crate) fn complete_receive(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        received: &Received,
    ) -> Result<(), CqOverrun> {
        let completion = self.end_with_message(qp, received);
        qp.recv_cq.push(&qp.state, view, &completion)
    }

    /// Completes the receive in use. [`Self::publish`] publishes the completion.
    #[inline]
    pub(crate) fn push_receive(&mut self, qp: &Qp, received: &Received) {
        let completion = self.end_with_message(qp, received);
        self.pending.push(completion);
    }

    #[inline]
    fn end_with_message(&mut self, qp: &Qp, received: &Received) -> Completion {
        self.in_use = false;
        let mut completion = Completion {
            byte_len: received.length,
            solicited: received.solicited,
            ..Completion::new(qp.cookie, self.recv.wr_id, received.opcode, WcStatus::Success)
        };
        if let Some(immediate) = received.immediate {
            completion.flags |= WcFlags::IMMEDIATE;
            completion.immediate = immediate;
        }
        if let Some(key) = received.invalidated {
            completion.flags |= WcFlags::INVALIDATED;
            completion.invalidated_key = key;
        }
        completion
    }

    /// Copies a datagram into a receive, or drops it. `copy` copies the payload behind the header.
    ///
    /// # Errors
    /// The memory of the sender cannot be read.
    pub(crate) fn receive_datagram(
        &mut self,
        qp: &Qp,
        memory: Memory<'_>,
        datagram: &ReceivedDatagram,
        tally: &mut Tally,
        copy: impl FnOnce(SgList<'_>) -> Result<(), FaultyList>,
    ) -> Result<(), AccessError> {
        let length = datagram.payload_len.saturating_add(HEADER_LEN as u64);
        if !self.take_datagram(qp, memory.view, datagram.qkey, length, tally) {
            return Ok(());
        }
        let list = self.receive_list(qp, memory);
        let copied = if list.allowed() && list.write(0, &datagram.header).is_ok() {
            copy(list)
        } else {
            Err(FaultyList::Target)
        };
        match copied {
            Ok(()) => {}
            Err(FaultyList::Source) => return Err(AccessError),
            Err(FaultyList::Target) => {
                self.receive_fault(qp, memory.view);
                return Ok(());
            }
        }
        let received = Received {
            opcode: WcOpcode::Recv,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            immediate: datagram.immediate,
            invalidated: None,
            solicited: datagram.solicited,
        };
        let mut completion = self.end_with_message(qp, &received);
        completion.flags |= WcFlags::GRH;
        completion.src_qpn = datagram.source;
        completion.network = Some(datagram.network);
        completion.service_level = datagram.service_level;
        // After an overrun the QP is in its error state, so the error can be ignored here.
        let _ = qp.recv_cq.push(&qp.state, memory.view, &completion);
        tally.ud_delivered += 1;
        Ok(())
    }

    /// Takes a receive for a datagram of `length` bytes, including its header. Returns `false` if the datagram is
    /// dropped.
    fn take_datagram(&mut self, qp: &Qp, view: &DmaView<'_>, qkey: u32, length: u64, tally: &mut Tally) -> bool {
        if !qp.state.receives() {
            tally.ud_dropped_no_qp += 1;
            return false;
        }
        if self.attrs.qkey != qkey {
            tally.ud_dropped_qkey += 1;
            return false;
        }
        if self.take_receive(qp, view, None).is_err() {
            tally.ud_dropped_no_receive += 1;
            return false;
        }
        if length > Sge::total_length(&self.recv.sges) {
            // Responder faults of IBA 9.9.3. Class D: the datagram is dropped, and the receive stays in use for the
            // next one. Class E: a receive that was taken from an SRQ cannot go back, so it completes with the error.
            // In both classes the QP continues: otherwise a single long datagram from any sender with the Q_Key would
            // end it.
            tally.ud_too_long += 1;
            if qp.srq.is_some() {
                self.end_receive(qp, view, WcStatus::LocalLength);
            }
            return false;
        }
        true
    }

    /// Publishes the completions of receives that have ended.
    #[inline]
    fn publish(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if !self.pending.is_empty() {
            let published = qp.recv_cq.push_all(&qp.state, view, &self.pending);
            self.receives_published += published;
            self.lost |= published < self.pending.len();
            self.pending.clear();
        }
    }

    /// Publishes the completions of receives that have ended. If the queue did not have room for all, returns the
    /// number published since the last call.
    #[inline]
    pub(crate) fn end_batch(&mut self, qp: &Qp, view: &DmaView<'_>) -> Option<usize> {
        self.publish(qp, view);
        let published = std::mem::take(&mut self.receives_published);
        std::mem::take(&mut self.lost).then_some(published)
    }

    /// Ends the receive in use with an error, and the QP with it.
    pub(in crate::qp) fn fail_receive(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        status: WcStatus,
        nak: NakReason,
    ) -> NakReason {
        Counters::bump(&qp.adapter.counters.refused_requests);
        self.end_receive(qp, view, status);
        qp.record(FlightEvent::Refused(nak));
        self.enter_error(qp, view);
        nak
    }

    /// Ends the receive in use with an error.
    pub(in crate::qp) fn end_receive(&mut self, qp: &Qp, view: &DmaView<'_>, status: WcStatus) {
        self.publish(qp, view);
        if std::mem::take(&mut self.in_use) {
            let completion = Completion::new(qp.cookie, self.recv.wr_id, WcOpcode::Recv, status);
            let _ = qp.recv_cq.push(&qp.state, view, &completion);
        }
    }

    /// Refuses a request without a receive that could report the error: the consumer gets an event.
    pub(crate) fn refuse(&mut self, qp: &Qp, view: &DmaView<'_>, nak: NakReason) -> NakReason {
        Counters::bump(&qp.adapter.counters.refused_requests);
        self.publish(qp, view);
        match nak {
            NakReason::InvalidRequest => qp.event(view, QpEvent::RequestError),
            NakReason::RemoteAccess => qp.event(view, QpEvent::AccessError),
            NakReason::Silence | NakReason::NotReady(_) | NakReason::RemoteOperation => {}
        }
        qp.record(FlightEvent::Refused(nak));
        self.enter_error(qp, view);
        nak
    }

    /// Refuses an RDMA WRITE with immediate data to memory that cannot be accessed. The receive that it has taken
    /// reports the error (IBA C9-222.1), and there is no event.
    pub(crate) fn refuse_immediate(&mut self, qp: &Qp, view: &DmaView<'_>) -> NakReason {
        self.fail_receive(qp, view, WcStatus::LocalAccess, NakReason::RemoteAccess)
    }

    /// Ends the QP on behalf of the responder. Another thread may hold the requester, so the ready queue flushes the
    /// rest.
    fn enter_error(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if qp.state.enter_error(ErrorCause::Responder) {
            self.flush(qp, view, &mut Budget::new(u64::MAX, FLUSH_AT_ONCE), &mut Tally::default());
        }
    }
}

/// Checks a key of this side for a range that a peer specifies. An empty range needs no key.
///
/// # Errors
/// The key, the range or an access right is invalid.
#[inline]
pub(crate) fn check_remote(
    qp: &Qp,
    memory: Memory<'_>,
    remote: RemoteAddress,
    length: u64,
    need: Access,
) -> Result<(), AccessError> {
    let allowed = length == 0 || memory.mrs.lookup(remote.rkey, qp.pd, remote.addr, length, need).is_some();
    let revoked = length > 0 && is_revoked(qp, remote.rkey);
    if allowed && !revoked { Ok(()) } else { Err(AccessError) }
}

/// Returns `true` if a requested fault revokes a key of this device.
#[inline(always)]
pub(crate) fn is_revoked(qp: &Qp, rkey: u32) -> bool {
    qp.adapter.faults.at_key(qp.state.id(), rkey, || qp.adapter.engine.now()).is_some()
}

/// Returns a range that a peer specifies as an SGE.
#[inline]
pub(crate) fn remote_sge(remote: RemoteAddress, length: u64) -> Sge {
    // Messages are at most 2^31 bytes long.
    Sge { addr: remote.addr, length: u32::try_from(length).unwrap_or(u32::MAX), lkey: remote.rkey }
}

/// Returns such a range as an SGE list, with the access right that the peer's operation needs.
#[inline]
pub(crate) fn remote_list<'a>(qp: &Qp, memory: Memory<'a>, sges: &'a [Sge; 1], need: Access) -> SgList<'a> {
    SgList { memory, sges, pd: qp.pd, need }
}

/// Changes eight aligned bytes of this side atomically for a peer, and returns the previous value.
///
/// # Errors
/// The bytes cannot be accessed.
pub(crate) fn execute_atomic(
    qp: &Qp,
    memory: Memory<'_>,
    remote: RemoteAddress,
    change: AtomicChange,
) -> Result<u64, AccessError> {
    let Memory { view, mrs } = memory;
    mrs.lookup(remote.rkey, qp.pd, remote.addr, 8, Access::REMOTE_ATOMIC)
        .and_then(|region| region.locate(remote.addr))
        .and_then(|(bus, _)| view.update_u64(bus, |old| change.apply(old)).ok())
        .ok_or(AccessError)
}
