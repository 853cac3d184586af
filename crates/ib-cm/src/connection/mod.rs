//! One end of a connection (IBA 12.9).
//!
//! ```text
//! active:   ReqSent ──REP──► RepReceived ──confirm──► Established
//! passive:  ReqReceived ──accept──► RepSent ──RTU──► Established
//! both:     Established ──disconnect──► DreqSent ──DREP──► TimeWait
//!           Established ──DREQ──► TimeWait ──► Done
//! ```
//!
//! A message that requires an answer is repeated until the answer arrives. An end that needs more time sends an MRA;
//! [`Connection`] does so by itself while its owner has not decided about a REQ or REP. A message that was answered
//! before is answered again, because the answer may have been lost.

use std::time::Duration;

use pvrdma_packet::field::put;
use pvrdma_verbs_types::Qpn;

use crate::mad::{MAD_LEN, Mad};
use crate::message::{Drep, Dreq, Message, MessageKind, Mra, Rej, RejectReason, Rep, Rtu};
use crate::req::Req;

/// Time without an answer after which a message is repeated: the value 20 of the five-bit timeouts, as in Linux.
pub const REPEAT_AFTER: Duration = service_timeout(20);
/// Repetitions of a message before the connection is given up, as in Linux.
pub const MAX_REPEATS: u8 = 15;
/// Time without a decision of the owner after which this end asks the peer for more time.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// Time that the peer is asked to wait: code 22, or 17 s. It is asked again before that time has passed.
const ASKED_FOR: u8 = 22;
/// Time in which late messages of an ended connection are still answered.
pub const TIME_WAIT: Duration = Duration::from_secs(10);

/// Duration of a five-bit timeout: 4.096 µs times a power of two (IBA 12.7.34).
pub const fn service_timeout(code: u8) -> Duration {
    Duration::from_nanos(4096 << (code & 31))
}

/// Returns the answer to a message that belongs to no connection, if it gets one: a DREQ is confirmed, because its
/// connection has already ended here (IBA 12.9.8.3).
pub fn answer_without_connection(mad: &Mad) -> Option<[u8; MAD_LEN]> {
    let Message::Dreq(dreq) = &mad.message else { return None };
    let drep = Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, private_data: [0; 224] };
    Some(Mad { transaction: mad.transaction, message: Message::Drep(drep) }.to_bytes())
}

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The REQ was sent.
    ReqSent,
    /// The REP has arrived; the owner decides.
    RepReceived,
    /// The REQ has arrived; the owner decides.
    ReqReceived,
    /// The REP was sent.
    RepSent,
    /// The connection can be used.
    Established,
    /// The DREQ was sent.
    DreqSent,
    /// The connection has ended. Late messages are answered.
    TimeWait,
    /// The connection can be forgotten.
    Done,
}

/// Rejection by the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejected {
    /// Reason.
    pub reason: RejectReason,
    /// Private data.
    pub private_data: Box<[u8; 148]>,
}

/// Meaning of an event for the owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The peer has accepted: [`Connection::confirm`] or [`Connection::reject`] it.
    Accepted(Box<Rep>),
    /// The peer has confirmed: the connection can be used.
    Established,
    /// The peer has rejected the connection, or given it up before it was established.
    Rejected(Rejected),
    /// The peer has ended the connection.
    Disconnected,
    /// The peer does not answer.
    TimedOut,
}

/// The peer's side of a connection, for messages to it.
#[derive(Clone, Copy, Debug)]
struct Peer {
    id: u32,
    qpn: Qpn,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub struct Connection {
    state: State,
    transaction: u64,
    local_id: u32,
    qpn: Qpn,
    /// GUID of this end's adapter. A peer that has no ID of this end yet names the connection by it.
    ca_guid: [u8; 8],
    /// Known from the REQ, REP or REJ of the peer on.
    peer: Option<Peer>,
    /// The message that is repeated: until it is answered, or whenever the peer repeats its own.
    last: Option<Message>,
    repeats: u8,
    deadline: Option<Duration>,
    /// The next datagram. One suffices, because each replaces its predecessor, and lost ones are repeated.
    outgoing: Option<Mad>,
}

impl Connection {
    /// Begins a connection with a REQ. No other connection of this end has its `local_id`.
    pub fn outgoing(now: Duration, transaction: u64, req: Req) -> Self {
        let mut connection = Self {
            state: State::ReqSent,
            transaction,
            local_id: req.local_id,
            qpn: req.qpn,
            ca_guid: req.ca_guid,
            peer: None,
            last: None,
            repeats: 0,
            deadline: None,
            outgoing: None,
        };
        connection.send_and_repeat(now, Message::Req(Box::new(req)));
        connection
    }

    /// Takes a REQ of the peer, which the owner then accepts or rejects. No other connection of this end has
    /// `local_id`.
    pub fn incoming(now: Duration, local_id: u32, transaction: u64, req: Req) -> Self {
        Self {
            state: State::ReqReceived,
            transaction,
            local_id,
            qpn: Qpn::new(0),
            ca_guid: [0; 8],
            peer: Some(Peer { id: req.local_id, qpn: req.qpn }),
            last: None,
            repeats: 0,
            deadline: Some(now.saturating_add(ASK_AFTER)),
            outgoing: None,
        }
    }

    /// State.
    pub const fn state(&self) -> State {
        self.state
    }

    /// Communication ID of this end.
    pub const fn local_id(&self) -> u32 {
        self.local_id
    }

    /// Communication ID of the peer, if it is known.
    pub fn peer_id(&self) -> Option<u32> {
        self.peer.map(|peer| peer.id)
    }

    /// Accepts the peer's REQ. Fills in the communication IDs of `rep`. Without effect in other states.
    pub fn accept(&mut self, now: Duration, rep: Rep) {
        let (State::ReqReceived, Some(peer)) = (self.state, self.peer) else { return };
        self.qpn = rep.qpn;
        self.state = State::RepSent;
        self.send_and_repeat(now, Message::Rep(Rep { local_id: self.local_id, remote_id: peer.id, ..rep }));
    }

    /// Confirms the peer's REP: the connection is established. Without effect in other states.
    pub fn confirm(&mut self) {
        let (State::RepReceived, Some(peer)) = (self.state, self.peer) else { return };
        self.state = State::Established;
        let rtu = Message::Rtu(Rtu { local_id: self.local_id, remote_id: peer.id, private_data: [0; 224] });
        self.last = Some(rtu.clone());
        self.deadline = None;
        self.send(rtu);
    }

    /// Records that data of the peer has arrived, so its RTU must have been lost (IBA 12.9.8.7). Returns `true` if that
    /// establishes the connection.
    pub fn data_arrived(&mut self) -> bool {
        let establishes = self.state == State::RepSent;
        if establishes {
            self.establish();
        }
        establishes
    }

    /// Rejects the peer's REQ or REP, or gives up a REQ of this end. Private data beyond 148 bytes is cut off. Without
    /// effect in other states.
    pub fn reject(&mut self, now: Duration, reason: RejectReason, private_data: &[u8]) {
        let (rejected, has_id) = match self.state {
            State::ReqReceived => (MessageKind::Req, false),
            State::RepReceived => (MessageKind::Rep, true),
            State::ReqSent | State::RepSent => (MessageKind::Other(2), true),
            _ => return,
        };
        let mut rej = Rej {
            local_id: if has_id { self.local_id } else { 0 },
            remote_id: self.peer_id().unwrap_or(0),
            rejected,
            reason,
            info_len: 0,
            info: [0; 72],
            private_data: [0; 148],
        };
        if self.peer.is_none() {
            rej.info_len = 8;
            put::<0, 8, _>(&mut rej.info, self.ca_guid);
        }
        for (to, from) in rej.private_data.iter_mut().zip(private_data) {
            *to = *from;
        }
        let rej = Message::Rej(rej);
        self.wait_for_late_messages(now, Some(rej.clone()));
        self.send(rej);
    }

    /// Ends the connection. Without effect before it is established.
    pub fn disconnect(&mut self, now: Duration) {
        let (State::Established, Some(peer)) = (self.state, self.peer) else { return };
        self.state = State::DreqSent;
        let dreq = Dreq { local_id: self.local_id, remote_id: peer.id, remote_qpn: peer.qpn, private_data: [0; 220] };
        self.send_and_repeat(now, Message::Dreq(dreq));
    }

    /// The next datagram.
    pub fn poll_transmit(&mut self) -> Option<[u8; MAD_LEN]> {
        self.outgoing.take().map(|mad| mad.to_bytes())
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub const fn poll_timeout(&self) -> Option<Duration> {
        self.deadline
    }

    /// Processes a passed deadline.
    pub fn handle_timeout(&mut self, now: Duration) -> Option<Event> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return None;
        }
        match self.state {
            State::ReqReceived | State::RepReceived => {
                self.ask_for_time(now);
                None
            }
            State::ReqSent | State::RepSent | State::DreqSent if self.repeats < MAX_REPEATS => {
                self.repeats += 1;
                self.deadline = Some(now.saturating_add(REPEAT_AFTER));
                self.repeat();
                None
            }
            State::ReqSent | State::RepSent => {
                self.reject(now, RejectReason::TIMEOUT, &[]);
                Some(Event::TimedOut)
            }
            State::DreqSent => {
                self.wait_for_late_messages(now, None);
                Some(Event::TimedOut)
            }
            State::TimeWait => {
                (self.state, self.deadline, self.last) = (State::Done, None, None);
                None
            }
            State::Established | State::Done => {
                self.deadline = None;
                None
            }
        }
    }

    /// Processes a message of the peer. Ignores a message that does not belong to this connection or is not expected.
    pub fn handle_message(&mut self, now: Duration, mad: &Mad) -> Option<Event> {
        let message = &mad.message;
        let for_this = match (message.destination(), message) {
            // A peer that gives up its REQ does not know the ID of this end.
            (Some(0), Message::Rej(Rej { local_id: 1.., reason: RejectReason::TIMEOUT, .. })) => self.peer.is_some(),
            (Some(id), _) => id == self.local_id,
            (None, _) => mad.transaction == self.transaction,
        };
        // The peer's ID is unknown before its first answer, and a REJ may have none.
        let from_peer = match (self.peer, message) {
            (Some(peer), Message::Rej(rej)) => rej.local_id == 0 || rej.local_id == peer.id,
            (Some(peer), message) => message.source() == peer.id,
            (None, _) => true,
        };
        if !for_this || !from_peer {
            return None;
        }
        match message {
            Message::Req(_) => self.handle_repeated_req(),
            Message::Mra(mra) => self.handle_mra(now, mra),
            Message::Rej(rej) => return self.handle_rej(now, rej),
            Message::Rep(rep) => return self.handle_rep(now, rep),
            Message::Rtu(_) => return self.data_arrived().then_some(Event::Established),
            Message::Dreq(dreq) => return self.handle_dreq(now, dreq, mad.transaction),
            Message::Drep(_) => {
                if self.state == State::DreqSent {
                    self.wait_for_late_messages(now, None);
                }
            }
        }
        None
    }

    /// The peer has not seen the answer to its REQ.
    fn handle_repeated_req(&mut self) {
        if matches!(self.state, State::ReqReceived | State::RepSent | State::TimeWait) {
            self.repeat();
        }
    }

    fn handle_mra(&mut self, now: Duration, mra: &Mra) {
        let answered = match self.state {
            State::ReqSent => MessageKind::Req,
            State::RepSent => MessageKind::Rep,
            _ => return,
        };
        if mra.answered == answered {
            let until = now.saturating_add(service_timeout(mra.service_timeout)).saturating_add(REPEAT_AFTER);
            self.deadline = Some(until);
        }
    }

    fn handle_rej(&mut self, now: Duration, rej: &Rej) -> Option<Event> {
        if !matches!(self.state, State::ReqSent | State::RepReceived | State::ReqReceived | State::RepSent) {
            return None;
        }
        self.wait_for_late_messages(now, None);
        self.outgoing = None;
        Some(Event::Rejected(Rejected { reason: rej.reason, private_data: Box::new(rej.private_data) }))
    }

    fn handle_rep(&mut self, now: Duration, rep: &Rep) -> Option<Event> {
        match self.state {
            State::ReqSent => {
                self.peer = Some(Peer { id: rep.local_id, qpn: rep.qpn });
                self.state = State::RepReceived;
                self.last = None;
                self.deadline = Some(now.saturating_add(ASK_AFTER));
                Some(Event::Accepted(Box::new(rep.clone())))
            }
            // The RTU or the MRA was lost.
            State::RepReceived | State::Established | State::TimeWait => {
                self.repeat();
                None
            }
            _ => None,
        }
    }

    fn handle_dreq(&mut self, now: Duration, dreq: &Dreq, transaction: u64) -> Option<Event> {
        let peer = self.peer?;
        if dreq.remote_qpn != self.qpn {
            return None;
        }
        let event = match self.state {
            // A DREQ of the peer that crosses one of this end answers it. A DREQ that overtakes the RTU ends a
            // connection that the owner does not know to be established yet.
            State::Established | State::RepSent => Some(Event::Disconnected),
            State::DreqSent | State::TimeWait => None,
            _ => return None,
        };
        let drep = Message::Drep(Drep { local_id: self.local_id, remote_id: peer.id, private_data: [0; 224] });
        // In TIME_WAIT the deadline stays: repeated DREQs could otherwise keep the connection forever.
        if self.state != State::TimeWait {
            self.wait_for_late_messages(now, None);
        }
        self.outgoing = Some(Mad { transaction, message: drep });
        event
    }

    fn establish(&mut self) {
        (self.state, self.deadline, self.last) = (State::Established, None, None);
    }

    /// Asks the peer for more time for a message that the owner has not decided yet.
    fn ask_for_time(&mut self, now: Duration) {
        let answered = if self.state == State::ReqReceived { MessageKind::Req } else { MessageKind::Rep };
        let mra = Message::Mra(Mra {
            local_id: self.local_id,
            remote_id: self.peer_id().unwrap_or(0),
            answered,
            service_timeout: ASKED_FOR,
            private_data: [0; 222],
        });
        self.last = Some(mra.clone());
        self.deadline = Some(now.saturating_add(service_timeout(ASKED_FOR - 1)));
        self.send(mra);
    }

    /// Ends the connection. `last` answers messages that the peer repeats.
    fn wait_for_late_messages(&mut self, now: Duration, last: Option<Message>) {
        self.state = State::TimeWait;
        self.last = last;
        self.deadline = Some(now.saturating_add(TIME_WAIT));
    }

    fn send_and_repeat(&mut self, now: Duration, message: Message) {
        self.last = Some(message.clone());
        (self.repeats, self.deadline) = (0, Some(now.saturating_add(REPEAT_AFTER)));
        self.send(message);
    }

    fn send(&mut self, message: Message) {
        self.outgoing = Some(Mad { transaction: self.transaction, message });
    }

    fn repeat(&mut self) {
        if let Some(message) = self.last.clone() {
            self.send(message);
        }
    }
}

#[cfg(test)]
mod tests;
