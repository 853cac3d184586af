//! Boundaries of the requests into which long READs are split.
//!
//! A responder sends the whole response at once, so a request must not ask for more than may be in flight, which varies
//! with the network. But a request that was sent once keeps its end, because the responder remembers it. Therefore a
//! new length applies only to PSNs that were never sent, and the next change of length waits until everything of the
//! old length is done.
//!
//! A repeated request may be *split*, because the network may now carry only a part of the lost responses. A responder
//! may still hold resources from an earlier transmission, for READs that it executes along with the next one. The part
//! after a split takes one more of its resources, so it waits until the part before it is done.

use pvrdma_saved_state::roce as saved;

use super::request::Request;
use super::send_state::Seq;
use crate::saved::{RestoreError, ensure, invalid};

/// Maximum number of saved splits. A request is split only while no part of an earlier split waits, or by a probe.
const MAX_SPLITS: usize = 16;

/// Lengths of READ requests.
#[derive(Debug)]
pub(super) struct ReadGrid {
    /// PSNs per request, and the PSN from which on that applies; then the PSNs per request before that.
    new: (u32, Seq),
    old: (u32, Seq),
    /// First PSNs of the parts into which requests were split, until the part before them is done.
    splits: Vec<Seq>,
}

impl ReadGrid {
    /// Creates a grid in which every request has `length` PSNs.
    pub(super) const fn new(length: u32) -> Self {
        Self { new: (length, 0), old: (length, 0), splits: Vec::new() }
    }

    /// Saves the grid for requests from `first` on. Everything before `una` is done.
    pub(super) fn save(&self, first: Seq, una: Seq) -> saved::ReadGrid {
        let Self { new: (new_length, new_since), old: (old_length, old_since), splits } = self;
        // A grid applies to each request from its first PSN on, so an earlier start has no effect.
        let position = |seq: Seq| u32::try_from(seq.saturating_sub(first)).unwrap_or(u32::MAX);
        saved::ReadGrid {
            new_length: *new_length,
            new_since: position(*new_since),
            old_length: *old_length,
            old_since: position(*old_since),
            splits: splits.iter().filter(|&&split| split >= una).map(|&split| position(split)).collect(),
        }
    }

    /// Restores a grid for requests from `first` on, of which those before `max` were sent.
    pub(super) fn restore(grid: &saved::ReadGrid, first: Seq, max: Seq) -> Result<Self, RestoreError> {
        let saved::ReadGrid { new_length, new_since, old_length, old_since, splits } = grid;
        let seq = |position: u32| first.saturating_add(position.into());
        let this = Self {
            new: (*new_length, seq(*new_since)),
            old: (*old_length, seq(*old_since)),
            splits: splits.iter().copied().map(seq).collect(),
        };
        for length in [this.new.0, this.old.0] {
            if length == 0 {
                return Err(invalid("length of READ requests", length));
            }
        }
        if this.splits.len() > MAX_SPLITS {
            return Err(RestoreError::TooMany { elements: "split READ requests", most: MAX_SPLITS });
        }
        let sent = this.splits.iter().chain([&this.old.1, &this.new.1]).all(|&seq| seq <= max);
        ensure(sent && this.old.1 <= this.new.1, "the division of READs is not one of requests that were sent")?;
        Ok(this)
    }

    /// Sets the length of future requests. Everything before `una` is done; `max` is the first PSN that was never sent.
    #[inline]
    pub(super) fn set(&mut self, length: u32, una: Seq, max: Seq) {
        self.splits.retain(|&split| split >= una);
        let (before, since) = self.new;
        if length != before && since <= una {
            (self.old, self.new) = (self.new, (length, max));
        }
    }

    /// Splits a request that was sent and is repeated up to before `at`. Everything before `una` is done.
    pub(super) fn split(&mut self, at: Seq, una: Seq) {
        self.splits.retain(|&split| split >= una && split != at);
        self.splits.push(at);
    }

    /// Returns `true` if a request was split at `seq` and the part before it is not done.
    #[inline]
    pub(super) fn waits(&self, seq: Seq, una: Seq) -> bool {
        una < seq && self.splits.contains(&seq)
    }

    /// Returns `true` if a part of a request waits.
    #[inline]
    pub(super) fn any_waits(&self, una: Seq) -> bool {
        self.splits.iter().any(|&split| una < split)
    }

    /// Returns the start of the grid for requests of a READ at `seq`, and their length.
    #[inline]
    fn at(&self, request: &Request, seq: Seq) -> (Seq, Seq) {
        let (length, since) = if seq < self.new.1 { self.old } else { self.new };
        (request.first.max(since), length.into())
    }

    /// Returns `true` if a request of a READ begins at `seq`, or a part of a split one.
    #[inline]
    pub(super) fn starts_at(&self, request: &Request, seq: Seq) -> bool {
        self.began_at(request, seq) || self.splits.contains(&seq)
    }

    /// Returns `true` if a request of a READ began at `seq` when it was sent first.
    #[inline]
    pub(super) fn began_at(&self, request: &Request, seq: Seq) -> bool {
        let (first, length) = self.at(request, seq);
        seq.saturating_sub(first).is_multiple_of(length)
    }

    /// Returns the PSN after the request of a READ that contains `seq`.
    #[inline]
    pub(super) fn end_of(&self, request: &Request, seq: Seq) -> Seq {
        let (first, length) = self.at(request, seq);
        let end = first + (seq.saturating_sub(first) / length + 1) * length;
        let most = if seq < self.new.1 { self.new.1 } else { Seq::MAX };
        let split = self.splits.iter().copied().filter(|&split| split > seq).min().unwrap_or(Seq::MAX);
        end.min(request.end()).min(most).min(split)
    }

    /// Returns the same for a repeated request, which is split if it asks for more than `most` PSNs. Everything before
    /// `una` is done.
    pub(super) fn end_of_repeated(&mut self, request: &Request, seq: Seq, una: Seq, most: Seq) -> Seq {
        let end = self.end_of(request, seq);
        if end.saturating_sub(seq) <= most || self.any_waits(una) {
            return end;
        }
        self.split(seq + most, una);
        seq + most
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::Stage;
    use super::*;

    fn starts(grid: &ReadGrid, request: &Request) -> Vec<Seq> {
        let mut at = request.first;
        let mut starts = Vec::new();
        while at < request.end() {
            assert!(grid.starts_at(request, at));
            starts.push(at);
            let end = grid.end_of(request, at);
            assert!((at + 1..end).all(|seq| !grid.starts_at(request, seq) && grid.end_of(request, seq) == end));
            at = end;
        }
        starts
    }

    #[test]
    fn a_new_length_holds_for_what_was_never_sent() {
        let read = Request { wr: Default::default(), first: 100, count: 40, length: 0, stage: Stage::Started };
        let mut grid = ReadGrid::new(16);
        assert_eq!(starts(&grid, &read), [100, 116, 132]);
        // The first two requests were sent.
        grid.set(5, 110, 132);
        assert_eq!(starts(&grid, &read), [100, 116, 132, 137]);
        let next = Request { first: 140, count: 11, ..read };
        assert_eq!(starts(&grid, &next), [140, 145, 150]);
        // Too early.
        grid.set(7, 131, 145);
        assert_eq!(starts(&grid, &next), [140, 145, 150]);
        grid.set(2, 132, 145);
        assert_eq!(starts(&grid, &next), [140, 145, 147, 149]);
        // Everything before 145 is done, and the following requests keep their boundaries.
        grid.set(4, 146, 149);
        assert_eq!(starts(&grid, &Request { first: 145, count: 12, ..next }), [145, 147, 149, 153]);
    }

    #[test]
    fn what_is_split_stays_so_until_it_is_done() {
        let read = Request { wr: Default::default(), first: 100, count: 40, length: 0, stage: Stage::Started };
        let mut grid = ReadGrid::new(16);
        grid.split(104, 100);
        grid.split(101, 100);
        assert_eq!(starts(&grid, &read), [100, 101, 104, 116, 132]);
        assert!(grid.any_waits(103) && !grid.any_waits(104));
        assert_eq!(
            [(101, 100), (101, 101), (104, 103), (103, 100)].map(|(seq, una)| grid.waits(seq, una)),
            [true, false, true, false]
        );
        grid.set(16, 102, 140);
        assert_eq!(starts(&grid, &read), [100, 104, 116, 132]);
        grid.set(16, 105, 140);
        assert_eq!(starts(&grid, &read), [100, 116, 132]);
    }
}
