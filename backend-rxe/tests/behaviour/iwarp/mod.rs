//! Connections by iWARP over sockets of the loopback interface, with guests that the tests play message by message.
//!
//! Each test has a network of its own in 127.0.0.0/8, whose hosts have the numbers of the guests' addresses.

mod connections;
mod endings;
mod errors;
mod guest;
mod hostile;
mod sockets;
mod threads;
mod transfers;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_ib_cm::{Dreq, Message, Rep, Req};
use pvrdma_link::{Clock, ManualClock, MonotonicClock};
use pvrdma_rxe::{IwarpConfig, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::{AddressRule, Hca, QueuePair, Rules};
use pvrdma_verbs_types::{GidType, QpAttrs, QpType, Qpn};

use crate::world::{End, Node, gid, mac};
use guest::CmGuest;
use sockets::Loopback;

/// Port on which the program of each guest listens.
pub(crate) const PORT: u16 = 7174;
/// Time after which a test has failed.
const STUCK: Duration = Duration::from_secs(60);

/// Two guests, each on an engine of its own.
pub(crate) struct Net {
    // Dropped first: the queue pairs of a guest end before its engine.
    pub(crate) guests: [CmGuest; 2],
    pub(crate) engines: [Rxe; 2],
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) sockets: Arc<Loopback>,
    _stations: Vec<RxeStation>,
}

/// The two ends of a connection, with the answer of the guest that accepted.
pub(crate) struct Ends {
    pub(crate) left: End,
    pub(crate) right: End,
    pub(crate) rep: Rep,
    pub(crate) req: Req,
}

impl Net {
    pub(crate) fn new() -> Self {
        Self::with(0, |config| config)
    }

    /// Guests on the same engine, whose devices do not reach each other by local delivery.
    pub(crate) fn on_one_engine() -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = RxeConfig::default().with_workers(0).with_clock(Arc::clone(&clock) as _).with_local(false);
        let engine = Rxe::new(config).unwrap();
        Self::on([engine.clone(), engine], clock, |config| config)
    }

    /// Guests on engines with this number of workers, with changes of the configuration.
    pub(crate) fn with(workers: usize, change: impl Fn(IwarpConfig) -> IwarpConfig) -> Self {
        let clock = Arc::new(ManualClock::default());
        let time: Arc<dyn Clock> =
            if workers > 0 { Arc::new(MonotonicClock::default()) } else { Arc::clone(&clock) as _ };
        let config = RxeConfig::default().with_workers(workers).with_clock(time);
        Self::on([(); 2].map(|()| Rxe::new(config.clone()).unwrap()), clock, change)
    }

    fn on(engines: [Rxe; 2], clock: Arc<ManualClock>, change: impl Fn(IwarpConfig) -> IwarpConfig) -> Self {
        let sockets = Arc::new(Loopback::new());
        let mut stations = Vec::new();
        let guests = [0, 1].map(|at: usize| {
            let number = u8::try_from(at + 1).unwrap();
            let station = engines[at].station(mac(number));
            let peers = vec!["10.0.0.0/24".parse().unwrap()];
            station.set_iwarp(Some(change(IwarpConfig::new(Arc::clone(&sockets) as _, peers))));
            stations.push(station);
            let rules = Rules::default().with_addresses(AddressRule::ANY).with_listen(vec![PORT]);
            let node = Node::with_rules(&engines[at], number, 64 << 20, rules);
            node.hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
            CmGuest::new(node)
        });
        let net = Self { guests, engines, clock, sockets, _stations: stations };
        net.until("the guests listen", || net.sockets.listens(1) && net.sockets.listens(2));
        net
    }

    /// Runs both engines once.
    pub(crate) fn run(&self) {
        while self.engines.iter().map(Rxe::run_ready).sum::<usize>() > 0 {}
    }

    /// Runs both engines until a condition holds, which the kernel's network may have to fulfil.
    pub(crate) fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        loop {
            self.run();
            if condition() {
                return;
            }
            assert!(start.elapsed() < STUCK, "{what}: did not happen");
            std::thread::yield_now();
        }
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, time: Duration) {
        self.clock.advance(time);
        self.run();
    }

    /// Returns the next message that a guest gets.
    pub(crate) fn next(&self, guest: usize) -> Message {
        self.until("a message", || self.guests[guest].has_message());
        self.guests[guest].take_message()
    }

    /// Returns the REQ that a guest gets next.
    pub(crate) fn next_req(&self, guest: usize) -> Req {
        match self.next(guest) {
            Message::Req(req) => *req,
            message => unreachable!("no REQ: {message:?}"),
        }
    }

    /// Returns the REP that a guest gets next.
    pub(crate) fn next_rep(&self, guest: usize) -> Rep {
        match self.next(guest) {
            Message::Rep(rep) => rep,
            message => unreachable!("no REP: {message:?}"),
        }
    }

    /// Returns a QP of a guest, in RESET.
    pub(crate) fn qp(&self, guest: usize) -> End {
        self.guests[guest].node.qp_with(QpType::Rc, None, |init| init.caps.max_send_sge = 16)
    }

    /// Connects a QP of the first guest with one of the second.
    pub(crate) fn connect(&self) -> Ends {
        self.connect_with(|_| {}, |_| {})
    }

    /// As [`Self::connect`], with changes of the REQ and the REP.
    pub(crate) fn connect_with(&self, change: impl FnOnce(&mut Req), answer: impl FnOnce(&mut Rep)) -> Ends {
        let (left, right) = (self.qp(0), self.qp(1));
        let mut request = self.guests[0].request(gid(2), PORT, left.qp.qpn());
        change(&mut request);
        self.guests[0].send(gid(2), Message::Req(Box::new(request)));
        let req = self.next_req(1);
        self.accept(&right, &req, answer);
        assert!(matches!(self.next(1), Message::Rtu(_)));
        let rep = self.next_rep(0);
        to_rts(&left, 2, rep.qpn);
        self.guests[0].send(gid(2), self.guests[0].rtu(&rep));
        self.run();
        Ends { left, right, rep, req }
    }

    /// Lets the second guest accept a request with a QP.
    pub(crate) fn accept(&self, right: &End, req: &Req, answer: impl FnOnce(&mut Rep)) {
        to_rts(right, 1, req.qpn);
        let mut rep = self.guests[1].accept(req, right.qp.qpn());
        answer(&mut rep);
        self.guests[1].send(gid(1), Message::Rep(rep));
    }

    /// Waits for the DREQ of a peer, and answers it.
    pub(crate) fn expect_disconnect(&self, guest: usize) -> Dreq {
        let Message::Dreq(dreq) = self.next(guest) else { unreachable!("no DREQ") };
        let peer = gid(if guest == 0 { 2 } else { 1 });
        self.guests[guest].send(peer, self.guests[guest].drep(&dreq));
        dreq
    }

    /// Waits until a queue has got this number of completions.
    pub(crate) fn wait(&self, queue: &pvrdma_verbs::testing::Completions, count: u64) {
        self.until("completions", || queue.total() >= count);
    }

    /// Returns a counter of a guest's adapter.
    pub(crate) fn counter(&self, guest: usize, name: &str) -> u64 {
        self.guests[guest].node.counter(name)
    }
}

/// Connects a QP with the peer of this number, as the guest's library does.
pub(crate) fn to_rts(end: &End, peer: u8, dest_qpn: Qpn) {
    end.connect(end, |attrs: &mut QpAttrs| {
        (attrs.dest_qpn, attrs.av.dgid, attrs.av.dmac) = (dest_qpn, gid(peer), mac(peer));
        (attrs.max_rd_atomic, attrs.max_dest_rd_atomic) = (128, 128);
    });
}

/// Reads from a socket until the peer has closed it. `None`: the peer has reset it.
pub(crate) fn read_to_end(net: &Net, socket: &TcpStream) -> Option<Vec<u8>> {
    use std::io::Read;
    socket.set_nonblocking(true).unwrap();
    let (start, mut all, mut bytes) = (Instant::now(), Vec::new(), [0; 4096]);
    loop {
        net.run();
        match (&*socket).read(&mut bytes) {
            Ok(0) => return Some(all),
            Ok(read) => all.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
        assert!(start.elapsed() < STUCK, "the peer does not close the connection");
        std::thread::yield_now();
    }
}
