//! A connection on a socket.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use pvrdma_iwarp::wire::fpdu;
use pvrdma_iwarp::{Close, Connection, End, Event, Negotiated, Stream, Tuning};
use pvrdma_verbs_types::SendWr;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{LIMITS, START, sockets};
use crate::host::Host;
use crate::pair::Random;

/// Bytes that were built and that the socket has not accepted.
const MAX_OUTGOING: usize = 128 * 1024;
/// Time after which a test that waits for a socket has failed.
const STUCK: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// State of the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Socket {
    Open,
    /// Everything was sent. Further data of the peer is discarded.
    ShutDown,
    Closed,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    tcp: Option<TcpStream>,
    pub(super) socket: Socket,
    pub(super) connection: Connection,
    pub(super) host: Host,
    pub(super) now: Duration,
    pub(super) events: Vec<Event>,
    outgoing: Vec<u8>,
    /// Bytes behind a SEND that waits for a receive.
    behind: Vec<u8>,
    peer_closed: bool,
    random: Random,
}

impl Endpoint {
    pub(super) fn new(tcp: TcpStream, connection: Connection, memory: usize, seed: u64) -> Self {
        tcp.set_nonblocking(true).unwrap();
        tcp.set_nodelay(true).unwrap();
        Self {
            tcp: Some(tcp),
            socket: Socket::Open,
            connection,
            host: Host::new(memory),
            now: START,
            events: Vec::new(),
            outgoing: Vec::new(),
            behind: Vec::new(),
            peer_closed: false,
            random: Random(seed),
        }
    }

    /// Sets the sizes of the socket's buffers, of which the kernel takes twice as much.
    pub(super) fn set_buffers(&self, bytes: usize) {
        let tcp = self.tcp.as_ref().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(tcp, bytes).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(tcp, bytes).unwrap();
    }

    pub(super) fn stream(&self) -> &Stream {
        self.connection.stream().unwrap()
    }

    pub(super) fn post(&mut self, wr: SendWr) {
        self.connection.stream_mut().unwrap().post(wr, &mut self.host);
    }

    pub(super) fn end(&self) -> Option<End> {
        self.connection.stream().and_then(Stream::end)
    }

    /// Ends the connection, as the owner of a QP in the error state does.
    pub(super) fn flush(&mut self) {
        self.connection.flush(&mut self.host);
    }

    pub(super) fn time_out(&mut self) {
        self.now = self.connection.poll_timeout().unwrap();
        self.connection.handle_timeout(self.now, &mut self.host);
    }

    /// A number of bytes: a few or many.
    fn some(&mut self) -> usize {
        let most = [1, 100, 10_000, 100_000][self.random.up_to(3)];
        1 + self.random.up_to(most)
    }

    /// Does everything that is possible now, in pieces of random size. Returns `false` if that was nothing.
    pub(super) fn step(&mut self) -> bool {
        let mut moved = self.receive();
        while let Some(event) = self.connection.poll_event() {
            self.events.push(event);
            moved = true;
        }
        moved |= self.send();
        moved | self.close()
    }

    fn receive(&mut self) -> bool {
        let mut moved = false;
        if self.connection.stream().is_some_and(Stream::waits_for_receive) && !self.host.receives.is_empty() {
            self.connection.resume(self.now, &mut self.host);
            moved = true;
        }
        if !self.reads() {
            return moved;
        }
        let mut bytes = vec![0; self.some()];
        if self.behind.is_empty() {
            let Some(tcp) = &mut self.tcp else { return moved };
            match tcp.read(&mut bytes) {
                Ok(0) => {
                    self.peer_closed = true;
                    self.connection.peer_closed(&mut self.host);
                    return true;
                }
                Ok(read) => bytes.truncate(read),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return moved,
                Err(error) => return self.lose(&error),
            }
        } else {
            bytes = std::mem::take(&mut self.behind);
        }
        if self.socket == Socket::Open {
            let used = self.connection.handle_bytes(self.now, &bytes, &mut self.host);
            self.behind = bytes.split_off(used);
            assert!(self.connection.kept() <= fpdu::MAX_FPDU, "at most one FPDU is kept");
        }
        true
    }

    fn send(&mut self) -> bool {
        let mut moved = false;
        let mut out = vec![0xee; fpdu::MAX_FPDU];
        while self.outgoing.len() < MAX_OUTGOING
            && let Some(written) = self.connection.poll_transmit(&mut out, &mut self.host)
        {
            self.outgoing.extend(&out[..written]);
            moved = true;
        }
        if self.socket != Socket::Open || self.outgoing.is_empty() {
            return moved;
        }
        let most = self.some().min(self.outgoing.len());
        let Some(tcp) = &mut self.tcp else { return moved };
        match tcp.write(&self.outgoing[..most]) {
            Ok(written) => {
                self.outgoing.drain(..written);
                self.connection.taken(written, &mut self.host);
                true
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => moved,
            Err(error) => self.lose(&error),
        }
    }

    fn close(&mut self) -> bool {
        let Some(tcp) = &self.tcp else { return false };
        match (self.socket, self.connection.close()) {
            (Socket::Open, Some(Close::Reset)) => {
                rustix::net::sockopt::set_socket_linger(tcp, Some(Duration::ZERO)).unwrap();
                self.drop_socket();
                true
            }
            (Socket::Open, Some(Close::Finish)) => {
                // The peer may have reset the connection.
                let _ = tcp.shutdown(Shutdown::Write);
                self.socket = Socket::ShutDown;
                true
            }
            (Socket::ShutDown, _) if self.peer_closed => {
                self.drop_socket();
                true
            }
            _ => false,
        }
    }

    /// The connection was reset.
    fn lose(&mut self, error: &std::io::Error) -> bool {
        assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
        self.connection.reset(&mut self.host);
        self.drop_socket();
        true
    }

    fn drop_socket(&mut self) {
        self.tcp = None;
        self.socket = Socket::Closed;
        self.outgoing.clear();
        self.behind.clear();
    }

    /// Bytes of the peer are wanted.
    fn reads(&self) -> bool {
        let waits = self.connection.stream().is_some_and(Stream::waits_for_receive);
        !self.peer_closed && self.tcp.is_some() && !waits
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        let tcp = self.tcp.as_ref()?;
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.reads());
        wanted.set(PollFlags::OUT, self.socket == Socket::Open && !self.outgoing.is_empty());
        (!wanted.is_empty()).then(|| PollFd::new(tcp, wanted))
    }
}

/// Waits until one of the sockets is ready.
pub(super) fn wait<'a>(endpoints: impl IntoIterator<Item = &'a Endpoint>) {
    let mut sockets: Vec<PollFd<'_>> = endpoints.into_iter().filter_map(Endpoint::poll_fd).collect();
    assert!(!sockets.is_empty(), "no socket is left to wait for");
    assert!(poll(&mut sockets, Some(&STUCK)).unwrap() > 0, "the connection is stuck");
}

/// Lets one end run until a condition holds.
pub(super) fn run_one(end: &mut Endpoint, mut done: impl FnMut(&Endpoint) -> bool) {
    while !done(end) {
        if !end.step() {
            wait([&*end]);
        }
    }
}

/// Lets both ends run until a condition holds.
pub(super) fn run(ends: &mut [Endpoint; 2], mut done: impl FnMut(&mut [Endpoint; 2]) -> bool) {
    while !done(ends) {
        let moved = [ends[0].step(), ends[1].step()];
        if moved == [false, false] && !done(ends) {
            wait(&*ends);
        }
    }
}

/// Two ends whose connection is to be established: the initiator and the responder.
pub(super) fn ends(initiator: Connection, tuning: Tuning, memory: usize, seed: u64) -> [Endpoint; 2] {
    let (connected, accepted) = sockets();
    let responder = Connection::respond(START, tuning);
    [Endpoint::new(connected, initiator, memory, seed), Endpoint::new(accepted, responder, memory, seed ^ 1)]
}

/// Lets the responder accept the request, and returns the properties at both ends.
pub(super) fn establish(ends: &mut [Endpoint; 2], limits: pvrdma_iwarp::Limits) -> [Negotiated; 2] {
    run(ends, |[_, responder]| !responder.events.is_empty());
    let here = ends[1].connection.accept(limits, b"welcome").unwrap();
    run(ends, |[initiator, _]| !initiator.events.is_empty());
    let Some(Event::Established { negotiated, private_data }) = ends[0].events.pop() else { unreachable!() };
    assert_eq!(private_data, b"welcome");
    let both = [negotiated, here];
    ends.iter_mut().for_each(|end| end.events.clear());
    both
}

/// Two ends with an established connection.
pub(super) fn established(tuning: Tuning, memory: usize, seed: u64) -> [Endpoint; 2] {
    let initiator = Connection::initiate(START, LIMITS, tuning, b"hello").unwrap();
    let mut ends = ends(initiator, tuning, memory, seed);
    establish(&mut ends, LIMITS);
    ends
}
