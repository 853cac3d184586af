//! Decisions of `multipath`: when a connection takes other paths, how many, and which.

use super::send_state::Seq;
use crate::path::ENTROPY;
use crate::split_mix::SplitMix64;

/// Minimum number of congested round trips before a connection moves or starts to use several paths.
const FEW: u32 = 3;
/// The same for a connection that uses several paths, and for one that should but must not.
const MANY: u32 = 2048;
/// Number of moves before a connection uses several paths at a time.
const MOVES: u32 = 3;
/// Number of consecutive round trips without congestion after which earlier congested ones and moves no longer count.
const CALM: u32 = 512;
/// The same for a connection on several paths, which then returns to one path.
const LONG_CALM: u32 = 4096;
/// Number of round trips for which the set of paths is kept after a cut of the window.
const FREEZE: u32 = 64;
/// Number of paths that a connection uses at a time, as the exponent of a power of two.
const PATHS_LOG2: u32 = 4;
const PATHS: usize = 1 << PATHS_LOG2;
/// Number of consecutive probes that start a search.
pub(super) const PROBES: u32 = 2;
/// Number of copies of the oldest packet at the start of a search, besides that packet.
const COPIES: u32 = 3;

/// Number of paths that packets take at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// All packets take one path.
    Single,
    /// Packets are spread over several paths.
    Spraying,
    /// Each packet takes a new path, until a response arrives.
    Searching,
}

/// Reaction to the congestion of past round trips.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// Nothing changes.
    Stay,
    /// All packets take another path.
    Move,
    /// Packets are spread over several paths.
    Spray,
    /// All packets take the path of the last one.
    Settle,
}

/// Congestion in a round trip.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Round {
    Calm,
    /// A packet was marked, or the queueing delay is close to its maximum.
    Congested,
    /// The congestion window was cut, because packets were lost.
    Cut,
}

/// Paths of a connection among equal-cost paths.
#[derive(Debug)]
pub(super) struct Multipath {
    pub(super) enabled: bool,
    pub(super) mode: Mode,
    /// Entropy of the last packet.
    pub(super) entropy: u16,
    /// Entropies of the last packets, while they are spread.
    set: [u16; PATHS],
    /// Random numbers, so that connections do not select the same paths.
    random: SplitMix64,
    /// PSN after the round trip under observation.
    pub(super) until: Seq,
    /// A packet was marked in this round trip.
    pub(super) marked: bool,
    /// The round trip began on another path.
    mixed: bool,
    /// Responses were observed to take the path of requests.
    pub(super) peer_follows: bool,
    /// Number of window cuts at the start of the round trip.
    pub(super) cuts: u64,
    /// Number of congested round trips, and of consecutive round trips without congestion.
    congested: u32,
    calm: u32,
    /// Number of congested round trips that leads to the next move, and number of moves.
    limit: u32,
    moves: u32,
    /// Number of round trips for which the set is still kept.
    frozen: u32,
    /// Copies of the oldest packet to be sent.
    pub(super) copies: u32,
    /// Path before the last move, until a response has arrived on the new one.
    pub(super) fallback: Option<u16>,
    /// Source port of responses on the connection's own path.
    pub(super) peer_port: Option<u16>,
}

impl Multipath {
    /// Creates the state. Connections with different seeds take different paths.
    pub(super) const fn new(enabled: bool, seed: u64) -> Self {
        Self {
            enabled,
            mode: Mode::Single,
            entropy: 0,
            set: [0; PATHS],
            random: SplitMix64::new(seed),
            until: 0,
            marked: false,
            mixed: false,
            peer_follows: false,
            cuts: 0,
            congested: 0,
            calm: 0,
            limit: FEW,
            moves: 0,
            frozen: 0,
            copies: 0,
            fallback: None,
            peer_port: None,
        }
    }

    /// Bits in which the source port differs from the connection's own.
    pub(super) const fn entropy(&self) -> u16 {
        self.entropy
    }

    fn draw(&mut self) -> u16 {
        let [low, high, ..] = self.random.draw().to_le_bytes();
        u16::from_le_bytes([low, high]) & ENTROPY
    }

    /// Draws an entropy that differs from the current one.
    pub(super) fn other_entropy(&mut self) -> u16 {
        self.entropy ^ self.draw().max(1)
    }

    /// Ends a round trip.
    pub(super) fn end_round_trip(&mut self, round: Round) -> Decision {
        if std::mem::take(&mut self.mixed) {
            return Decision::Stay;
        }
        self.frozen = if round == Round::Cut { FREEZE } else { self.frozen.saturating_sub(1) };
        if round == Round::Calm {
            self.calm = self.calm.saturating_add(1);
            let patience = if self.mode == Mode::Spraying { LONG_CALM } else { CALM };
            if self.calm < patience {
                return Decision::Stay;
            }
            (self.congested, self.calm, self.moves, self.limit) = (0, 0, 0, FEW);
            return if self.mode == Mode::Spraying { Decision::Settle } else { Decision::Stay };
        }
        self.calm = 0;
        self.congested = self.congested.saturating_add(1);
        match self.mode {
            Mode::Single if self.congested < self.limit => Decision::Stay,
            Mode::Single if self.moves >= MOVES => Decision::Spray,
            // If packets meet congestion on all paths, one path will do as well.
            Mode::Spraying if self.congested < MANY => Decision::Stay,
            Mode::Single | Mode::Spraying => Decision::Move,
            Mode::Searching => Decision::Stay,
        }
    }

    /// Moves to another single path, and returns it.
    pub(super) fn change_path(&mut self) -> u16 {
        self.moves = if self.mode == Mode::Spraying { 0 } else { self.moves.saturating_add(1) };
        // The limit is random, so that two connections that meet on a path do not leave it together.
        self.limit = FEW + u32::from(self.draw()) % FEW;
        self.congested = 0;
        self.begin_again();
        self.fallback = Some(self.entropy);
        self.other_entropy()
    }

    /// Starts to spread packets over several paths.
    pub(super) fn spray(&mut self) {
        self.mode = Mode::Spraying;
        (self.frozen, self.congested) = (0, 0);
        self.begin_again();
        self.fallback = None;
        self.set = [(); PATHS].map(|()| self.draw());
    }

    /// Stays on the current path for a long while, although it is congested.
    pub(super) const fn hold(&mut self) {
        (self.limit, self.moves, self.congested, self.calm) = (MANY, 0, 0, 0);
    }

    /// Starts a search.
    pub(super) const fn search(&mut self) {
        self.mode = Mode::Searching;
        self.copies = COPIES;
        self.begin_again();
    }

    /// Ignores the current round trip, because some of its packets took another path.
    pub(super) const fn begin_again(&mut self) {
        self.mixed = true;
    }

    /// Returns the index in the set for the packet at `seq`.
    ///
    /// Multiples of the golden ratio are spread evenly (Knuth, "The Art of Computer Programming", section 6.4). So the
    /// indexes of consecutive packets differ, and so do those of packets at a regular distance.
    const fn index(seq: Seq) -> usize {
        (seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - PATHS_LOG2)) as usize
    }

    /// Returns the entropy for the packet at `seq`. `lost`: it was lost on its previous path.
    ///
    /// Usually each packet takes a new path: no set of a few paths is balanced as well as all of them. After a cut of
    /// the window, paths are reused for a while, except those on which packets are lost or marked, so that a dead or
    /// slow path is soon out of use.
    pub(super) fn spread(&mut self, seq: Seq, lost: bool) -> u16 {
        let other = self.draw();
        let Some(entropy) = self.set.get_mut(Self::index(seq)) else { return other };
        if lost || self.frozen == 0 {
            *entropy = other;
        }
        *entropy
    }

    /// Stops to use a congested path.
    pub(super) fn leave(&mut self, entropy: u16) {
        let other = self.draw();
        if let Some(member) = self.set.iter_mut().find(|member| **member == entropy) {
            *member = other;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Applies round trips until a decision is taken. Returns their number, and the decision.
    fn rounds(multipath: &mut Multipath, round: Round) -> (u32, Decision) {
        let mut count = 1;
        loop {
            match multipath.end_round_trip(round) {
                Decision::Stay => count += 1,
                decision => return (count, decision),
            }
        }
    }

    /// A connection on several paths.
    fn spraying() -> Multipath {
        let mut multipath = Multipath::new(true, 7);
        multipath.spray();
        assert_eq!(multipath.end_round_trip(Round::Congested), Decision::Stay, "the round trip began on one path");
        multipath
    }

    #[test]
    fn a_connection_moves_and_then_uses_several_paths() {
        let mut multipath = Multipath::new(true, 7);
        assert_eq!(rounds(&mut multipath, Round::Congested), (FEW, Decision::Move));
        for number in 1..=MOVES {
            multipath.entropy = multipath.change_path();
            let (count, decision) = rounds(&mut multipath, Round::Congested);
            // The round trip of the move is not counted.
            assert!((FEW + 1..=2 * FEW).contains(&count), "{count}");
            assert_eq!(decision, if number < MOVES { Decision::Move } else { Decision::Spray });
        }
        multipath.hold();
        assert_eq!(rounds(&mut multipath, Round::Congested), (MANY, Decision::Move));
    }

    #[test]
    fn a_connection_returns_to_one_path() {
        let mut calm = spraying();
        assert_eq!(rounds(&mut calm, Round::Calm), (LONG_CALM, Decision::Settle));
        let mut congested = spraying();
        assert_eq!(rounds(&mut congested, Round::Congested), (MANY, Decision::Move));
    }

    #[test]
    fn rare_congestion_is_ignored() {
        let mut multipath = Multipath::new(true, 7);
        for _ in 0..10 {
            (0..FEW - 1).for_each(|_| assert_eq!(multipath.end_round_trip(Round::Congested), Decision::Stay));
            (0..CALM).for_each(|_| assert_eq!(multipath.end_round_trip(Round::Calm), Decision::Stay));
        }
    }

    #[test]
    fn paths_are_reused_after_a_cut_unless_packets_are_lost_or_marked_there() {
        let mut multipath = spraying();
        let used = |multipath: &mut Multipath, lost: bool| -> Vec<u16> {
            (0..PATHS as Seq).map(|seq| multipath.spread(seq, lost)).collect()
        };
        assert_ne!(used(&mut multipath, false), used(&mut multipath, false));
        multipath.end_round_trip(Round::Cut);
        let before = used(&mut multipath, false);
        assert_eq!(before, used(&mut multipath, false));
        multipath.leave(before[3]);
        let after = used(&mut multipath, false);
        assert!(before.iter().zip(&after).enumerate().all(|(at, (before, after))| (before != after) == (at == 3)));
        assert!(used(&mut multipath, true).iter().zip(&after).all(|(now, before)| now != before));
        (0..FREEZE).for_each(|_| assert_eq!(multipath.end_round_trip(Round::Calm), Decision::Stay));
        assert_ne!(used(&mut multipath, false), used(&mut multipath, false));
    }

    #[test]
    fn packets_at_a_regular_distance_take_most_paths() {
        for distance in [1, 4, 64, 256] {
            let indexes = (0..64).map(|number| Multipath::index(number * distance));
            assert!(indexes.collect::<BTreeSet<_>>().len() * 4 >= PATHS * 3, "{distance}");
        }
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
