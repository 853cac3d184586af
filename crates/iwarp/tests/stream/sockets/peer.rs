//! A peer that sends any bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use pvrdma_iwarp::wire::{
    Enhanced, FrameKind, Opcode, RawHeader, SegmentHeader, StartupFrame, Terminate, fpdu as framing,
};
use pvrdma_iwarp::{Connection, Event, Limits};

use super::endpoint::{Endpoint, Socket, run_one};
use super::{LIMITS, START, sockets, tuning};
use crate::ends::untagged;
use crate::pair::Random;

pub(super) struct Peer {
    tcp: TcpStream,
    random: Random,
    /// A write has met a reset, which no read reports then.
    reset: bool,
}

impl Peer {
    /// A peer that has connected, and the end that has accepted.
    pub(super) fn connecting(memory: usize) -> (Self, Endpoint) {
        let (connected, accepted) = sockets();
        let endpoint = Endpoint::new(accepted, Connection::respond(START, tuning()), memory, 1);
        (Self::new(connected), endpoint)
    }

    /// A peer that has accepted, and the end that has connected.
    pub(super) fn accepting(memory: usize) -> (Self, Endpoint) {
        let (connected, accepted) = sockets();
        let connection = Connection::initiate(START, LIMITS, tuning(), b"hello").unwrap();
        (Self::new(accepted), Endpoint::new(connected, connection, memory, 2))
    }

    fn new(tcp: TcpStream) -> Self {
        tcp.set_nodelay(true).unwrap();
        Self { tcp, random: Random(3), reset: false }
    }

    /// A peer that has requested the connection, and the responder that has accepted it.
    pub(super) fn requester(limits: Limits, memory: usize) -> (Self, Endpoint) {
        let (mut peer, mut endpoint) = Self::connecting(memory);
        peer.send(&request(|_| {}).to_bytes());
        run_one(&mut endpoint, |endpoint| !endpoint.events.is_empty());
        endpoint.connection.accept(limits, b"").unwrap();
        let reply = peer.frame(&mut endpoint, FrameKind::Reply);
        assert!(!reply.rejected && reply.crc);
        endpoint.events.clear();
        (peer, endpoint)
    }

    /// A peer that has accepted the connection, and its initiator. No message is needed before the first one.
    pub(super) fn acceptor(memory: usize) -> (Self, Endpoint) {
        let (mut peer, mut endpoint) = Self::accepting(memory);
        let request = peer.frame(&mut endpoint, FrameKind::Request);
        let enhanced = request.enhanced.map(|asked| Enhanced { ird: asked.ord, ord: asked.ird, ..Enhanced::default() });
        peer.send(&StartupFrame { kind: FrameKind::Reply, enhanced, ..request }.to_bytes());
        run_one(&mut endpoint, |endpoint| !endpoint.events.is_empty());
        assert!(matches!(endpoint.events.pop(), Some(Event::Established { .. })));
        (peer, endpoint)
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.tcp.write_all(bytes).unwrap();
    }

    /// Sends bytes in pieces, each of which the end processes by itself.
    pub(super) fn send_slowly(&mut self, bytes: &[u8], endpoint: &mut Endpoint) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at((1 + self.random.up_to(60)).min(rest.len()));
            // The end may have closed the connection.
            if self.tcp.write_all(now).is_err() {
                self.reset = true;
                return;
            }
            while endpoint.step() {}
            rest = later;
        }
    }

    pub(super) fn shut_down(&self) {
        self.tcp.shutdown(Shutdown::Write).unwrap();
    }

    /// Reads a frame of the startup, and nothing else.
    pub(super) fn frame(&mut self, endpoint: &mut Endpoint, kind: FrameKind) -> StartupFrame {
        while endpoint.step() {}
        let mut bytes = vec![0; 1000];
        let length = self.tcp.read(&mut bytes).unwrap();
        let (frame, used) = StartupFrame::parse(kind, &bytes[..length]).unwrap().unwrap();
        assert_eq!(used, length);
        frame
    }

    /// Reads everything up to the end of the connection. `None`: the end has reset it.
    pub(super) fn rest(&mut self, endpoint: &mut Endpoint) -> Option<Vec<u8>> {
        run_one(endpoint, |endpoint| endpoint.socket != Socket::Open);
        if self.reset {
            return None;
        }
        let mut bytes = Vec::new();
        match self.tcp.read_to_end(&mut bytes) {
            Ok(_) => {
                self.shut_down();
                run_one(endpoint, |endpoint| endpoint.socket == Socket::Closed);
                Some(bytes)
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                None
            }
        }
    }

    /// Reads everything up to the end of the connection, and closes it.
    pub(super) fn all(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.tcp.read_to_end(&mut bytes).unwrap();
        self.shut_down();
        bytes
    }

    /// Reads a Terminate and the end of the connection, and nothing else.
    pub(super) fn terminate(&mut self, endpoint: &mut Endpoint) -> Terminate {
        terminate(&self.rest(endpoint).unwrap())
    }
}

/// Decodes a Terminate with a CRC.
pub(super) fn terminate(bytes: &[u8]) -> Terminate {
    let whole = framing::Fpdu::parse(bytes, true).unwrap().unwrap();
    assert_eq!(whole.len, bytes.len(), "nothing else is sent");
    let (raw, body) = RawHeader::split(whole.segment).unwrap();
    assert_eq!(SegmentHeader::parse(&raw).unwrap(), untagged(Opcode::Terminate, 1, 0));
    Terminate::parse(body)
}

/// A request of revision 2 without a ready-to-receive message, as `siw` sends it, with the CRC.
pub(super) fn request(edit: impl FnOnce(&mut StartupFrame)) -> StartupFrame {
    let mut frame = StartupFrame {
        kind: FrameKind::Request,
        markers: false,
        crc: true,
        rejected: false,
        revision: 2,
        enhanced: Some(Enhanced { ird: 16, ord: 16, ..Enhanced::default() }),
        private_data: vec![],
    };
    edit(&mut frame);
    frame
}
