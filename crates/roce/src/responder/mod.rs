//! The responder of a reliable connection: executes requests in PSN order, each exactly once (IBA 9.7.5).

mod execute;
mod icrc;
mod reorder;
mod responses;
mod save;
mod transmit;

use std::collections::VecDeque;

use pvrdma_verbs::{NakReason, ResponderOps};
use pvrdma_verbs_types::{Psn, QpAttrs, Qpn, RemoteAddress};
use serde::Serialize;

use crate::path::{Path, entropy_of, mtu_bytes, packets};
use crate::wire::{AGREED_RESOURCES, NakCode, OFFER, Operation, Packet, Reth, SackMap, Service, Syndrome};
use icrc::IcrcAgreement;
use responses::{ReadResponse, Response};

pub use reorder::ReorderBuffer;

/// Syndrome of a NAK for a missing packet.
const SEQUENCE_ERROR: Syndrome = Syndrome::Nak(NakCode::SequenceError);

/// Result of handling a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handled {
    /// It was executed, NAKed, or recognised as a duplicate.
    Done,
    /// It was dropped.
    Dropped,
    /// An earlier packet is missing. The packet may be dropped, or handed in again when its PSN is
    /// [`Responder::expected_psn`].
    OutOfOrder,
    /// Responses that the packet must not overtake are still to be sent: call [`Responder::poll_transmit`] until it
    /// returns `None`, then hand the packet in again before any later packet of this QP.
    Deferred,
}

/// Counters of a responder. They start at 0 when it is created, and only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ResponderStats {
    /// Packets executed.
    pub executed: u64,
    /// Duplicates of executed packets.
    pub duplicates: u64,
    /// Packets that arrived before the expected one.
    pub out_of_sequence: u64,
    /// RNR NAKs sent.
    pub not_ready: u64,
    /// Requests refused.
    pub refused: u64,
    /// Acknowledgements and responses sent.
    pub responses: u64,
    /// Packets among them without an ICRC. Not saved.
    pub without_icrc: u64,
}

/// A message with packets still to come.
#[derive(Clone, Copy, Debug)]
enum Message {
    Send { done: u32 },
    Write { next: RemoteAddress, left: u32, length: u32 },
}

/// A responder resource (IBA 9.7.5.1.4): an executed RDMA READ or atomic, kept so that its response can be repeated.
#[derive(Clone, Copy, Debug)]
enum Resource {
    Read { first: Psn, count: u32, reth: Reth },
    Atomic { psn: Psn, original: u64 },
}

/// The NAK that was sent for the expected PSN. Each PSN gets at most one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum NakSent {
    None,
    /// A sequence NAK: the packet is missing. Later packets get no other.
    Sequence,
    /// An RNR NAK: the packet found no receive. Later packets are dropped silently.
    Rnr,
}

/// State of the agreement that sequence NAKs report the packets that have arrived after the missing one ([`SackMap`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Sack {
    /// Disabled, whatever the peer offers.
    Off,
    /// Enabled as soon as the peer offers to accept them.
    Ready,
    /// Enabled: the peer has offered.
    On,
}

/// Snapshot of a responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ResponderInspect {
    /// PSN that is executed next.
    pub expected_psn: Psn,
    /// Messages completed, modulo 2^24.
    pub msn: u32,
    /// Part of a message was executed, and more packets of it are to come.
    pub in_message: bool,
    /// The NAK that was sent for `expected_psn`.
    nak_sent: NakSent,
    /// Selective acknowledgements: `off`, `ready` until the peer offers to take them, `on`.
    sack: Sack,
    /// Responses leave without an ICRC, because both ends agreed on that.
    pub omits_icrc: bool,
    /// Responses to be sent: ACKs, NAKs, and responses with data.
    pub pending_responses: usize,
    /// RDMA READs and atomics whose responses can be repeated.
    pub resources: usize,
    /// The responder executes nothing any more.
    pub ended: bool,
    /// Counters.
    pub stats: ResponderStats,
}

/// The responder half of a connected QP.
#[derive(Debug)]
pub struct Responder {
    path: Path,
    remote: Qpn,
    attrs: QpAttrs,
    /// PSN that is executed next.
    expected: Psn,
    /// Messages completed, 24 bits.
    msn: u32,
    message: Option<Message>,
    nak_sent: NakSent,
    /// PSN of the newest SEND or WRITE packet executed. Only such a PSN may appear in a plain ACK: some requesters take
    /// an ACK with the PSN of a READ or atomic for its completion.
    ack_psn: Psn,
    /// Messages that were complete at `ack_psn`.
    ack_msn: u32,
    /// A sequence NAK was sent.
    has_sent_nak: bool,
    /// The newest duplicate that got no ACK, because later requests have responses with data.
    unacked_duplicate: Option<Psn>,
    /// The peer has repeated a READ or atomic after such a duplicate.
    peer_goes_back: bool,
    /// Responses to be sent, in this order.
    responses: VecDeque<Response>,
    /// Responder resources, at most `max_dest_rd_atomic`, or [`AGREED_RESOURCES`] if that is more and the peer has
    /// agreed. The oldest is first.
    resources: VecDeque<Resource>,
    sack: Sack,
    icrc: IcrcAgreement,
    /// Responses follow the path of requests among equal-cost paths, if the peer agreed.
    follows: bool,
    /// Source port of requests on the peer's own path.
    peer_port: Option<u16>,
    /// Bits in which the local source port differs from the connection's own.
    entropy: u16,
    /// Packets that arrived after the expected one, for the next NAK: the expected PSN, and the map.
    received: Option<(Psn, SackMap)>,
    /// The next sequence NAK carries no map, because the packets that earlier maps named are lost.
    has_forgotten: bool,
    /// The responder executes nothing any more.
    ended: bool,
    ident: u16,
    stats: ResponderStats,
}

impl Responder {
    /// Creates a responder in RTR, with the peer, keys and numbers of `attrs`.
    pub fn new(attrs: &QpAttrs, path: Path) -> Self {
        Self {
            path,
            remote: attrs.dest_qpn,
            attrs: *attrs,
            expected: attrs.rq_psn,
            msn: 0,
            message: None,
            nak_sent: NakSent::None,
            ack_psn: attrs.rq_psn.plus(u32::MAX),
            ack_msn: 0,
            has_sent_nak: false,
            unacked_duplicate: None,
            peer_goes_back: false,
            responses: VecDeque::new(),
            resources: VecDeque::new(),
            sack: Sack::Off,
            icrc: IcrcAgreement::default(),
            follows: false,
            peer_port: None,
            entropy: 0,
            received: None,
            has_forgotten: false,
            ended: false,
            ident: 0,
            stats: ResponderStats::default(),
        }
    }

    /// Enables selective acknowledgements, if the peer offers to accept them.
    #[must_use]
    pub const fn accepting_offers(mut self) -> Self {
        self.sack = Sack::Ready;
        self
    }

    /// Makes responses follow the path of requests if the peer agreed on selective acknowledgements: when the peer
    /// changes bits of its UDP source port, this side inverts the same bits of its own port. A requester that gets no
    /// responses thus tries other paths for both directions.
    #[must_use]
    pub const fn following_paths(mut self) -> Self {
        self.follows = true;
        self
    }

    /// Current path of responses.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Returns the path of a response to this request, which need not be the newest one.
    pub fn path_of(&self, packet: &Packet<'_>) -> Path {
        let mut path = self.path;
        if let (Some(port), Some(own)) = (packet.header.network.source_port(), self.peer_port) {
            path.turn(self.entropy ^ entropy_of(port, own));
        }
        path
    }

    /// Counters.
    pub const fn stats(&self) -> ResponderStats {
        self.stats
    }

    /// Exports the state of the responder.
    pub fn inspect(&self) -> ResponderInspect {
        ResponderInspect {
            expected_psn: self.expected,
            msn: self.msn,
            in_message: self.message.is_some(),
            nak_sent: self.nak_sent,
            sack: self.sack,
            omits_icrc: self.icrc.omits(),
            pending_responses: self.responses.len(),
            resources: self.resources.len(),
            ended: self.ended,
            stats: self.stats,
        }
    }

    /// PSN that is executed next.
    pub const fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Applies the attributes that a modify request may change in RTS and SQD: path and responder resources. PSNs, path
    /// MTU and peer stay.
    pub fn set_attrs(&mut self, attrs: &QpAttrs, path: Path) {
        self.attrs.max_dest_rd_atomic = attrs.max_dest_rd_atomic;
        self.path = path;
        self.path.turn(self.entropy);
        self.icrc.limit(path.may_omit_icrc());
    }

    /// Switches to the path of a request.
    fn follow(&mut self, packet: &Packet<'_>) {
        let Some(port) = packet.header.network.source_port() else { return };
        let entropy = entropy_of(port, *self.peer_port.get_or_insert(port));
        self.path.turn(std::mem::replace(&mut self.entropy, entropy) ^ entropy);
    }

    /// Stops the responder because the QP moved to its error state for another reason: nothing more is executed, and no
    /// response is sent.
    pub fn end(&mut self) {
        self.ended = true;
        self.responses.clear();
        self.message = None;
    }

    /// Drops the responses that are still to be sent, as if they were lost in transit. The peer requests them again.
    pub fn forget_responses(&mut self) {
        self.responses.clear();
    }

    /// Handles a request that [`crate::admit_connected`] accepted.
    pub fn handle_packet(&mut self, packet: &Packet<'_>, ops: &mut impl ResponderOps) -> Handled {
        let bth = &packet.header.bth;
        let Some(info) = bth.opcode.info().filter(|info| info.service == Service::Rc) else { return Handled::Dropped };
        if self.ended || info.operation.is_response() {
            return Handled::Dropped;
        }
        if bth.reserved7 == OFFER && self.sack == Sack::Ready {
            self.sack = Sack::On;
        }
        if self.follows && self.sack == Sack::On {
            self.follow(packet);
        }
        let may_omit = self.sack == Sack::On && self.path.may_omit_icrc();
        self.icrc.on_request(bth, self.expected, may_omit);
        match bth.psn.since(self.expected) {
            0 => {}
            ahead if ahead > 0 => return self.gap(),
            _ => return self.duplicate(packet, info.operation),
        }
        // READ data is read when it is sent, so requests that change memory must wait until then (IBA 9.4.4,
        // 9.7.5.1.2).
        if info.operation != Operation::ReadRequest && self.responses.iter().any(Response::reads_memory) {
            return Handled::Deferred;
        }
        ops.request_arrived();
        match self.execute(packet, info, ops) {
            Ok(()) => {
                self.nak_sent = NakSent::None;
                self.stats.executed += 1;
                Handled::Done
            }
            Err(reason) => self.refuse(bth.psn, reason),
        }
    }

    /// Handles a missing packet: NAKs it once, or each time that there is news about the packets after it.
    fn gap(&mut self) -> Handled {
        self.stats.out_of_sequence += 1;
        if self.nak_sent == NakSent::Sequence && self.sack == Sack::On {
            self.push_nak(self.expected, SEQUENCE_ERROR);
        }
        self.nak_expected();
        if self.nak_sent == NakSent::Sequence { Handled::OutOfOrder } else { Handled::Dropped }
    }

    /// Sends a sequence NAK for the expected packet, unless one was sent, because a later packet has arrived.
    pub fn nak_expected(&mut self) {
        if self.nak_sent == NakSent::None {
            self.nak_sent = NakSent::Sequence;
            self.has_sent_nak = true;
            self.refresh_ack();
            self.push_nak(self.expected, SEQUENCE_ERROR);
        }
    }

    /// Returns the missing PSN if a NAK with a map is to be sent: the caller must then call [`Self::set_received`]
    /// before [`Self::poll_transmit`].
    pub fn wants_received(&self) -> Option<Psn> {
        let next = |response: &Response| matches!(response, Response::Nak { psn, syndrome: SEQUENCE_ERROR, .. } if *psn == self.expected);
        (self.sack == Sack::On && self.responses.iter().any(next)).then_some(self.expected)
    }

    /// Sets the map of packets that arrived after [`Self::expected_psn`] and are kept.
    pub const fn set_received(&mut self, map: SackMap) {
        self.received = Some((self.expected, map));
    }

    /// Reports that the caller has lost the packets that it kept after [`Self::expected_psn`]. A peer that agreed on
    /// selective acknowledgements counts them as arrived, so it gets a sequence NAK without a map, and goes back to the
    /// expected packet. A peer that has nothing outstanding ignores the NAK.
    pub fn forget_received(&mut self) {
        self.received = None;
        if self.sack != Sack::On || self.ended {
            return;
        }
        self.has_forgotten = true;
        // An RNR NAK has the same effect on the peer: it goes back when the wait is over.
        if self.nak_sent != NakSent::Rnr {
            self.nak_sent = NakSent::None;
            self.nak_expected();
        }
    }

    /// Sends the NAK for a request that `ops` refused. `ops` has already notified the consumer.
    fn refuse(&mut self, psn: Psn, reason: NakReason) -> Handled {
        let code = match reason {
            NakReason::Silence => return Handled::Dropped,
            NakReason::NotReady(timer) => {
                self.stats.not_ready += 1;
                self.nak_sent = NakSent::Rnr;
                self.push_nak(psn, Syndrome::RnrNak { timer });
                return Handled::Done;
            }
            NakReason::InvalidRequest => NakCode::InvalidRequest,
            NakReason::RemoteAccess => NakCode::RemoteAccess,
            NakReason::RemoteOperation => NakCode::RemoteOperation,
        };
        self.stats.refused += 1;
        self.ended = true;
        self.message = None;
        self.push_nak(psn, Syndrome::Nak(code));
        Handled::Done
    }

    /// Handles a duplicate of an executed packet: no request is executed twice, and a duplicate is never refused (IBA
    /// 9.7.5.1.4).
    fn duplicate(&mut self, packet: &Packet<'_>, operation: Operation) -> Handled {
        self.stats.duplicates += 1;
        let psn = packet.header.bth.psn;
        let wants_data = !matches!(operation, Operation::Send | Operation::Write);
        self.peer_goes_back |= wants_data && self.unacked_duplicate.is_some_and(|before| before.precedes(psn));
        match operation {
            Operation::Send | Operation::Write => {
                // The ACK is sent even without AckReq, as rxe does, because a peer that repeats a lost tail may not set
                // it. It carries the current MSN.
                if self.is_acked_by_data(psn) {
                    self.unacked_duplicate = Some(psn);
                } else {
                    self.push_ack(self.msn);
                }
                Handled::Done
            }
            Operation::ReadRequest => {
                let Some(duplicate) = packet.header.extension.reth().and_then(|reth| self.find_read(psn, reth)) else {
                    return Handled::Dropped;
                };
                self.repeat_read(duplicate);
                Handled::Done
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let original = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Atomic { psn: at, original } if at == psn => Some(original),
                    _ => None,
                });
                let Some(original) = original else { return Handled::Dropped };
                let pending = |response: &Response| matches!(response, Response::Atomic { psn: at, .. } if *at == psn);
                if !self.responses.iter().any(pending) {
                    self.responses.push_back(Response::Atomic { psn, original, duplicate: true, msn: self.msn });
                }
                Handled::Done
            }
            _ => Handled::Dropped,
        }
    }

    /// Returns `true` if the ACK of a duplicate would be older than responses with data to later requests. Those
    /// acknowledge the duplicate as well, and some requesters do not tolerate an ACK that goes back. A peer that goes
    /// back because of a NAK also repeats packets that were kept, which are then duplicates. But a peer that repeats
    /// one packet again and again, without a READ after it, does get the ACK.
    fn is_acked_by_data(&self, psn: Psn) -> bool {
        let repeated = self.unacked_duplicate.is_some_and(|before| !before.precedes(psn));
        self.has_sent_nak
            && self.sack != Sack::On
            && self.ack_psn.plus(1) != self.expected
            && (self.peer_goes_back || !repeated)
    }

    /// Finds the executed READ that `reth` at `psn` is a part of.
    fn find_read(&self, psn: Psn, reth: Reth) -> Option<ReadResponse> {
        self.resources.iter().find_map(|resource| {
            let Resource::Read { first, count, reth: whole } = *resource else { return None };
            let index = u32::try_from(psn.since(first)).ok().filter(|&index| index < count)?;
            let skipped = u64::from(index) * u64::from(self.attrs.path_mtu.bytes());
            let left = u64::from(whole.length).checked_sub(skipped)?;
            let inside = reth.rkey == whole.rkey
                && (reth.address == whole.address.wrapping_add(skipped) || left == 0)
                && u64::from(reth.length) <= left
                && packets(reth.length, self.attrs.path_mtu) <= count - index;
            inside.then_some(ReadResponse { request: first, psn, reth, starts: true, duplicate: true, msn: self.msn })
        })
    }

    /// Repeats responses of a READ, at most once at a time.
    fn repeat_read(&mut self, repeat: ReadResponse) {
        let mtu = self.attrs.path_mtu;
        let pending = |response: &Response| match response {
            Response::Read(read) if read.request == repeat.request => Some(*read),
            _ => None,
        };
        // The requested responses are still to be sent.
        if self.responses.iter().filter_map(pending).any(|read| read.covers(&repeat, mtu)) {
            return;
        }
        let Some(at) = self.responses.iter().position(|response| pending(response).is_some()) else {
            return self.responses.push_back(Response::Read(repeat));
        };
        match self.responses.get_mut(at) {
            Some(Response::Read(read)) if read.duplicate => read.join(&repeat, mtu),
            // The response has been sent beyond the requested part: go back.
            Some(Response::Read(read)) if repeat.end(mtu) == read.end(mtu) => {
                *read = ReadResponse { duplicate: false, msn: read.msn, ..repeat };
            }
            // The rest of the response is still to be sent.
            _ => self.responses.insert(at, Response::Read(repeat)),
        }
    }

    /// Takes a responder resource, replacing the oldest if all are in use.
    fn save_resource(&mut self, resource: Resource) {
        let least = if self.sack == Sack::On { AGREED_RESOURCES } else { 1 };
        while self.resources.len() >= usize::from(self.attrs.max_dest_rd_atomic).max(least) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }

    fn payload_is_legal(&self, packet: &Packet<'_>) -> bool {
        let rule = packet.header.bth.opcode.info().map(|info| info.payload);
        packet.pad_is_right()
            && rule.is_some_and(|rule| rule.allows(packet.payload.len(), mtu_bytes(self.attrs.path_mtu)))
    }
}
