//! Which of several equal paths a connection takes.
//!
//! Switches choose among equal paths by a hash of addresses and ports, so that a connection keeps to one, whatever
//! happens there. Between two ends that agreed ([`super::selective`]) it takes another one by another UDP source port,
//! as TCP does in Linux ("PLB", Qureshi et al., SIGCOMM 2022, and after timeouts): the bits in which the port differs
//! from the connection's own are its *entropy*. There are two reasons.
//!
//! * **Congestion.** Round trips in a row were congested: a packet was marked, the window was cut, or packets waited
//!   about as long as they ever do. Whoever has moved and meets congestion again waits twice as long before it moves
//!   once more, because other paths are probably not better; after a while without congestion that is forgotten. Right
//!   after a move packets of the old path are late and not lost.
//! * **Silence.** The second probe in a row, and each ACK timeout, begins a *search*: each packet takes another path,
//!   until something is heard. Whoever has just moved and hears nothing goes back where it was first.
//!
//! Responses take the path whose entropy the last request had, so that the requester, which alone has timers and sees
//! what READ responses meet, chooses for both directions; and a response tells which request got through.

use std::time::Duration;

use super::Requester;
use super::send_state::Seq;
use crate::path::ENTROPY;
use crate::wire::{Ecn, Operation, Packet};

/// Congested round trips before a connection moves: at first, and at most.
const FEW: u32 = 4;
const MANY: u32 = 1024;
/// Moves that cost nothing: the first few may meet others that move as well.
const FREE_MOVES: u32 = 3;
/// Round trips without congestion after which the congested ones before them say nothing, and after which one move is
/// forgotten.
const CALM: u32 = 64;
const FORGET: u32 = 512;
/// Probes in a row that begin a search.
const PROBES: u32 = 2;
/// Copies of the oldest packet when a search begins, beside that packet.
const COPIES: u32 = 3;

/// The path of a connection, among equal ones.
#[derive(Debug)]
pub(super) struct Multipath {
    enabled: bool,
    entropy: u16,
    /// State of a generator (SplitMix64): connections must not move together.
    random: u64,
    /// The PSN after the round trip that is looked at.
    until: Seq,
    /// A packet was marked in it.
    marked: bool,
    /// It began on another path.
    mixed: bool,
    /// Cuts of the window when it began.
    cuts: u64,
    /// Round trips that were congested, and those in a row that were not.
    congested: u32,
    calm: u32,
    /// How many have to be congested.
    limit: u32,
    /// Moves that are not forgotten.
    moves: u32,
    /// The path before the last move, until something has come on the new one.
    fallback: Option<u16>,
    searching: bool,
    /// Copies of the oldest packet that are to be sent.
    copies: u32,
    /// The source port of responses on the connection's own path.
    peer_port: Option<u16>,
    /// Responses were seen to take the path of requests.
    peer_follows: bool,
}

impl Multipath {
    /// `seed`: connections with another one take other paths.
    pub(super) const fn new(enabled: bool, seed: u64) -> Self {
        Self {
            enabled,
            entropy: 0,
            random: seed,
            until: 0,
            marked: false,
            mixed: false,
            cuts: 0,
            congested: 0,
            calm: 0,
            limit: FEW,
            moves: 0,
            fallback: None,
            searching: false,
            copies: 0,
            peer_port: None,
            peer_follows: false,
        }
    }

    /// Bits in which the source port differs from the connection's own.
    pub(super) const fn entropy(&self) -> u16 {
        self.entropy
    }

    /// Returns `true` while each packet takes another path.
    #[inline]
    pub(super) const fn is_searching(&self) -> bool {
        self.searching
    }

    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Another entropy than that of now.
    fn other_entropy(&mut self) -> u16 {
        let [low, high, ..] = self.random().to_le_bytes();
        let change = u16::from_le_bytes([low, high]) & ENTROPY;
        self.entropy ^ change.max(1)
    }

    /// A round trip is over. `idle`: nothing is in flight, so that nothing can be overtaken. Returns `true` if it is
    /// time to move.
    fn end_round_trip(&mut self, congested: bool, idle: bool) -> bool {
        if std::mem::take(&mut self.mixed) {
            return false;
        }
        if !congested {
            self.calm = self.calm.saturating_add(1);
            if self.calm == CALM {
                self.congested = 0;
            }
            if self.calm >= FORGET {
                self.calm = 0;
                self.moves = self.moves.saturating_sub(1);
                self.limit = (self.limit / 2).max(FEW);
            }
            return false;
        }
        self.calm = 0;
        self.congested = self.congested.saturating_add(1);
        self.congested >= if idle { self.limit.div_ceil(2) } else { self.limit }
    }

    /// It moves because of congestion.
    fn on_move(&mut self) {
        self.moves = self.moves.saturating_add(1);
        let most = (FEW << self.moves.saturating_sub(FREE_MOVES).min(MANY.ilog2())).min(MANY);
        // Two that meet on a path do not leave it together.
        let more = self.random() % u64::from(most);
        self.limit = most.saturating_add(u32::try_from(more).unwrap_or(0));
        self.congested = 0;
    }
}

impl Requester {
    /// A congestion notification came for what this connection sends.
    pub const fn handle_notification(&mut self) {
        self.multipath.marked = true;
    }

    /// Returns `true` if the connection may take other paths than its own.
    fn may_rehash(&self) -> bool {
        self.multipath.enabled && self.has_agreed() && self.path.source_port().is_some()
    }

    /// Packets take the path with this entropy from now on.
    pub(super) fn set_entropy(&mut self, entropy: u16) {
        self.path.turn(self.multipath.entropy ^ entropy);
        self.multipath.entropy = entropy;
    }

    /// A response came: looks at its path.
    #[inline]
    pub(super) fn on_response_path(&mut self, packet: &Packet<'_>) {
        if !self.multipath.enabled || !self.has_agreed() {
            return;
        }
        let header = &packet.header;
        if header.network.ecn() == Ecn::Congested
            && header.bth.opcode.info().is_some_and(|info| info.operation == Operation::ReadResponse)
        {
            self.multipath.marked = true;
        }
        let Some(port) = header.network.source_port() else { return };
        let entropy = (port ^ *self.multipath.peer_port.get_or_insert(port)) & ENTROPY;
        self.multipath.peer_follows |= entropy != 0;
        if entropy == self.multipath.entropy {
            self.multipath.fallback = None;
        }
        if self.multipath.searching {
            self.multipath.searching = false;
            self.multipath.copies = 0;
            // It has got through, and so did the request that it answers.
            if self.multipath.peer_follows {
                self.set_entropy(entropy);
            }
        }
    }

    /// `snd.una` has moved: a round trip may be over.
    #[inline]
    pub(super) fn watch_path(&mut self, now: Duration) {
        if self.multipath.enabled && self.snd.una >= self.multipath.until {
            self.end_round_trip(now);
        }
    }

    fn end_round_trip(&mut self, now: Duration) {
        let (una, max) = (self.snd.una, self.snd.max);
        self.multipath.until = max.max(una + 1);
        let cuts = self.recovery.cuts();
        let cut = std::mem::replace(&mut self.multipath.cuts, cuts) != cuts;
        let marked = std::mem::take(&mut self.multipath.marked);
        let congested = marked || cut || self.recovery.is_late();
        if self.multipath.end_round_trip(congested, una == max) && self.may_rehash() {
            self.multipath.on_move();
            self.multipath.fallback = Some(self.multipath.entropy);
            self.rehash();
            let tolerant = now.saturating_add(self.rto().unwrap_or_default().saturating_mul(2));
            self.scoreboard.on_rehash(tolerant, max);
            self.responses.on_rehash(tolerant);
        }
    }

    /// Nothing is heard any more: so many `probes` in a row say so.
    pub(super) fn search_path(&mut self, probes: u32) {
        if let Some(before) = self.multipath.fallback.take() {
            self.stats.rehashed += 1;
            self.set_entropy(before);
        } else if probes >= PROBES && self.may_rehash() {
            self.multipath.searching = true;
            self.multipath.copies = COPIES;
            self.rehash();
        }
    }

    fn rehash(&mut self) {
        self.stats.rehashed += 1;
        self.multipath.mixed = true;
        self.take_other_path();
    }

    /// The next packet takes another path.
    pub(super) fn take_other_path(&mut self) {
        let entropy = self.multipath.other_entropy();
        self.set_entropy(entropy);
    }

    /// Returns `true` if one more copy of the oldest packet is to be sent.
    pub(super) const fn take_copy(&mut self) -> bool {
        let left = self.multipath.copies.checked_sub(1);
        if let Some(left) = left {
            self.multipath.copies = left;
        }
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Round trips until it moves, so many times.
    fn moves(multipath: &mut Multipath, count: usize, idle: bool) -> Vec<u32> {
        let next = |_| {
            let mut rounds = 1;
            while !multipath.end_round_trip(true, idle) {
                rounds += 1;
            }
            multipath.on_move();
            rounds
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn who_meets_congestion_again_and_again_stays() {
        let mut multipath = Multipath::new(true, 7);
        let rounds = moves(&mut multipath, 16, false);
        assert_eq!(rounds[0], FEW);
        assert!(rounds[1..=3].iter().all(|rounds| (FEW..2 * FEW).contains(rounds)), "{rounds:?}");
        assert!(rounds[12..].iter().all(|rounds| (MANY..2 * MANY).contains(rounds)), "{rounds:?}");
        // Between messages it may leave sooner.
        let mut idle = Multipath::new(true, 7);
        assert_eq!(moves(&mut idle, 1, true), [FEW / 2]);
        // After a while without congestion it does so once more.
        (0..FORGET * 16).for_each(|_| assert!(!multipath.end_round_trip(false, false)));
        assert_eq!(moves(&mut multipath, 1, false), [FEW]);
    }

    #[test]
    fn congestion_now_and_then_is_none() {
        let mut multipath = Multipath::new(true, 7);
        for _ in 0..100 {
            (0..FEW - 1).for_each(|_| assert!(!multipath.end_round_trip(true, false)));
            (0..CALM).for_each(|_| assert!(!multipath.end_round_trip(false, false)));
        }
        // The round trip in which it moved says nothing of the new path.
        multipath.mixed = true;
        (0..FEW).for_each(|_| assert!(!multipath.end_round_trip(true, false)));
        assert!(multipath.end_round_trip(true, false));
    }

    #[test]
    fn another_path_is_another() {
        let mut multipath = Multipath::new(true, 0);
        for _ in 0..100_000 {
            let entropy = multipath.other_entropy();
            assert!(entropy != multipath.entropy && entropy <= ENTROPY);
            multipath.entropy = entropy;
        }
    }
}
