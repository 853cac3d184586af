//! A flood of strangers and a peer in virtual time: no socket, no thread, no clock.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;
use crate::tls::handshake::{ACCEPT_BATCH, ACCEPT_INTERVAL};

/// Time from the ClientHello to the certificate of its sender.
const ROUND_TRIP: Duration = Duration::from_millis(100);
const STEP: Duration = Duration::from_millis(1);

/// Behaviour of the strangers.
#[derive(Clone, Copy, Debug)]
struct Flood {
    /// Connections per second.
    rate: u64,
    /// Number of source addresses, used in turn.
    sources: u64,
    /// They send a ClientHello, the only step that needs no key.
    hello: bool,
    /// They use the peer's address, too.
    beside: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Id {
    Stranger { hello: bool },
    Peer,
}

/// Address of the peer.
const PEER: Source = Source(0);

struct World {
    admission: Admission<Id>,
    flood: Flood,
    start: Instant,
    now: Instant,
    /// Connections in the kernel's queue, not accepted yet.
    queue: Vec<(Source, Id)>,
    strangers: u64,
    /// Time at which the peer's certificate arrives, once the peer was answered.
    proof: Option<Instant>,
    connected: bool,
}

impl World {
    fn new(flood: Flood, seed: u64) -> Self {
        let start = Instant::now();
        // Seeds that are close to each other would otherwise begin with similar numbers.
        let random = Random::Seed((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let admission = Admission::new(start, random);
        Self { admission, flood, start, now: start, queue: Vec::new(), strangers: 0, proof: None, connected: false }
    }

    fn source(&self) -> Source {
        let number = u128::from(self.strangers % self.flood.sources);
        if self.flood.beside { Source(number) } else { Source(number + 1) }
    }

    /// Runs one millisecond of the link's thread.
    fn step(&mut self) {
        self.now += STEP;
        let due = u64::try_from((self.now - self.start).as_millis()).unwrap() * self.flood.rate / 1000;
        while self.strangers < due {
            self.queue.push((self.source(), Id::Stranger { hello: self.flood.hello }));
            self.strangers += 1;
        }
        let millis = u128::from(u64::try_from((self.now - self.start).as_millis()).unwrap());
        if millis.is_multiple_of(ACCEPT_INTERVAL.as_millis()) {
            for (source, id) in self.queue.drain(..self.queue.len().min(ACCEPT_BATCH)).collect::<Vec<_>>() {
                // A ClientHello follows the last packet of the TCP handshake at once.
                self.admission.admit(source, id, id != (Id::Stranger { hello: false }));
            }
            self.give_way();
        }
        while let Some(index) = self.admission.next_speaking(self.now) {
            self.admission.charge(self.now);
            self.admission.is_answered(index);
            if *self.admission.get_mut(index).unwrap() == Id::Peer {
                self.proof = Some(self.now + ROUND_TRIP);
            }
            self.give_way();
        }
        if self.proof.is_some_and(|at| at <= self.now) {
            self.admission.remove_if(|id| *id == Id::Peer).unwrap();
            self.admission.proved(PEER);
            self.connected = true;
        }
        for (stage, most) in TABLES {
            assert!(self.admission.count(stage) <= most, "{stage:?}");
        }
    }

    fn give_way(&mut self) {
        while let Some(victim) = self.admission.one_too_many() {
            if victim == Id::Peer {
                self.proof = None;
            }
        }
    }

    fn is_trying(&self) -> bool {
        self.queue.iter().any(|(_, id)| *id == Id::Peer) || self.admission.iter().any(|(id, _)| *id == Id::Peer)
    }

    /// Connects the peer, repeatedly, until it is authenticated. Returns the number of attempts.
    fn connect(&mut self) -> u32 {
        // The flood fills the tables first.
        (0..300).for_each(|_| self.step());
        (self.connected, self.proof) = (false, None);
        let mut attempts = 0;
        while !self.connected {
            if !self.is_trying() {
                attempts += 1;
                assert!(attempts < 100, "{:?}: the peer is kept out", self.flood);
                // All state of the previous attempt is gone before the next one, however long the peer waits.
                self.queue.push((PEER, Id::Peer));
            }
            self.step();
        }
        attempts
    }
}

/// Returns the highest number of attempts of the peer for this many seeds.
fn most_attempts(flood: Flood, seeds: u64) -> u32 {
    (0..seeds).map(|seed| World::new(flood, seed).connect()).max().unwrap()
}

#[test]
fn a_peer_is_admitted_at_once_beside_silent_strangers() {
    for rate in [400, 2000] {
        for (sources, beside) in [(1, false), (100, false), (1_000_000, false), (1, true)] {
            let flood = Flood { rate, sources, hello: false, beside };
            assert_eq!(most_attempts(flood, 8), 1, "{flood:?}");
        }
    }
}

#[test]
fn a_peer_is_admitted_at_once_beside_strangers_of_few_addresses_with_handshakes() {
    for rate in [400, 2000] {
        for sources in [1, 8] {
            let flood = Flood { rate, sources, hello: true, beside: false };
            assert_eq!(most_attempts(flood, 8), 1, "{flood:?}");
        }
    }
}

/// With as many addresses as connections, or with the peer's own address, nothing distinguishes the strangers, so
/// chance decides.
#[test]
fn a_peer_is_admitted_eventually_beside_strangers_that_look_alike() {
    for (rate, most) in [(400, 8), (2000, 40)] {
        for (sources, beside) in [(1_000_000, false), (1, true)] {
            let flood = Flood { rate, sources, hello: true, beside };
            let attempts = most_attempts(flood, 8);
            assert!(attempts <= most, "{flood:?}: {attempts}");
        }
    }
}

#[test]
fn a_source_that_had_a_session_gets_in_at_once() {
    for rate in [400, 2000] {
        let flood = Flood { rate, sources: 1_000_000, hello: true, beside: false };
        for seed in 0..8 {
            let mut world = World::new(flood, seed);
            world.admission.proved(PEER);
            assert_eq!(world.connect(), 1, "{flood:?}");
        }
    }
}

/// A source is a host, whichever of its addresses it uses.
#[test]
fn sources_are_hosts() {
    let v4 = |last| SocketAddr::from((Ipv4Addr::new(10, 0, 0, last), 1));
    let v6 = |net, last| SocketAddr::from((Ipv6Addr::new(0xfd00, 0, 0, net, 0, 0, 0, last), 1));
    assert_ne!(Source::from(v4(1)), Source::from(v4(2)));
    assert_eq!(Source::from(v4(1)), Source::from(SocketAddr::from((Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped(), 2))));
    assert_eq!(Source::from(v6(1, 1)), Source::from(v6(1, 2)));
    assert_ne!(Source::from(v6(1, 1)), Source::from(v6(2, 1)));
}

/// However many silent connections there are, no speaking one is closed for them.
#[test]
fn a_silent_connection_gives_way_first() {
    for seed in 1..20 {
        let mut admission = Admission::new(Instant::now(), Random::Seed(seed << 40));
        (0..MAX_SPEAKING).for_each(|number| admission.admit(Source(1), number, true));
        for number in 1000..2000 {
            admission.admit(Source(2 + u128::try_from(number).unwrap()), number, false);
            assert!(admission.one_too_many().is_none_or(|victim| victim >= 1000));
        }
        assert_eq!((admission.count(Stage::Speaks), admission.count(Stage::Silent)), (MAX_SPEAKING, MAX_SILENT));
        // A few bytes that are not a ClientHello make the connection silent again.
        let index = admission.next_speaking(Instant::now()).unwrap();
        admission.is_silent(index);
        let victim = admission.one_too_many().unwrap();
        assert_eq!((victim < 1000, admission.count(Stage::Silent)), (true, MAX_SILENT), "its source has the most");
    }
}

#[test]
fn known_sources_are_bounded() {
    let mut admission: Admission<()> = Admission::new(Instant::now(), Random::Seed(1));
    (0..100).for_each(|number| admission.proved(Source(number)));
    admission.proved(Source(90));
    assert_eq!((admission.known.len(), admission.known.first()), (MAX_KNOWN, Some(&Source(84))));
    assert_eq!(admission.known.last(), Some(&Source(90)));
}
