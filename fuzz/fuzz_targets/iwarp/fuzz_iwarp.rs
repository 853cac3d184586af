//! Any bytes as a frame of the startup and as a connection, and scripts for a stream: segments of any kind with valid
//! CRCs, raw bytes, requests and receives of its own consumer, and ends of all kinds. Each posted request completes
//! once, in order.
#![no_main]

mod host;

use std::time::Duration;

use host::{Host, KEY};
use libfuzzer_sys::fuzz_target;
use pvrdma_iwarp::wire::{
    FrameKind, MAX_STARTUP_FRAME, Opcode, Placement, RawHeader, ReadRequest, SegmentHeader, StartupFrame, Terminate,
    fpdu,
};
use pvrdma_iwarp::{Answer, Connection, Finished, Initiator, Limits, Negotiated, Responder, Role, Rtr, Stream, Tuning};
use pvrdma_verbs_types::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge};

const LIMITS: Limits = Limits { ird: 4, ord: 4, crc: true };
const MEMORY: usize = 4096;

/// Returns a frame of revision 1 without options and private data.
fn plain_frame(kind: FrameKind) -> Vec<u8> {
    StartupFrame {
        kind,
        markers: false,
        crc: false,
        rejected: false,
        revision: 1,
        enhanced: None,
        private_data: Vec::new(),
    }
    .to_bytes()
}

/// Parses the bytes as a startup frame. A parsed frame is built again with the same meaning, and every answer to it can
/// be sent.
fn look_at_startup(bytes: &[u8]) {
    for kind in [FrameKind::Request, FrameKind::Reply] {
        let mut helped = plain_frame(kind);
        helped.truncate(16);
        helped.extend(bytes);
        for bytes in [bytes, &helped] {
            let Ok(Some((frame, len))) = StartupFrame::parse(kind, bytes) else { continue };
            assert!(len <= bytes.len());
            let again = frame.to_bytes();
            assert_eq!(StartupFrame::parse(kind, &again), Ok(Some((frame, again.len()))));
        }
        let initiator = Initiator::new(Duration::ZERO, LIMITS, &[]).expect("short private data");
        if let Ok(Some(Answer::Accepted { negotiated, .. })) = initiator.handle_bytes(&helped) {
            assert!(negotiated.ord <= LIMITS.ord);
        }
        if let Ok(Some(incoming)) = Responder::new(Duration::ZERO).handle_bytes(&helped)
            && let Ok((reply, _)) = incoming.accept(LIMITS, &[])
        {
            assert!(StartupFrame::parse(FrameKind::Reply, &reply).is_ok_and(|reply| reply.is_some()));
        }
    }
    let _ = Terminate::parse(bytes);
}

/// Any bytes from the first one of a connection on, in any pieces, between decisions of its owner. Without a CRC they
/// can be messages, too.
fn look_at_connection(input: &[u8]) {
    let mut script = Script(input);
    let mut host = Host::new(MEMORY);
    let tuning = Tuning::default().with_requests(8);
    let limits = Limits { crc: false, ..LIMITS };
    let initiates = script.byte() & 1 == 0;
    let mut connection = match initiates {
        true => Connection::initiate(Duration::ZERO, limits, tuning, b"data").expect("short private data"),
        false => Connection::respond(Duration::ZERO, tuning),
    };
    // Most inputs begin with a frame that the end accepts.
    let kind = if initiates { FrameKind::Reply } else { FrameKind::Request };
    let mut sent = if script.byte() == 0 { Vec::new() } else { plain_frame(kind) };
    let mut now = Duration::ZERO;
    let mut out = [0; 2048];
    while !script.0.is_empty() {
        match script.byte() % 8 {
            0 => {
                let sges = script.sges();
                host.post_receive(0, sges);
                connection.resume(now, &mut host);
            }
            1 => {
                let _ = connection.accept(limits, b"");
            }
            2 => match script.byte() {
                0 => connection.peer_closed(&mut host),
                1 => connection.reset(&mut host),
                2 => connection.flush(&mut host),
                3 => drop(connection.reject(b"no")),
                seconds => {
                    now += Duration::from_millis(u64::from(seconds) * 40);
                    connection.handle_timeout(now, &mut host);
                }
            },
            _ => {
                let length = script.byte();
                sent.extend(script.bytes(length.into()));
                let used = connection.handle_bytes(now, &sent, &mut host);
                let waits = connection.stream().is_some_and(Stream::waits_for_receive);
                assert!(used == sent.len() || waits && used < sent.len());
                sent.drain(..used);
            }
        }
        while let Some(length) = connection.poll_transmit(&mut out, &mut host) {
            connection.taken(length, &mut host);
        }
        assert!(connection.kept() <= fpdu::MAX_FPDU);
        // The kept bytes are one frame of the startup at most.
        assert!(connection.stream().is_some() || connection.kept() <= MAX_STARTUP_FRAME);
        assert!(connection.close().is_none() || connection.poll_transmit(&mut out, &mut host).is_none());
        while connection.poll_event().is_some() {}
    }
    connection.flush(&mut host);
    while let Some(length) = connection.poll_transmit(&mut out, &mut host) {
        connection.taken(length, &mut host);
    }
    assert!(connection.close().is_some(), "a connection that its owner has ended can be closed");
}

/// The bytes of a script. Behind the end there are zeros.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (now, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        now
    }

    /// Small numbers, and those at the end of the range.
    fn offset(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=0xef => u64::from(small) * 8,
            large => u64::MAX - u64::from(large & 15),
        }
    }

    /// The key of the memory, or a small number: sinks of READs are counted from 1.
    fn key(&mut self) -> u32 {
        match self.byte() {
            number @ 0..=31 => number.into(),
            _ => KEY,
        }
    }

    fn sges(&mut self) -> Vec<Sge> {
        let count = self.byte() % 4;
        let mut sge = |_| {
            let (addr, length) = (u64::from(self.byte()) * 8, u32::from(self.byte()) * 8);
            Sge { addr, length, lkey: if self.byte() == 0 { 1 } else { KEY } }
        };
        (0..count).map(&mut sge).collect()
    }
}

struct Play<'a> {
    script: Script<'a>,
    stream: Stream,
    host: Host,
    inbox: Vec<u8>,
    /// Bytes that were built and not taken.
    outbox: usize,
    posted: u64,
    /// Numbers of the messages that the script sends.
    msn: [u32; 3],
    now: Duration,
}

impl Play<'_> {
    fn deliver(&mut self, bytes: &[u8]) {
        self.inbox.extend(bytes);
        let used = self.stream.receive(self.now, &self.inbox, &mut self.host);
        assert!(used <= self.inbox.len());
        self.inbox.drain(..used);
        let waits = self.stream.waits_for_receive();
        assert!(waits || self.inbox.len() < fpdu::MAX_FPDU);
        assert_eq!(waits, self.stream.poll_timeout().is_some());
        assert!(self.stream.end().is_none() || self.inbox.is_empty());
    }

    fn segment(&mut self) {
        let kind = self.script.byte();
        let opcode = Opcode::new(kind & 7).expect("every value of three bits is one");
        let last = kind & 8 == 0;
        let payload = match opcode {
            Opcode::ReadRequest => ReadRequest {
                sink_stag: self.script.key(),
                sink_offset: self.script.offset(),
                length: u32::try_from(self.script.offset() & 0xffff_ffff).expect("32 bits"),
                source_stag: self.script.key(),
                source_offset: self.script.offset(),
            }
            .to_bytes()
            .to_vec(),
            _ => {
                let length = self.script.byte();
                self.script.bytes(length.into()).to_vec()
            }
        };
        let placement = match opcode.queue() {
            None => Placement::Tagged { stag: self.script.key(), offset: self.script.offset() },
            Some(queue) => {
                let changed = u32::from(kind >> 5 == 7);
                let index = usize::try_from(queue).expect("a small number");
                let msn = self.msn[index] + changed;
                self.msn[index] += u32::from(last);
                let offset = if kind & 16 == 0 { 0 } else { u32::from(self.script.byte()) };
                Placement::Untagged { stag: self.script.key(), queue, msn, offset }
            }
        };
        let raw = SegmentHeader { last, opcode, placement }.to_raw();
        let mut out = vec![0; fpdu::LENGTH_LEN];
        out.extend(raw.bytes());
        out.extend(payload);
        let segment = out.len() - fpdu::LENGTH_LEN;
        out.resize(fpdu::fpdu_len(segment), 0);
        fpdu::seal(&mut out, segment, true).expect("there is room");
        self.deliver(&out);
    }

    fn post(&mut self) {
        if !self.stream.has_room() {
            return;
        }
        let kind = self.script.byte();
        let remote = RemoteAddress { addr: self.script.offset(), rkey: self.script.key() };
        let key = self.script.key();
        let op = match kind & 7 {
            0 => SendOp::Send { data: SendData::Invalidate(key), to: None },
            1 => SendOp::Send { data: SendData::Immediate([0; 4]), to: None },
            2 => SendOp::Malformed,
            3 => SendOp::LocalInvalidate(pvrdma_verbs_types::Invalidate { key }),
            4 => SendOp::Write { remote, immediate: None },
            5 => SendOp::Send { data: SendData::None, to: None },
            _ => SendOp::Read { remote },
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::FENCE, kind & 8 != 0);
        flags.set(SendFlags::SOLICITED, kind & 16 != 0);
        let wr = SendWr { wr_id: self.posted, op, flags, sges: self.script.sges() };
        self.posted += 1;
        self.stream.post(wr, &mut self.host);
    }

    fn transmit(&mut self) {
        let mut out = [0; 2048];
        let Some(len) = self.stream.poll_transmit(&mut out, &mut self.host) else { return };
        self.outbox += len;
        let parsed = fpdu::Fpdu::parse(&out[..len], self.stream.negotiated().crc);
        let whole = parsed.expect("a built FPDU can be parsed").expect("a built FPDU is whole");
        let (raw, _) = RawHeader::split(whole.segment).expect("it has a header");
        let header = SegmentHeader::parse(&raw).expect("the header is valid");
        assert_eq!(whole.len, len);
        if let Placement::Tagged { stag, .. } = header.placement {
            // A response names a buffer that the peer has named.
            assert!(stag != 0 || header.opcode == Opcode::ReadResponse);
        }
    }

    fn step(&mut self) {
        match self.script.byte() % 12 {
            0 => {
                let length = self.script.byte();
                let bytes = self.script.bytes(length.into());
                self.deliver(bytes);
            }
            1..=4 => self.segment(),
            5 => self.post(),
            6 | 7 => self.transmit(),
            8 => {
                let bytes = self.outbox.min(usize::from(self.script.byte()) * 16);
                self.outbox -= bytes;
                self.stream.taken(bytes, &mut self.host);
            }
            9 => {
                let sges = self.script.sges();
                self.host.post_receive(0, sges);
                self.deliver(&[]);
            }
            10 => {
                self.now += Duration::from_millis(u64::from(self.script.byte()) * 40);
                self.stream.handle_timeout(self.now, &mut self.host);
            }
            _ => match self.script.byte() {
                0 => self.stream.finished(Finished::Reset, &mut self.host),
                1 if !self.stream.waits_for_receive() => {
                    self.stream.finished(Finished::Closed(self.inbox.len()), &mut self.host);
                }
                2 => self.stream.flush(&mut self.host),
                3 => self.host.gone = !self.host.gone,
                4 => self.host.may_invalidate = !self.host.may_invalidate,
                5 => self.stream.set_draining(true),
                6 => self.stream.set_draining(false),
                mss => self.stream.set_mss(usize::from(mss) * 16),
            },
        }
        // Neither requests nor READs of the peer are kept without bound.
        let state = self.stream.inspect();
        assert!(state.requests <= 8 && state.reads <= 5 && state.responses <= 5);
    }
}

fn play(input: &[u8]) {
    let Some((&kind, script)) = input.split_first() else { return };
    let role = if kind & 1 == 0 { Role::Initiator } else { Role::Responder };
    let rtr = [None, Some(Rtr::Read), Some(Rtr::Write), None][usize::from(kind >> 1 & 3)];
    let rtr = rtr.filter(|&rtr| role == Role::Responder || rtr == Rtr::Read);
    let negotiated = Negotiated { role, crc: kind & 8 == 0, ird: 4, ord: 4, rtr };
    let mut play = Play {
        script: Script(script),
        stream: Stream::new(negotiated, Tuning::default().with_requests(8)),
        host: Host::new(MEMORY),
        inbox: Vec::new(),
        outbox: 0,
        posted: 0,
        msn: [1; 3],
        now: Duration::ZERO,
    };
    while !play.script.0.is_empty() {
        play.step();
    }
    play.stream.flush(&mut play.host);
    let finished: Vec<u64> = play.host.statuses().iter().map(|&(wr_id, _)| wr_id).collect();
    assert!(finished.iter().copied().eq(0..play.posted), "{finished:?}");
}

fuzz_target!(|input: &[u8]| {
    look_at_startup(input);
    look_at_connection(input);
    play(input);
});
