//! Packets that the responder has after the first missing one, if it reports them (called a scoreboard in RFC 6675).
//!
//! A missing packet is *lost* when enough later ones have arrived (some networks reorder), or when one has arrived some
//! time ago (RFC 8985). It is retransmitted alone. It counts as lost again when a packet has arrived that was sent
//! after the retransmission.

use std::time::Duration;

use super::congestion_window::Loss;
use super::loss_recovery::Reordering;
use super::send_state::Seq;
use crate::wire::SackMap;

/// Number of packets that may overtake another before it counts as lost at once.
pub(super) const MAX_REORDERING: Seq = 3;
/// Words of the bitmap: they hold the PSNs that a map covers, at any offset in a word.
const WORDS: usize = SackMap::MAX_DISTANCE as usize / 64 + 2;

/// A lost packet.
#[derive(Clone, Copy, Debug)]
struct Hole {
    seq: Seq,
    /// Its last retransmission. `None`: the packet is still to be retransmitted.
    sent: Option<Retransmission>,
}

#[derive(Clone, Copy, Debug)]
struct Retransmission {
    at: Duration,
    /// First PSN that was never sent at that time.
    max: Seq,
    /// Number of retransmissions before it.
    number: u64,
}

/// Packets that have arrived, and packets that have not.
#[derive(Debug)]
pub(super) struct Scoreboard {
    /// PSN of the first bit, a multiple of 64.
    base: Seq,
    words: [u64; WORDS],
    /// Bits that are set.
    received: u32,
    /// PSN after the newest packet that has arrived.
    newest: Seq,
    /// Lost packets in PSN order.
    holes: Vec<Hole>,
    retransmissions: u64,
    /// Number of the newest retransmission that has arrived.
    arrived: u64,
    /// Time since when packets are missing that only a few have overtaken, and the newest packet at that time.
    overtaken: Option<(Duration, Seq)>,
    /// Time of the oldest retransmission that a later packet has overtaken.
    overtaken_again: Option<Duration>,
}

impl Default for Scoreboard {
    fn default() -> Self {
        Self {
            base: 0,
            words: [0; WORDS],
            received: 0,
            newest: 0,
            holes: Vec::new(),
            retransmissions: 0,
            arrived: 0,
            overtaken: None,
            overtaken_again: None,
        }
    }
}

impl Scoreboard {
    /// Number of PSNs that have arrived after the first missing one.
    #[inline]
    pub(super) fn received(&self) -> Seq {
        self.received.into()
    }

    /// PSN after the newest packet that has arrived.
    pub(super) const fn newest(&self) -> Seq {
        self.newest
    }

    /// Returns `true` if the packet at `seq` has arrived.
    pub(super) fn has(&self, seq: Seq) -> bool {
        let place = self.place(seq);
        place.is_some_and(|(at, bit)| self.words.get(at).is_some_and(|word| word & bit != 0))
    }

    fn place(&self, seq: Seq) -> Option<(usize, u64)> {
        let distance = seq.checked_sub(self.base)?;
        Some((usize::try_from(distance / 64).ok()?, 1 << (distance % 64)))
    }

    /// Clears the state, because everything is about to be retransmitted.
    pub(super) fn clear(&mut self) {
        if self.newest > 0 {
            *self = Self { retransmissions: self.retransmissions, arrived: self.retransmissions, ..Self::default() };
        }
    }

    /// Handles progress: everything before `executed` is done.
    pub(super) fn on_executed(&mut self, executed: Seq) {
        if self.newest == 0 {
            return;
        }
        if executed >= self.newest {
            return self.clear();
        }
        let arrived = self.holes.iter().take_while(|hole| hole.seq < executed);
        let arrived = arrived.filter_map(|hole| hole.sent).map(|sent| sent.number).max();
        self.arrived = self.arrived.max(arrived.unwrap_or(0));
        self.holes.retain(|hole| hole.seq >= executed);
        let skip = usize::try_from(executed.saturating_sub(self.base) / 64).unwrap_or(WORDS).min(WORDS);
        if skip > 0 {
            self.words.copy_within(skip.., 0);
            self.words.iter_mut().rev().take(skip).for_each(|word| *word = 0);
            self.base += 64 * skip as Seq;
        }
        if let Some((0, bit)) = self.place(executed)
            && let Some(word) = self.words.first_mut()
        {
            *word &= !(bit - 1);
        }
        self.count();
    }

    fn count(&mut self) {
        self.received = self.words.iter().map(|word| word.count_ones()).sum();
    }

    /// Handles a report: the packet at `missing` has not arrived, and those in `map` have. PSNs from `max` on were
    /// never sent and are ignored. Returns `true` if one of the packets is new.
    pub(super) fn update(&mut self, missing: Seq, map: &SackMap, max: Seq) -> bool {
        if self.newest == 0 {
            self.base = missing / 64 * 64;
        }
        let before = self.received;
        for seq in map.distances().map(|distance| missing + Seq::from(distance)).take_while(|&seq| seq < max) {
            if let Some((at, bit)) = self.place(seq)
                && let Some(word) = self.words.get_mut(at)
            {
                *word |= bit;
                self.newest = self.newest.max(seq + 1);
            }
        }
        self.count();
        if self.received != before {
            let arrived = self.holes.iter().filter(|hole| self.has(hole.seq));
            let arrived = arrived.filter_map(|hole| hole.sent).map(|sent| sent.number).max();
            self.arrived = self.arrived.max(arrived.unwrap_or(0));
            let (words, base) = (self.words, self.base);
            self.holes.retain(|hole| {
                let distance = hole.seq.saturating_sub(base);
                let word = usize::try_from(distance / 64).ok().and_then(|at| words.get(at));
                word.is_none_or(|word| word >> (distance % 64) & 1 == 0)
            });
        }
        self.received != before
    }

    /// Finds lost packets among those that have not arrived, which are given in order and before [`Self::newest`].
    /// Packets that only a few have overtaken are lost, too, when that was long enough ago. Returns the new losses.
    pub(super) fn find_lost(&mut self, now: Duration, packets: impl Iterator<Item = Seq>, order: Reordering) -> Loss {
        let over = self.overtaken.filter(|(since, _)| since.saturating_add(order.time) <= now);
        let old = over.map_or(0, |(_, newest)| newest);
        self.overtaken = self.overtaken.filter(|_| over.is_none());
        let (mut late, mut lost) = (false, Loss::default());
        self.overtaken_again = None;
        for seq in packets.filter(|&seq| !self.has(seq)).collect::<Vec<_>>() {
            let enough = if seq < old { 0 } else { order.packets };
            match self.holes.binary_search_by_key(&seq, |hole| hole.seq) {
                Ok(at) if self.look_again(now, at, enough, order) => lost.add(seq, true),
                Ok(_) => {}
                Err(at) if self.newest > seq + enough => {
                    self.holes.insert(at, Hole { seq, sent: None });
                    lost.add(seq, false);
                }
                Err(_) => late = true,
            }
        }
        self.overtaken = late.then(|| self.overtaken.unwrap_or((now, self.newest)));
        lost
    }

    /// Checks a retransmission again: it is lost when a packet that was sent later has arrived. If packets take several
    /// paths, it is lost only some time after it was sent.
    fn look_again(&mut self, now: Duration, at: usize, enough: Seq, order: Reordering) -> bool {
        let Some(hole) = self.holes.get_mut(at) else { return false };
        let Some(sent) = hole.sent else { return false };
        if order.any_order {
            if self.newest <= sent.max && self.arrived <= sent.number {
                return false;
            }
            if now < sent.at.saturating_add(order.time) {
                let first = self.overtaken_again.get_or_insert(sent.at);
                *first = sent.at.min(*first);
                return false;
            }
        } else if self.newest <= sent.max + enough && self.arrived <= sent.number {
            return false;
        }
        hole.sent = None;
        true
    }

    /// Time at which overtaken packets are lost, `patience` after that.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Duration> {
        let since = self.overtaken.map(|(since, _)| since).into_iter().chain(self.overtaken_again);
        since.min().map(|since| since.saturating_add(patience))
    }

    /// Returns `true` if a packet is to be retransmitted.
    #[inline]
    pub(super) fn has_lost(&self) -> bool {
        self.holes.iter().any(|hole| hole.sent.is_none())
    }

    /// Number of packets to be retransmitted.
    #[inline]
    pub(super) fn to_retransmit(&self) -> Seq {
        self.holes.iter().filter(|hole| hole.sent.is_none()).count() as Seq
    }

    /// Takes the first packet that is to be retransmitted and does not wait. `max` is the first PSN that was never
    /// sent.
    pub(super) fn take_lost(&mut self, now: Duration, max: Seq, waits: impl Fn(Seq) -> bool) -> Option<Seq> {
        let hole = self.holes.iter_mut().find(|hole| hole.sent.is_none() && !waits(hole.seq))?;
        self.retransmissions += 1;
        hole.sent = Some(Retransmission { at: now, max, number: self.retransmissions });
        Some(hole.seq)
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::Psn;

    use super::*;

    const NOW: Duration = Duration::from_micros(5);
    const MAX: Seq = 2000;
    const ORDER: Reordering = Reordering { packets: MAX_REORDERING, time: NOW, any_order: false };

    fn map(distances: impl IntoIterator<Item = u32>) -> SackMap {
        let mut map = SackMap::default();
        distances.into_iter().for_each(|distance: u32| map.insert(Psn::new(0), Psn::new(distance)));
        map
    }

    fn lost(board: &mut Scoreboard, from: Seq, max: Seq) -> Vec<Seq> {
        board.find_lost(NOW, from..board.newest(), ORDER);
        std::iter::from_fn(|| board.take_lost(NOW, max, |_| false)).collect()
    }

    #[test]
    fn each_hole_is_retransmitted_once_and_again_when_that_was_lost() {
        let mut board = Scoreboard::default();
        assert!(board.update(100, &map((1..10_u32).chain(12..40)), MAX));
        assert!(!board.update(100, &map(1..10), MAX), "an older one");
        assert_eq!((board.received(), board.newest(), board.has(109), board.has(110)), (37, 140, true, false));
        assert_eq!(lost(&mut board, 100, 140), [100, 110, 111]);
        assert!(lost(&mut board, 100, 140).is_empty());
        // Packets that were sent after them have arrived.
        board.update(100, &map((1..10_u32).chain(12..44)), MAX);
        assert_eq!(lost(&mut board, 100, 150), [100, 110, 111]);
        // The last of them has arrived, so the others are lost again.
        board.update(100, &map((1..10_u32).chain(11..44)), MAX);
        assert_eq!(lost(&mut board, 100, 150), [100, 110]);
        board.on_executed(110);
        assert!(lost(&mut board, 110, 150).is_empty());
        assert_eq!((board.received(), board.has(109), board.has(111)), (33, false, true));
        board.on_executed(144);
        assert_eq!((board.received(), board.newest(), board.has_lost()), (0, 0, false));
    }

    #[test]
    fn few_packets_may_overtake_one_for_a_while() {
        let mut board = Scoreboard::default();
        board.update(100, &map([1, 2]), MAX);
        assert!(lost(&mut board, 100, 103).is_empty());
        assert_eq!(board.deadline(NOW), Some(NOW * 2));
        // Packets that were overtaken meanwhile have their own time.
        board.update(100, &map([1, 2, 4]), MAX);
        board.find_lost(NOW * 2, 100..board.newest(), ORDER);
        assert_eq!((board.take_lost(NOW, 105, |_| false), board.take_lost(NOW, 105, |_| false)), (Some(100), None));
        assert_eq!(board.deadline(NOW), Some(NOW * 3));
        board.find_lost(NOW * 3, 100..board.newest(), ORDER);
        assert_eq!((board.take_lost(NOW, 105, |_| false), board.deadline(NOW)), (Some(103), None));
    }

    #[test]
    fn on_several_paths_a_retransmission_is_lost_after_a_while() {
        const ORDER: Reordering = Reordering { packets: 1000, time: NOW, any_order: true };
        let mut board = Scoreboard::default();
        board.update(100, &map(1..40), MAX);
        board.find_lost(NOW, 100..board.newest(), ORDER);
        board.find_lost(NOW * 2, 100..board.newest(), ORDER);
        assert_eq!(board.take_lost(NOW * 2, 140, |_| false), Some(100));
        // Packets that were sent later have arrived.
        board.update(100, &map(1..50), MAX);
        board.find_lost(NOW * 2, 100..board.newest(), ORDER);
        assert_eq!((board.has_lost(), board.deadline(NOW)), (false, Some(NOW * 3)));
        board.find_lost(NOW * 3, 100..board.newest(), ORDER);
        assert_eq!(board.take_lost(NOW * 3, 150, |_| false), Some(100));
    }

    #[test]
    fn a_map_of_what_was_never_sent_means_nothing() {
        let mut board = Scoreboard::default();
        assert!(!board.update(100, &map([50, 60]), 120));
        assert_eq!((board.received(), board.newest()), (0, 0));
        // The whole range, at the least favourable offset in a word.
        assert!(board.update(127, &map([1, 1024]), MAX));
        assert_eq!((board.received(), board.has(1151), board.newest()), (2, true, 1152));
        board.on_executed(1151);
        assert_eq!((board.received(), board.has(1151)), (1, true));
    }
}
