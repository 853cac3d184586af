//! Locked bytes of a mapping with a count of their users. The count is needed because `mlock` does not nest, and
//! registrations may overlap.

use std::collections::BTreeMap;
use std::ops::Range;

/// Locked bytes that have the same users.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Segment {
    end: usize,
    /// Number of users. 0: locked without a user, because unlocking would exceed the limit of runs.
    users: u32,
}

/// Locked bytes of a mapping, as segments by first offset. A run is a sequence of segments without a gap, and is a
/// single mapping in the kernel.
#[derive(Debug, Default)]
pub(super) struct Runs {
    segments: BTreeMap<usize, Segment>,
    count: usize,
    bytes: u64,
}

const fn len(range: &Range<usize>) -> u64 {
    range.end.saturating_sub(range.start) as u64
}

impl Runs {
    /// Returns the number of runs.
    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes in all runs.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the parts of `start..end` that are not locked.
    pub(super) fn gaps(&self, start: usize, end: usize) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut at = start;
        let before = self.segments.range(..start).next_back().map_or(start, |(_, segment)| segment.end);
        at = at.max(before);
        for (&first, segment) in self.segments.range(start..end) {
            if first > at {
                gaps.push(at..first);
            }
            at = segment.end;
        }
        if at < end {
            gaps.push(at..end);
        }
        gaps
    }

    /// Returns the number of runs that border on a gap.
    fn neighbours(&self, gap: &Range<usize>) -> usize {
        let before = self.segments.range(..gap.start).next_back().is_some_and(|(_, segment)| segment.end == gap.start);
        usize::from(before) + usize::from(self.segments.contains_key(&gap.end))
    }

    /// Returns the number of runs after locking these gaps.
    pub(super) fn count_with(&self, gaps: &[Range<usize>]) -> usize {
        let joined: usize = gaps.iter().map(|gap| self.neighbours(gap)).sum();
        self.count.saturating_add(gaps.len()).saturating_sub(joined)
    }

    /// Returns the number of runs after unlocking these bytes, all of which are locked without a user.
    pub(super) fn count_without(&self, idle: &Range<usize>) -> usize {
        let inside = |offset: usize| self.segments.range(..=offset).next_back().is_some_and(|(_, s)| s.end > offset);
        let before = idle.start.checked_sub(1).is_some_and(inside);
        (self.count + usize::from(before) + usize::from(inside(idle.end))).saturating_sub(1)
    }

    /// Records that a gap is locked, without a user yet.
    pub(super) fn cover(&mut self, gap: Range<usize>) {
        self.count = (self.count + 1).saturating_sub(self.neighbours(&gap));
        self.bytes = self.bytes.saturating_add(len(&gap));
        self.segments.insert(gap.start, Segment { end: gap.end, users: 0 });
    }

    /// Records that these bytes, which had no user, are unlocked.
    pub(super) fn uncover(&mut self, idle: Range<usize>) {
        self.count = self.count_without(&idle);
        self.bytes = self.bytes.saturating_sub(len(&idle));
        self.split(idle.start);
        self.split(idle.end);
        let inside: Vec<_> = self.segments.range(idle).map(|(&first, _)| first).collect();
        for first in inside {
            self.segments.remove(&first);
        }
    }

    /// Adds a user to these bytes, all of which are locked.
    pub(super) fn acquire(&mut self, start: usize, end: usize) {
        self.split(start);
        self.split(end);
        for (_, segment) in self.segments.range_mut(start..end) {
            segment.users = segment.users.saturating_add(1);
        }
        self.merge(start, end);
    }

    /// Removes a user from these bytes. Returns those that have none left.
    pub(super) fn release(&mut self, start: usize, end: usize) -> Vec<Range<usize>> {
        let mut idle: Vec<Range<usize>> = Vec::new();
        self.split(start);
        self.split(end);
        for (&first, segment) in self.segments.range_mut(start..end) {
            segment.users = segment.users.saturating_sub(1);
            if segment.users == 0 {
                match idle.last_mut() {
                    Some(last) if last.end == first => last.end = segment.end,
                    _ => idle.push(first..segment.end),
                }
            }
        }
        self.merge(start, end);
        idle
    }

    /// Splits the segment that contains `at`, if there is one, so that a segment begins at `at`.
    fn split(&mut self, at: usize) {
        if let Some((_, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let rest = *segment;
            segment.end = at;
            self.segments.insert(at, rest);
        }
    }

    /// Merges adjacent segments with equal users, from the one before `start` to the one after `end`.
    fn merge(&mut self, start: usize, end: usize) {
        let from = self.segments.range(..start).next_back().map_or(start, |(&first, _)| first);
        let mut last: Option<(usize, Segment)> = None;
        let mut gone = Vec::new();
        let mut grown = Vec::new();
        for (&first, &segment) in self.segments.range(from..=end) {
            match &mut last {
                Some((_, kept)) if kept.end == first && kept.users == segment.users => {
                    kept.end = segment.end;
                    gone.push(first);
                }
                _ => grown.extend(last.replace((first, segment))),
            }
        }
        grown.extend(last);
        for first in gone {
            self.segments.remove(&first);
        }
        for (first, segment) in grown {
            self.segments.insert(first, segment);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Locks the gaps, as the owner of the table does.
    fn pin(runs: &mut Runs, start: usize, end: usize) {
        let gaps = runs.gaps(start, end);
        let count = runs.count_with(&gaps);
        gaps.into_iter().for_each(|gap| runs.cover(gap));
        assert_eq!(runs.count(), count);
        runs.acquire(start, end);
    }

    #[test]
    fn neighbours_are_one_run_and_one_entry() {
        let mut runs = Runs::default();
        for page in [0, 2, 1] {
            pin(&mut runs, page, page + 1);
        }
        assert_eq!((runs.count(), runs.bytes(), runs.segments.len()), (1, 3, 1));
        pin(&mut runs, 1, 3);
        assert_eq!((runs.count(), runs.segments.len()), (1, 2));
        assert!(runs.release(0, 3).into_iter().flatten().eq(0..1));
        assert!(runs.release(1, 3).into_iter().flatten().eq(1..3));
        assert_eq!((runs.count(), runs.segments.len()), (1, 1));
    }

    proptest! {
        /// The result equals that of a table with a count for each byte, for any sequence of operations.
        #[test]
        fn behaves_as_a_table_of_bytes(pieces in prop::collection::vec((0usize..40, 1usize..12, any::<bool>()), 1..60)) {
            let mut runs = Runs::default();
            let mut users = [0u32; 64];
            let mut locked = [false; 64];
            let mut held = Vec::new();
            for (start, len, unlock) in pieces {
                let end = start + len;
                if unlock && !held.is_empty() {
                    let (start, end) = held.swap_remove(start % held.len());
                    for idle in runs.release(start, end) {
                        // Keep some gaps locked.
                        if idle.start % 3 != 0 {
                            let count = runs.count_without(&idle);
                            runs.uncover(idle.clone());
                            assert_eq!(runs.count(), count);
                            locked[idle].fill(false);
                        }
                    }
                    users[start..end].iter_mut().for_each(|users| *users -= 1);
                } else {
                    let missing: Vec<_> = runs.gaps(start, end).into_iter().flatten().collect();
                    prop_assert_eq!(missing, (start..end).filter(|&at| !locked[at]).collect::<Vec<_>>());
                    pin(&mut runs, start, end);
                    held.push((start, end));
                    locked[start..end].fill(true);
                    users[start..end].iter_mut().for_each(|users| *users += 1);
                }
                let mut expected = 0;
                for at in 0..64 {
                    expected += usize::from(locked[at] && !(at > 0 && locked[at - 1]));
                    let segment = runs.segments.range(..=at).next_back().filter(|(_, segment)| segment.end > at);
                    prop_assert_eq!(segment.map(|(_, segment)| segment.users), locked[at].then_some(users[at]));
                }
                prop_assert_eq!(runs.count(), expected);
                prop_assert_eq!(runs.bytes(), locked.iter().filter(|&&locked| locked).count() as u64);
                prop_assert!(runs.segments.len() <= 2 * held.len() + 40);
            }
        }
    }
}
