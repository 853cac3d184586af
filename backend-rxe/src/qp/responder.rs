//! The responder half: taking receives, checking what a peer asks for, and how a refusal ends the QP.
//!
//! Nothing in here knows how a request came: local delivery copies between two regions, a transport would scatter
//! packets. Both ask the same questions in the same order and get a [`Nak`] when the answer is no.

use std::time::Duration;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    Access, Completion, CqOverrun, QpAttrs, QpEvent, QpState, QueueError, RecvSource, RecvWr, RemoteAddress, Sge,
    WcOpcode, WcStatus,
};

use super::{Budget, Qp};
use crate::counters::{Counters, Tally};
use crate::hca::BoundGid;
use crate::path::wire::rc::WireResponder;
use crate::sg::{self, Memory, SgList};

/// Receives that a refusal flushes at once; the ready queue does the rest.
const FLUSH_AT_ONCE: u32 = 64;

/// How a responder answers a request that it does not execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Nak {
    /// Not at all: as if the request had been lost.
    Silence,
    /// No receive is posted: come back after the wait of this code.
    NotReady(u8),
    /// The request makes no sense or is not enabled.
    InvalidRequest,
    /// A key, a range or a right is wrong.
    RemoteAccess,
    /// The responder cannot go on for reasons of its own.
    RemoteOperation,
}

/// Waits that RNR NAKs ask for, in units of 10 µs, by code (InfiniBand 9.7.5.2.8, table 45).
const RNR_DELAYS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// The wait that an RNR NAK with this code asks for.
pub(crate) fn rnr_delay(code: u8) -> Duration {
    let units = RNR_DELAYS.get(usize::from(code & 31)).copied().unwrap_or_default();
    Duration::from_micros(u64::from(units) * 10)
}

/// The responder half of a QP.
pub(crate) struct Responder {
    /// `None` with an SRQ.
    source: Option<Box<dyn RecvSource>>,
    broken: bool,
    /// The receive in use, if `in_use` says that there is one.
    pub(crate) recv: RecvWr,
    in_use: bool,
    /// Receives that have ended and were not reported yet. Empty while nobody holds the responder.
    news: Vec<Completion>,
    /// Receives of the batch that were reported.
    told: usize,
    /// A receive of the batch could not be reported.
    lost: bool,
    /// Changes when a message under way is forgotten.
    pub(crate) epoch: u32,
    pub(crate) attrs: QpAttrs,
    /// The first request in RTR was seen.
    established: bool,
    /// The last-WQE event was raised.
    last_wqe_raised: bool,
    /// The GID of our own address vector, with the fabric's generation when it was looked up.
    own_gid: Option<(u64, Option<BoundGid>)>,
    /// State of a QP whose peer is on the wire.
    pub(crate) wire: Option<Box<WireResponder>>,
}

impl Responder {
    pub(super) fn new(source: Option<Box<dyn RecvSource>>) -> Self {
        Self {
            source,
            broken: false,
            recv: RecvWr::default(),
            in_use: false,
            news: Vec::new(),
            told: 0,
            lost: false,
            epoch: 0,
            attrs: QpAttrs::default(),
            established: false,
            last_wqe_raised: false,
            own_gid: None,
            wire: None,
        }
    }

    /// Forgets everything, as the guest does with a QP in RESET.
    pub(super) fn reset(&mut self) {
        let epoch = self.epoch.wrapping_add(1);
        *self = Self { epoch, ..Self::new(self.source.take()) };
        if let Some(source) = &mut self.source {
            source.reset();
        }
    }

    /// Lets go of the ring for good.
    pub(super) fn end(&mut self) {
        *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new(None) };
    }

    pub(super) fn set_attrs(&mut self, qp: &Qp, attrs: QpAttrs) {
        self.attrs = attrs;
        self.own_gid = None;
        if let Some(wire) = &mut self.wire {
            wire.set_attrs(qp, &attrs);
        }
    }

    /// Whether a connected peer that sends from `from` to `to` is the one this QP is connected to.
    pub(crate) fn is_connected_to(&mut self, qp: &Qp, sender: &Qp, from: BoundGid) -> bool {
        let generation = qp.adapter.shared.fabric.generation();
        let own = match self.own_gid {
            Some((at, own)) if at == generation => own,
            _ => {
                let own = qp.adapter.gid(self.attrs.av.sgid_index);
                self.own_gid = Some((generation, own));
                own
            }
        };
        // Encapsulation and VLAN are part of the address.
        self.attrs.dest_qpn == sender.qpn && own.is_some_and(|own| own.beside(self.attrs.av.dgid) == from)
    }

    /// The address that requests must be sent to, if the source index is bound.
    pub(crate) fn own_address(&self) -> Option<BoundGid> {
        self.own_gid.and_then(|(_, own)| own)
    }

    /// A request came in: the communication is established if that was the first one.
    #[inline]
    pub(crate) fn first_request(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if !self.established {
            self.established = true;
            if qp.state() == QpState::Rtr {
                qp.event(view, QpEvent::CommunicationEstablished);
            }
        }
    }

    /// Has a receive in use, taking one from the queue if there is none yet. When the queue is empty, `waiter` is woken by
    /// the next post.
    #[inline]
    pub(crate) fn take_receive(&mut self, qp: &Qp, view: &DmaView<'_>, waiter: Option<&Qp>) -> Result<(), Nak> {
        if self.in_use {
            return Ok(());
        }
        match self.pop(qp, view, waiter) {
            Ok(true) => {}
            Ok(false) => return Err(Nak::NotReady(self.attrs.min_rnr_timer)),
            Err(error) => return Err(self.broken_queue(qp, view, error)),
        }
        self.in_use = true;
        if self.recv.malformed {
            return Err(self.fail_receive(qp, view, WcStatus::LocalQpOperation, Nak::RemoteOperation));
        }
        Ok(())
    }

    /// Has a receive in use for a datagram of `length` bytes with its header area, or drops the datagram.
    pub(crate) fn take_datagram(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        qkey: u32,
        length: u64,
        tally: &mut Tally,
    ) -> bool {
        if !qp.receives() {
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
        if length > sg::total(&self.recv.sges) {
            // The receive is used up and says so (interface specification 9.8). The QP goes on: otherwise anybody who
            // knows the Q_Key could end it with one long datagram.
            tally.ud_too_long += 1;
            self.end_receive(qp, view, WcStatus::LocalLength);
            return false;
        }
        true
    }

    fn pop(&mut self, qp: &Qp, view: &DmaView<'_>, waiter: Option<&Qp>) -> Result<bool, Option<QueueError>> {
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

    fn broken_queue(&mut self, qp: &Qp, view: &DmaView<'_>, error: Option<QueueError>) -> Nak {
        self.broken = true;
        if let Some(error) = error {
            log::warn!("{}: receive queue of QP {}: {error}", qp.adapter.name, qp.qpn);
        }
        if qp.srq.is_none() {
            qp.event(view, QpEvent::Fatal);
        }
        self.enter_error(qp, view);
        Nak::RemoteOperation
    }

    /// Where the receive in use puts bytes.
    #[inline]
    pub(crate) fn receive_list<'a>(&'a self, qp: &Qp, memory: Memory<'a>) -> SgList<'a> {
        // Keys of an SRQ's receives belong to the SRQ's protection domain.
        let pd = qp.srq.as_ref().map_or(qp.pd, |srq| srq.pd);
        SgList { memory, sges: &self.recv.sges, pd, need: Access::LOCAL_WRITE }
    }

    /// Checks that the receive in use takes `length` bytes.
    #[inline]
    pub(crate) fn check_receive(&mut self, qp: &Qp, memory: Memory<'_>, length: u64) -> Result<(), Nak> {
        if length > sg::total(&self.recv.sges) {
            return Err(self.fail_receive(qp, memory.view, WcStatus::LocalLength, Nak::InvalidRequest));
        }
        if !self.receive_list(qp, memory).allowed() {
            return Err(self.fail_receive(qp, memory.view, WcStatus::LocalProtection, Nak::RemoteOperation));
        }
        Ok(())
    }

    /// Whether the QP lets its peer do this at all.
    #[inline]
    pub(crate) fn check_enabled(&mut self, qp: &Qp, view: &DmaView<'_>, need: Access) -> Result<(), Nak> {
        let reads = need.intersects(Access::REMOTE_READ | Access::REMOTE_ATOMIC);
        if !self.attrs.access.contains(need) || reads && self.attrs.max_dest_rd_atomic == 0 {
            return Err(self.refuse(qp, view, Nak::InvalidRequest));
        }
        Ok(())
    }

    /// Checks a key of this side for a range. Nothing is looked at when the range is empty.
    #[inline]
    pub(crate) fn check_remote(
        &mut self,
        qp: &Qp,
        memory: Memory<'_>,
        remote: RemoteAddress,
        length: u64,
        need: Access,
    ) -> Result<(), Nak> {
        if length == 0 || memory.mrs.lookup(remote.rkey, qp.pd, remote.addr, length, need).is_some() {
            return Ok(());
        }
        Err(self.refuse(qp, memory.view, Nak::RemoteAccess))
    }

    /// Publishes the receive in use.
    #[inline]
    pub(crate) fn complete_receive(
        &mut self,
        qp: &Qp,
        view: &DmaView<'_>,
        opcode: WcOpcode,
        fill: impl FnOnce(&mut Completion),
    ) -> Result<(), CqOverrun> {
        let completion = self.finish_receive(qp, opcode, fill);
        qp.recv_cq.push(qp, view, &completion)
    }

    /// Ends the receive in use. It is reported with [`Self::publish`].
    #[inline]
    pub(crate) fn note_receive(&mut self, qp: &Qp, opcode: WcOpcode, fill: impl FnOnce(&mut Completion)) {
        let completion = self.finish_receive(qp, opcode, fill);
        self.news.push(completion);
    }

    #[inline]
    fn finish_receive(&mut self, qp: &Qp, opcode: WcOpcode, fill: impl FnOnce(&mut Completion)) -> Completion {
        self.in_use = false;
        let mut completion = Completion::new(qp.cookie, self.recv.wr_id, opcode, WcStatus::Success);
        fill(&mut completion);
        completion
    }

    /// Reports the receives that have ended.
    #[inline]
    fn publish(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if !self.news.is_empty() {
            let told = qp.recv_cq.push_all(qp, view, &self.news);
            self.told += told;
            self.lost |= told < self.news.len();
            self.news.clear();
        }
    }

    /// Reports the receives that have ended. When the queue had no room for all, gives how many were reported since the last
    /// call.
    #[inline]
    pub(crate) fn end_batch(&mut self, qp: &Qp, view: &DmaView<'_>) -> Option<usize> {
        self.publish(qp, view);
        let told = std::mem::take(&mut self.told);
        std::mem::take(&mut self.lost).then_some(told)
    }

    /// Ends the receive in use with an error, and the QP with it.
    pub(crate) fn fail_receive(&mut self, qp: &Qp, view: &DmaView<'_>, status: WcStatus, nak: Nak) -> Nak {
        Counters::bump(&qp.adapter.counters.refused_requests);
        self.end_receive(qp, view, status);
        self.enter_error(qp, view);
        nak
    }

    /// Ends the receive in use with an error.
    pub(crate) fn end_receive(&mut self, qp: &Qp, view: &DmaView<'_>, status: WcStatus) {
        self.publish(qp, view);
        if std::mem::take(&mut self.in_use) {
            let completion = Completion::new(qp.cookie, self.recv.wr_id, WcOpcode::Recv, status);
            let _ = qp.recv_cq.push(qp, view, &completion);
        }
    }

    /// Refuses a request that has no receive to fail: the consumer hears of it by an event.
    pub(crate) fn refuse(&mut self, qp: &Qp, view: &DmaView<'_>, nak: Nak) -> Nak {
        Counters::bump(&qp.adapter.counters.refused_requests);
        self.publish(qp, view);
        match nak {
            Nak::InvalidRequest => qp.event(view, QpEvent::RequestError),
            Nak::RemoteAccess => qp.event(view, QpEvent::AccessError),
            Nak::Silence | Nak::NotReady(_) | Nak::RemoteOperation => {}
        }
        self.enter_error(qp, view);
        nak
    }

    /// Ends the QP from this side. Its requester may belong to another thread: the ready queue flushes the rest.
    pub(super) fn enter_error(&mut self, qp: &Qp, view: &DmaView<'_>) {
        if qp.set_error() {
            self.flush(qp, view, &mut Budget::new(u64::MAX, FLUSH_AT_ONCE), &mut Tally::default());
            qp.kick();
        }
    }

    /// Flushes the receive in use and those in the ring. `false`: the budget ended first.
    pub(super) fn flush(&mut self, qp: &Qp, view: &DmaView<'_>, budget: &mut Budget, tally: &mut Tally) -> bool {
        self.epoch = self.epoch.wrapping_add(1);
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

/// A remote range as a list of one element.
#[inline]
pub(crate) fn remote_sge(remote: RemoteAddress, length: u64) -> Sge {
    // Messages are at most 2^31 bytes long.
    Sge { addr: remote.addr, length: u32::try_from(length).unwrap_or(u32::MAX), lkey: remote.rkey }
}
