//! Deadlines in the order of time.

use std::collections::BTreeMap;
use std::time::Duration;

/// Identifies a timer, so that it can be removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct TimerKey {
    /// Time at which the timer fires.
    pub(crate) deadline: Duration,
    /// Distinguishes timers with the same deadline.
    number: u64,
}

/// Timers, each with a value.
#[derive(Debug)]
pub(crate) struct Timers<T> {
    by_time: BTreeMap<TimerKey, T>,
    next_number: u64,
}

impl<T> Default for Timers<T> {
    fn default() -> Self {
        Self { by_time: BTreeMap::new(), next_number: 0 }
    }
}

impl<T> Timers<T> {
    /// Returns the earliest deadline.
    pub(crate) fn first(&self) -> Option<Duration> {
        self.by_time.first_key_value().map(|(key, _)| key.deadline)
    }

    /// Adds a timer.
    pub(crate) fn insert(&mut self, deadline: Duration, what: T) -> TimerKey {
        let key = TimerKey { deadline, number: self.next_number };
        self.next_number = self.next_number.wrapping_add(1);
        self.by_time.insert(key, what);
        key
    }

    /// Removes a timer, if it has not fired.
    pub(crate) fn remove(&mut self, key: TimerKey) -> Option<T> {
        self.by_time.remove(&key)
    }

    /// Removes and returns a timer that is due.
    pub(crate) fn pop_due(&mut self, now: Duration) -> Option<T> {
        let due = self.by_time.first_entry().filter(|first| first.key().deadline <= now)?;
        Some(due.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_and_once() {
        let at = Duration::from_millis;
        let mut timers = Timers::default();
        timers.insert(at(5), "second");
        let taken_back = timers.insert(at(2), "taken back");
        timers.insert(at(5), "third");
        assert_eq!(timers.first(), Some(at(2)));
        assert!(timers.remove(taken_back).is_some() && timers.remove(taken_back).is_none());
        assert_eq!(timers.pop_due(at(4)), None);
        assert_eq!([timers.pop_due(at(5)), timers.pop_due(at(5))], [Some("second"), Some("third")]);
        assert_eq!(timers.first(), None);
    }
}
