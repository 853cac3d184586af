//! Responses with data, those of READs and atomics: which are outstanding, which have arrived, and which are missing.
//!
//! Each response packet has a fixed place in memory, so a response that arrives before an earlier one is stored at
//! once. The earlier one was *overtaken*: it is late or lost. It counts as lost when many responses have overtaken it
//! or some time has passed (as in RFC 8985). Then it is requested again, with its missing neighbours and nothing else.
//! The next response reveals that the time has passed; a timer is needed only for the last ones. Only the first gap of
//! a READ is requested at a time, because rxe does not go back to before the start of a repetition.

use std::collections::VecDeque;
use std::time::Duration;

use super::loss_recovery::Reordering;
use super::send_state::Seq;

/// Number of PSNs that may overtake a response before it counts as lost. Networks with several paths reorder by less.
pub(super) const MAX_REORDERING: Seq = 32;

/// State of the first missing response of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gap {
    /// No response was overtaken.
    None,
    /// This response was overtaken, at this time.
    Overtaken(Seq, Duration),
    /// This response is to be requested again.
    Lost(Seq),
    /// This response was requested again. The second PSN was the first that was never sent at that time.
    Requested(Seq, Seq),
}

/// A READ request or atomic that was sent and is not done.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    start: Seq,
    end: Seq,
    gap: Gap,
}

/// State of the responses between `una` and `nxt`.
#[derive(Debug)]
pub(super) struct ResponseTracker {
    /// Outstanding requests in PSN order.
    outstanding: VecDeque<Outstanding>,
    /// Responses that arrived before an earlier one: first PSN and the PSN after the last, in order, never adjacent.
    received: Vec<(Seq, Seq)>,
    /// PSNs in `received`.
    early: Seq,
    /// The responder has responded to everything before this PSN, since the requester last went back.
    newest: Seq,
    /// PSN after the newest response whose data has arrived, since the requester last went back.
    answered: Seq,
    /// Some gap is not [`Gap::None`].
    any_gap: bool,
    /// Some gap is [`Gap::Lost`].
    any_lost: bool,
}

impl ResponseTracker {
    pub(super) const fn new(first: Seq) -> Self {
        Self {
            outstanding: VecDeque::new(),
            received: Vec::new(),
            early: 0,
            newest: first,
            answered: first,
            any_gap: false,
            any_lost: false,
        }
    }

    /// Number of outstanding requests.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Number of outstanding requests that the responder has not responded to completely.
    pub(super) fn unanswered(&self) -> usize {
        self.outstanding.iter().rev().take_while(|request| self.answered < request.end).count()
    }

    /// Records that the data of the response at `seq` has arrived.
    #[inline]
    pub(super) fn on_data(&mut self, seq: Seq) {
        self.answered = self.answered.max(seq + 1);
    }

    /// Records a request whose responses have the PSNs from `start` to before `end`. `starts`: it is not a continuation
    /// of the one before it.
    pub(super) fn on_sent(&mut self, start: Seq, end: Seq, starts: bool) {
        match self.outstanding.back_mut() {
            Some(before) if !starts && before.end == start => before.end = end,
            _ => self.outstanding.push_back(Outstanding { start, end, gap: Gap::None }),
        }
    }

    /// Handles progress: everything before `una` is done.
    pub(super) fn on_acked(&mut self, una: Seq) {
        while self.outstanding.front().is_some_and(|request| request.end <= una) {
            self.outstanding.pop_front();
        }
        if !self.received.is_empty() {
            self.received.retain(|&(_, end)| end > una);
            self.early = self.received.iter().map(|&(start, end)| end - start).sum();
        }
    }

    /// Prepares going back: everything before `una` is done, and the PSNs from `from` on are about to be retransmitted.
    pub(super) fn on_go_back(&mut self, from: Seq, una: Seq) {
        self.outstanding.retain_mut(|request| {
            request.end = request.end.min(from);
            request.start.max(una) < request.end
        });
        self.newest = self.newest.min(from);
        self.answered = self.answered.min(from);
    }

    /// Returns the PSN after the block of arrived responses that contains `seq`, if there is one.
    #[inline]
    pub(super) fn received_until(&self, seq: Seq) -> Option<Seq> {
        self.received.iter().find(|&&(start, end)| (start..end).contains(&seq)).map(|&(_, end)| end)
    }

    /// Number of responses that arrived before an earlier one.
    #[inline]
    pub(super) const fn early(&self) -> Seq {
        self.early
    }

    /// Records that the response at `seq` arrived before an earlier one, for the first time.
    pub(super) fn insert(&mut self, seq: Seq) {
        self.early += 1;
        let at = self.received.partition_point(|&(_, end)| end < seq);
        match self.received.get_mut(at) {
            Some((_, end)) if *end == seq => *end += 1,
            Some((start, _)) if *start == seq + 1 => {
                *start = seq;
                return;
            }
            _ => return self.received.insert(at, (seq, seq + 1)),
        }
        if let Some(&(start, end)) = self.received.get(at + 1)
            && start == seq + 1
        {
            self.received.remove(at + 1);
            if let Some(before) = self.received.get_mut(at) {
                before.1 = end;
            }
        }
    }

    /// Looks for overtaken responses that are lost according to `order`. The responder has responded to everything
    /// before `newest`, and everything before `una` is done.
    #[inline]
    pub(super) fn on_response(&mut self, now: Duration, newest: Seq, una: Seq, order: impl Fn() -> Reordering) {
        self.newest = self.newest.max(newest);
        if self.newest > una || self.any_gap {
            self.find_gaps(now, una, order());
        }
    }

    fn find_gaps(&mut self, now: Duration, una: Seq, order: Reordering) {
        self.any_gap = false;
        let Reordering { packets: most, time: patience, .. } = order;
        for at in 0..self.outstanding.len() {
            let Some(&Outstanding { start, end, gap }) = self.outstanding.get(at) else { return };
            let missing = self.first_missing(start.max(una));
            let gap = match gap {
                _ if missing >= end.min(self.newest) => Gap::None,
                // Responses to later requests have arrived.
                Gap::Requested(seq, max) if seq == missing && self.newest >= max + most => Gap::Lost(seq),
                Gap::Lost(seq) | Gap::Requested(seq, _) if seq == missing => gap,
                _ if self.newest - missing >= most => Gap::Lost(missing),
                Gap::Overtaken(seq, since) if seq == missing => match since.saturating_add(patience) <= now {
                    true => Gap::Lost(seq),
                    false => gap,
                },
                _ => Gap::Overtaken(missing, now),
            };
            self.set_gap(at, gap);
        }
    }

    fn first_missing(&self, from: Seq) -> Seq {
        self.received_until(from).unwrap_or(from)
    }

    fn set_gap(&mut self, at: usize, gap: Gap) {
        self.any_gap |= gap != Gap::None;
        self.any_lost |= matches!(gap, Gap::Lost(_));
        if let Some(request) = self.outstanding.get_mut(at) {
            request.gap = gap;
        }
    }

    /// Returns `true` if responses are still to come after the newest.
    pub(super) fn expects_more(&self) -> bool {
        self.outstanding.back().is_some_and(|last| self.newest + 1 < last.end)
    }

    /// Time at which the first overtaken response counts as lost, `patience` after it was overtaken.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Duration> {
        if !self.any_gap {
            return None;
        }
        let overtaken = self.outstanding.iter().filter_map(|request| match request.gap {
            Gap::Overtaken(_, since) => Some(since.saturating_add(patience)),
            _ => None,
        });
        overtaken.min()
    }

    /// Marks responses as lost that were overtaken at least `patience` ago.
    pub(super) fn on_timeout(&mut self, now: Duration, patience: Duration) {
        for at in 0..self.outstanding.len() {
            if let Some(&Outstanding { gap: Gap::Overtaken(seq, since), .. }) = self.outstanding.get(at)
                && since.saturating_add(patience) <= now
            {
                self.set_gap(at, Gap::Lost(seq));
            }
        }
    }

    /// Handles a probe timeout. Returns `true` if a response was overtaken or requested again: the first such one is
    /// lost.
    pub(super) fn on_probe(&mut self) -> bool {
        let open = self.outstanding.iter().position(|request| request.gap != Gap::None);
        let Some(at) = open else { return false };
        if let Some(Outstanding { gap: Gap::Overtaken(seq, _) | Gap::Requested(seq, _), .. }) = self.outstanding.get(at)
        {
            self.set_gap(at, Gap::Lost(*seq));
        }
        true
    }

    /// Returns `true` if a response is to be requested again.
    #[inline]
    pub(super) const fn has_lost(&self) -> bool {
        self.any_lost
    }

    /// Takes the PSNs to be requested again: the first one and their number. `max` is the first PSN that was never
    /// sent.
    pub(super) fn take_lost(&mut self, max: Seq) -> Option<(Seq, Seq)> {
        let lost = self.outstanding.iter_mut().find_map(|request| match request.gap {
            Gap::Lost(seq) => {
                request.gap = Gap::Requested(seq, max);
                Some((seq, request.end))
            }
            _ => None,
        });
        let Some((seq, end)) = lost else {
            self.any_lost = false;
            return None;
        };
        let next = self.received.iter().map(|&(start, _)| start).find(|&start| start > seq);
        // Responses after the newest are still in transit.
        let end = next.unwrap_or_else(|| self.newest.max(seq + 1)).min(end);
        Some((seq, end - seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    const ORDER: fn() -> Reordering = || Reordering { packets: MAX_REORDERING, time: us(100), any_order: false };

    fn tracker(requests: &[(Seq, Seq)]) -> ResponseTracker {
        let mut tracker = ResponseTracker::new(0);
        requests.iter().for_each(|&(start, end)| tracker.on_sent(start, end, true));
        tracker
    }

    fn come(tracker: &mut ResponseTracker, now: Duration, una: Seq, seqs: impl IntoIterator<Item = Seq>) {
        for seq in seqs {
            tracker.insert(seq);
            tracker.on_response(now, seq, una, ORDER);
        }
    }

    #[test]
    fn what_has_come_is_kept_in_runs() {
        let mut tracker = tracker(&[(0, 20)]);
        for seq in [5, 7, 6, 3, 10, 4, 2, 9] {
            tracker.insert(seq);
        }
        assert_eq!((tracker.received.as_slice(), tracker.early()), ([(2, 8), (9, 11)].as_slice(), 8));
        assert_eq!([1, 2, 7, 8, 10].map(|seq| tracker.received_until(seq)), [None, Some(8), Some(8), None, Some(11)]);
        tracker.on_acked(8);
        assert_eq!((tracker.received.as_slice(), tracker.early()), ([(9, 11)].as_slice(), 2));
    }

    #[test]
    fn a_response_is_lost_after_a_while_or_behind_many() {
        let mut tracker = tracker(&[(0, 64), (64, 128)]);
        come(&mut tracker, us(5), 0, [1, 2, 4, 5]);
        assert_eq!((tracker.deadline(us(100)), tracker.take_lost(128)), (Some(us(105)), None));
        tracker.on_timeout(us(104), us(100));
        assert!(!tracker.has_lost());
        tracker.on_timeout(us(105), us(100));
        assert!(tracker.has_lost());
        assert_eq!((tracker.take_lost(128), tracker.take_lost(128)), (Some((0, 1)), None));
        // It is not requested twice, and the next gap has its turn when it has arrived.
        come(&mut tracker, us(200), 0, 6..64);
        assert_eq!((tracker.deadline(us(100)), tracker.take_lost(128)), (None, None));
        tracker.on_acked(3);
        tracker.on_response(us(300), 3, 3, ORDER);
        assert_eq!(tracker.take_lost(128), Some((3, 1)));
        // Another request has gaps of its own.
        come(&mut tracker, us(400), 3, 70..110);
        assert_eq!(tracker.take_lost(128), Some((64, 6)));
        tracker.on_acked(128);
        assert_eq!((tracker.outstanding(), tracker.deadline(us(1))), (0, None));
    }

    #[test]
    fn who_comes_late_was_not_lost() {
        let mut tracker = tracker(&[(0, 64)]);
        come(&mut tracker, us(5), 0, [1, 2, 4]);
        tracker.on_acked(3);
        tracker.on_response(us(50), 0, 3, ORDER);
        // Another response is missing, since then.
        assert_eq!(tracker.deadline(us(100)), Some(us(150)));
        tracker.on_acked(5);
        tracker.on_response(us(60), 3, 5, ORDER);
        assert_eq!(tracker.deadline(us(100)), None);
    }

    #[test]
    fn the_next_response_tells_what_is_late() {
        let mut tracker = tracker(&[(0, 8)]);
        come(&mut tracker, us(5), 0, [1]);
        come(&mut tracker, us(104), 0, [2]);
        assert!(!tracker.has_lost());
        come(&mut tracker, us(105), 0, [3]);
        assert_eq!((tracker.take_lost(8), tracker.deadline(us(100))), (Some((0, 1)), None));
        assert!(tracker.expects_more());
        come(&mut tracker, us(110), 0, [7]);
        assert!(!tracker.expects_more());
    }
}
