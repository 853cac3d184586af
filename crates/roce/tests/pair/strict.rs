//! A strict requester, as a second reference beside rxe: it interprets responses as literally as an adapter may.
//!
//! It identifies completed requests by the MSN, goes back to any missing packet, and fails where other requesters are
//! tolerant: on an ACK older than its own state, on an ACK between the responses of a READ, on an MSN that goes back or
//! ahead of what was sent, and on READ responses of the wrong kind.

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_roce::wire::{
    Aeth, AtomicEth, Bth, Extension, Header, NakCode, Opcode, Operation, Packet, Position, Reth, Syndrome, build,
};
use pvrdma_verbs_types::{Mtu, Psn, RemoteAddress, SendFlags, SendOp, SendWr};

use super::host::{Host, KEY};
use super::net::{End, Random, Setup};

const MTU: u32 = 256;
/// Most READs and atomics that are outstanding.
const MOST_READS: usize = 4;
/// Most packets in flight.
const WINDOW: u32 = 48;
/// Number of rounds that a response takes, and number of rounds after which it counts as late.
const DELAY: usize = 2;
const LATE: u32 = 7;
/// Addresses of the memory that READs read, that atomics change, and that all other data is written to, one page for
/// each request.
const SOURCE: u64 = 0x10_0000;
const COUNTER: u64 = 0x20_0000;
const TARGET: u64 = 0x30_0000;
const PAGE: u64 = 0x1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Send,
    Write,
    Read,
    Add,
}

#[derive(Clone, Debug)]
struct Request {
    kind: Kind,
    /// Its packets, counted from the first of the connection.
    first: u32,
    count: u32,
    data: Vec<u8>,
    /// PSN at which each attempt at it, or at the rest of it, began.
    attempts: Vec<u32>,
    /// Packets that were sent for it.
    asked: u32,
    done: bool,
}

impl Request {
    fn end(&self) -> u32 {
        self.first + self.count
    }

    fn wants_data(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Add)
    }

    fn is_repeated(&self) -> bool {
        self.asked > if self.wants_data() { 1 } else { self.count }
    }

    fn chunk(&self, seq: u32) -> &[u8] {
        let from = ((seq - self.first) * MTU) as usize;
        &self.data[from..self.data.len().min(from + MTU as usize)]
    }
}

fn place(index: usize) -> u64 {
    index as u64 * PAGE
}

/// The requester. `first` is the PSN of its first packet.
struct Strict {
    template: Header,
    first: Psn,
    requests: Vec<Request>,
    /// The oldest packet that is not done, the next one to send, and the first one that was never sent.
    una: u32,
    nxt: u32,
    max: u32,
    msn: u32,
    /// Responses to an earlier attempt are still on their way.
    recovering: bool,
    /// Packets before this one were retransmitted without being asked for, so their ACKs may arrive twice.
    repeated_until: u32,
    /// Rounds since the last progress.
    idle: u32,
}

impl Strict {
    fn request_of(&self, seq: u32) -> Option<usize> {
        self.requests.iter().position(|request| (request.first..request.end()).contains(&seq))
    }

    /// Goes back to the oldest packet that is not done, without having received a NAK.
    fn go_back(&mut self) {
        self.repeated_until = self.repeated_until.max(self.nxt);
        self.go_back_as_asked();
    }

    fn go_back_as_asked(&mut self) {
        (self.nxt, self.recovering, self.idle) = (self.una, true, 0);
    }

    /// The next packet.
    fn transmit(&mut self) -> Option<Vec<u8>> {
        let index = self.request_of(self.nxt).filter(|_| self.nxt - self.una < WINDOW)?;
        let nxt = self.nxt;
        let open = self.requests[..index].iter().filter(|it| it.wants_data() && !it.done).count();
        let request = &mut self.requests[index];
        if request.wants_data() && open >= MOST_READS {
            return None;
        }
        let position = Position::of(nxt == request.first, nxt + 1 == request.end());
        let skip = (nxt - request.first) * MTU;
        let reth = |place: u64, length: usize| Reth {
            address: place + u64::from(skip),
            rkey: KEY,
            length: u32::try_from(length).unwrap() - skip,
        };
        let (opcode, extension, payload, span) = match request.kind {
            Kind::Send => (Opcode::send(position), Extension::None, request.chunk(nxt).to_vec(), 1),
            Kind::Write => {
                let reth = Extension::Reth(reth(TARGET + place(index), request.data.len()));
                let extension = if nxt == request.first { reth } else { Extension::None };
                (Opcode::write(position), extension, request.chunk(nxt).to_vec(), 1)
            }
            Kind::Read => {
                let reth = reth(SOURCE + place(index), request.data.len());
                (Opcode::READ_REQUEST, Extension::Reth(reth), Vec::new(), request.end() - nxt)
            }
            Kind::Add => {
                let add = AtomicEth { address: COUNTER, rkey: KEY, swap_or_add: 1, compare: 0 };
                (Opcode::FETCH_ADD, Extension::AtomicEth(add), Vec::new(), 1)
            }
        };
        request.attempts.push(nxt);
        request.asked += 1;
        let mut bth = Bth::new(opcode, self.template.bth.destination, self.first.plus(nxt));
        bth.ack_request = position.ends() || request.wants_data();
        self.nxt += span;
        self.max = self.max.max(self.nxt);
        Some(build(&Header { bth, extension, ..self.template }, &payload).unwrap())
    }

    /// The responder says that it has executed the packets before `end`.
    fn executed(&mut self, end: u32, peer: &Host) {
        while let Some(index) = self.request_of(self.una).filter(|_| self.una < end) {
            if self.requests[index].wants_data() {
                // Its response was lost.
                if !self.recovering {
                    self.go_back();
                }
                return;
            }
            self.una = end.min(self.requests[index].end());
            self.idle = 0;
            if self.una == self.requests[index].end() {
                self.done(index, peer);
            }
        }
        self.nxt = self.nxt.max(self.una);
    }

    /// Marks a request as done, and checks that the responder has executed it.
    fn done(&mut self, index: usize, peer: &Host) {
        if !self.requests[index].wants_data() {
            self.assert_executed(index, peer);
        }
        assert!(!std::mem::replace(&mut self.requests[index].done, true), "done twice");
    }

    /// Checks the MSN of a response which says that the packets before `seq` were executed. With `exact`, exactly this
    /// many messages must be complete.
    fn count(&mut self, msn: u32, seq: u32, exact: Option<usize>, peer: &Host) {
        assert!(exact.is_none_or(|exact| msn as usize == exact), "MSN {msn}, and {exact:?} messages are done");
        assert!(msn >= self.msn, "MSN {msn} after {}", self.msn);
        self.msn = msn;
        let sent = self.requests.iter().filter(|request| request.end() <= self.max).count();
        assert!(msn as usize <= sent, "MSN {msn}, and {sent} messages were sent");
        let complete = self.requests.iter().filter(|request| request.end() <= seq).count();
        assert!(msn as usize >= complete, "MSN {msn}, and {complete} messages are done by PSN");
        // An adapter finds requests by the MSN, so every request that it finds must have been executed.
        let open = (0..msn as usize).filter(|&index| !self.requests[index].done);
        for index in open.filter(|&index| !self.requests[index].wants_data()) {
            self.assert_executed(index, peer);
        }
    }

    fn assert_executed(&self, index: usize, peer: &Host) {
        let request = &self.requests[index];
        assert_eq!(peer.memory.get(TARGET + place(index), request.data.len()), request.data, "{index}: {request:?}");
    }

    fn receive(&mut self, frame: &[u8], peer: &Host) {
        let packet = Packet::parse(frame).unwrap();
        packet.verify().unwrap();
        let bth = packet.header.bth;
        assert_eq!(bth.reserved7, 0, "nothing was offered");
        let seq = u32::try_from(bth.psn.since(self.first)).expect("a response from before the first request");
        assert!(seq < self.max, "{packet} to what was never sent");
        let aeth = packet.header.extension.aeth();
        match bth.opcode.info().unwrap().operation {
            Operation::Acknowledge => {
                assert!(packet.payload.is_empty(), "{packet}");
                self.acknowledge(seq, aeth.unwrap(), peer);
            }
            Operation::ReadResponse | Operation::AtomicAcknowledge => {
                let index = self.request_of(seq).unwrap();
                self.executed(self.requests[index].first, peer);
                self.respond(index, seq, &packet);
                if let Some(aeth) = aeth {
                    let request = &self.requests[index];
                    let exact = (!request.is_repeated()).then_some(index + 1);
                    self.count(aeth.msn, request.first, exact, peer);
                }
            }
            other => panic!("{other:?} is no response"),
        }
    }

    fn acknowledge(&mut self, seq: u32, aeth: Aeth, peer: &Host) {
        let end = match aeth.syndrome {
            Syndrome::Ack { .. } => seq + 1,
            Syndrome::Nak(NakCode::SequenceError) => seq,
            other => panic!("{other:?}"),
        };
        let again = self.recovering || seq < self.repeated_until;
        assert!(end >= self.una || again, "an old ACK: {seq}, and {} is expected", self.una);
        // A READ is in progress if some of its responses have arrived since its last attempt began.
        let in_read = self.request_of(self.una).map(|index| &self.requests[index]);
        let in_read = in_read.is_some_and(|read| self.una > read.first && !read.attempts.contains(&self.una));
        let in_read = in_read && self.request_of(self.una).is_some_and(|index| self.requests[index].wants_data());
        assert!(end > self.una || !in_read || again, "an ACK of {seq} between the responses of a READ");
        self.executed(end, peer);
        let repeated = self.requests.iter().any(Request::is_repeated);
        let complete = self.requests.iter().filter(|request| request.end() <= end).count();
        self.count(aeth.msn, end, (!repeated).then_some(complete), peer);
        if let Syndrome::Nak(_) = aeth.syndrome {
            // There is a NAK for each missing packet.
            if self.una == end {
                self.go_back_as_asked();
            }
        }
    }

    fn respond(&mut self, index: usize, seq: u32, packet: &Packet<'_>) {
        if seq != self.una {
            // A response may arrive twice if its request was sent twice.
            assert!(seq > self.una || self.requests[index].is_repeated(), "{packet} came before");
            if seq > self.una && !self.recovering {
                self.go_back();
            }
            return;
        }
        let request = &self.requests[index];
        match request.kind {
            Kind::Read => {
                let legal = request.attempts.iter().filter(|&&attempt| attempt <= seq);
                let mut legal = legal.map(|&attempt| Position::of(seq == attempt, seq + 1 == request.end()));
                let opcode = packet.header.bth.opcode;
                assert!(legal.any(|position| Opcode::read_response(position) == opcode), "{packet}");
                assert_eq!(packet.payload, request.chunk(seq), "{packet}");
            }
            Kind::Add => {
                let before = self.requests[..index].iter().filter(|request| request.kind == Kind::Add).count() as u64;
                let Extension::AtomicAckEth(_, ack) = packet.header.extension else { panic!("{packet}") };
                assert_eq!(ack.original, before, "{packet}");
            }
            other => panic!("{packet} to {other:?}"),
        }
        (self.una, self.idle, self.recovering) = (seq + 1, 0, false);
        self.nxt = self.nxt.max(self.una);
        if self.una == self.requests[index].end() {
            self.requests[index].done = true;
        }
    }
}

/// The header of what the peer of `setup` sends.
fn template(setup: &Setup) -> Header {
    let mut end = End::new(setup, 2, 1);
    let op = SendOp::Write { remote: RemoteAddress::default(), immediate: None };
    end.post(SendWr { wr_id: 0, op, flags: SendFlags::empty(), sges: Vec::new() });
    Packet::parse(&end.transmit(Duration::ZERO)[0]).unwrap().header
}

/// Runs random requests over a line that keeps the order of frames and loses `loss` of a thousand in each direction.
fn run(seed: u64, loss: u64, keeps: bool) -> u32 {
    let mut random = Random(seed);
    let mut setup = Setup::default();
    (setup.attrs.path_mtu, setup.attrs.max_dest_rd_atomic) = (Mtu::M256, 4);
    let mut peer = End::new(&setup, 1, 2);
    peer.keeps = keeps;
    let (mut requests, mut first): (Vec<Request>, u32) = (Vec::new(), 0);
    for index in 0..40 {
        let kind =
            [Kind::Send, Kind::Write, Kind::Read, Kind::Read, Kind::Add][usize::try_from(random.below(5)).unwrap()];
        let length = if kind == Kind::Add { 8 } else { random.below(7 * u64::from(MTU)) };
        let data: Vec<u8> = (0..length).map(|_| random.next().to_le_bytes()[0]).collect();
        match kind {
            Kind::Read => peer.host.memory.write(SOURCE + place(index), &data),
            Kind::Send => peer.host.post_receive(index as u64, TARGET + place(index), 4096),
            Kind::Write | Kind::Add => {}
        }
        let count = u32::try_from(length).unwrap().div_ceil(MTU).max(1);
        requests.push(Request { kind, first, count, data, attempts: Vec::new(), asked: 0, done: false });
        first += count;
    }
    let mut strict = Strict {
        template: template(&setup),
        first: setup.attrs.rq_psn,
        requests,
        una: 0,
        nxt: 0,
        max: 0,
        msn: 0,
        recovering: false,
        repeated_until: 0,
        idle: 0,
    };
    let (mut under_way, mut rounds): (VecDeque<Vec<Vec<u8>>>, u32) = (VecDeque::new(), 0);
    let now = Duration::from_secs(1);
    while strict.una < first {
        rounds += 1;
        assert!(rounds < 10_000, "seed {seed}: no end in sight");
        strict.idle += 1;
        if strict.idle > LATE {
            strict.go_back();
        }
        // Several packets may arrive together.
        for _ in 0..random.below(12) {
            let Some(frame) = strict.transmit() else { break };
            if !random.chance(loss) {
                peer.receive(now, &frame);
            }
        }
        let mut responses = peer.transmit(now);
        while !peer.is_empty() {
            // Handles packets that had to wait until these responses were sent.
            peer.handle(now);
            responses.extend(peer.transmit(now));
        }
        responses.retain(|_| !random.chance(loss));
        under_way.push_back(responses);
        if under_way.len() > DELAY {
            under_way.pop_front().unwrap().iter().for_each(|frame| strict.receive(frame, &peer.host));
        }
    }
    assert!(strict.requests.iter().all(|request| request.done), "seed {seed}");
    let adds = strict.requests.iter().filter(|request| request.kind == Kind::Add).count();
    assert_eq!(peer.host.atomics as usize, adds, "seed {seed}");
    rounds
}

#[test]
fn a_strict_requester_finds_no_fault() {
    for seed in 0..100 {
        let clean = run(seed, 0, seed % 2 == 0);
        assert!(clean < 200, "seed {seed}: {clean} rounds");
    }
    for seed in 0..300 {
        run(seed, 1 + seed % 60, seed % 2 == 0);
    }
}
