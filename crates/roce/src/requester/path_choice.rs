//! Decisions of `multipath`: when a connection takes another path, and which.

use super::send_state::Seq;
use crate::path::ENTROPY;
use crate::split_mix::SplitMix64;

/// Congested round trips before a connection moves: initial value, and upper bound.
const FEW: u32 = 4;
const MANY: u32 = 1024;
/// Number of moves without penalty: the first few may collide with other connections that move as well.
const FREE_MOVES: u32 = 3;
/// Number of round trips without congestion after which earlier congested ones no longer count, and after which one
/// move is forgotten.
const CALM: u32 = 64;
const FORGET: u32 = 512;
/// Number of consecutive probes that start a search.
pub(super) const PROBES: u32 = 2;
/// Number of copies of the oldest packet at the start of a search, besides that packet.
pub(super) const COPIES: u32 = 3;

/// Path of a connection among equal-cost paths.
#[derive(Debug)]
pub(super) struct Multipath {
    pub(super) enabled: bool,
    pub(super) entropy: u16,
    /// Random numbers, so that connections do not move together.
    random: SplitMix64,
    /// PSN after the round trip under observation.
    pub(super) until: Seq,
    /// A packet was marked in this round trip.
    pub(super) marked: bool,
    /// The round trip began on another path.
    pub(super) mixed: bool,
    /// Number of window cuts at the start of the round trip.
    pub(super) cuts: u64,
    /// Number of congested round trips, and of consecutive round trips without congestion.
    pub(super) congested: u32,
    pub(super) calm: u32,
    /// Number of congested round trips that leads to a move.
    pub(super) limit: u32,
    /// Moves that are not forgotten.
    pub(super) moves: u32,
    /// Path before the last move, until a response has arrived on the new one.
    pub(super) fallback: Option<u16>,
    pub(super) searching: bool,
    /// Copies of the oldest packet to be sent.
    pub(super) copies: u32,
    /// Source port of responses on the connection's own path.
    pub(super) peer_port: Option<u16>,
    /// Responses were observed to take the path of requests.
    pub(super) peer_follows: bool,
}

impl Multipath {
    /// Creates the state. Connections with different seeds take different paths.
    pub(super) const fn new(enabled: bool, seed: u64) -> Self {
        Self {
            enabled,
            entropy: 0,
            random: SplitMix64::new(seed),
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

    /// Returns `true` during a search, while each packet takes another path.
    #[inline]
    pub(super) const fn is_searching(&self) -> bool {
        self.searching
    }

    /// Draws an entropy that differs from the current one.
    pub(super) fn other_entropy(&mut self) -> u16 {
        let [low, high, ..] = self.random.draw().to_le_bytes();
        let change = u16::from_le_bytes([low, high]) & ENTROPY;
        self.entropy ^ change.max(1)
    }

    /// Ends a round trip. `idle`: nothing is in flight, so that no packet can be overtaken. Returns `true` if it is
    /// time to move.
    pub(super) fn end_round_trip(&mut self, congested: bool, idle: bool) -> bool {
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

    /// Records a move because of congestion.
    pub(super) fn on_move(&mut self) {
        self.moves = self.moves.saturating_add(1);
        let most = (FEW << self.moves.saturating_sub(FREE_MOVES).min(MANY.ilog2())).min(MANY);
        // The limit is random, so that two connections that meet on a path do not leave it together.
        let more = self.random.draw() % u64::from(most);
        self.limit = most.saturating_add(u32::try_from(more).unwrap_or(0));
        self.congested = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of round trips until a move, `count` times.
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
        // Between messages the connection may leave sooner.
        let mut idle = Multipath::new(true, 7);
        assert_eq!(moves(&mut idle, 1, true), [FEW / 2]);
        // After a while without congestion the connection moves once more.
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
        // The round trip of the move says nothing about the new path.
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
