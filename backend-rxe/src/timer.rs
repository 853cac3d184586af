//! Deadlines of queue pairs, at most one each, in the order of time.

use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::Duration;

use crate::qp::Qp;

/// Names a timer, so that it can be taken back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct TimerKey {
    /// When it fires.
    pub(crate) deadline: Duration,
    /// Tells timers of one moment apart.
    number: u64,
}

/// The timers of an engine.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    by_time: BTreeMap<TimerKey, Weak<Qp>>,
    next_number: u64,
}

impl Timers {
    /// The earliest deadline.
    pub(crate) fn first(&self) -> Option<Duration> {
        self.by_time.first_key_value().map(|(key, _)| key.deadline)
    }

    /// Adds a timer.
    pub(crate) fn insert(&mut self, deadline: Duration, qp: Weak<Qp>) -> TimerKey {
        let key = TimerKey { deadline, number: self.next_number };
        self.next_number = self.next_number.wrapping_add(1);
        self.by_time.insert(key, qp);
        key
    }

    /// Takes a timer back, if it has not fired.
    pub(crate) fn remove(&mut self, key: TimerKey) -> Option<Weak<Qp>> {
        self.by_time.remove(&key)
    }

    /// Takes a timer that is due.
    pub(crate) fn pop_due(&mut self, now: Duration) -> Option<Weak<Qp>> {
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
        timers.insert(at(5), Weak::new());
        let taken_back = timers.insert(at(2), Weak::new());
        timers.insert(at(5), Weak::new());
        assert_eq!(timers.first(), Some(at(2)));
        assert!(timers.remove(taken_back).is_some() && timers.remove(taken_back).is_none());
        assert!(timers.pop_due(at(4)).is_none());
        assert!(timers.pop_due(at(5)).is_some() && timers.pop_due(at(5)).is_some());
        assert_eq!(timers.first(), None);
    }
}
