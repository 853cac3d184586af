//! Timers of a requester.

use std::time::Duration;

use serde::Serialize;

/// Purpose of a deadline.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Timer {
    /// Local ACK timeout (IBA 9.7.6.1.3): PSNs that are not acknowledged by then are retransmitted at the cost of a
    /// retry.
    Ack,
    /// End of the wait that an RNR NAK requested. No packet is sent before.
    RnrBackoff,
    /// Time at which an overtaken response counts as lost.
    Reordering,
    /// Time at which the oldest unacked packet is sent once more, because nothing was acknowledged for a few round
    /// trips.
    Probe,
}

/// One optional deadline for each [`Timer`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TimerTable {
    deadlines: [Option<Duration>; 4],
}

impl TimerTable {
    /// Starts, restarts or stops a timer.
    pub(super) const fn set(&mut self, timer: Timer, deadline: Option<Duration>) {
        self.deadlines[timer as usize] = deadline;
    }

    /// Stops a timer.
    pub(super) const fn stop(&mut self, timer: Timer) {
        self.set(timer, None);
    }

    /// Stops all timers.
    pub(super) fn stop_all(&mut self) {
        *self = Self::default();
    }

    /// Deadline of a timer.
    pub(super) const fn deadline(&self, timer: Timer) -> Option<Duration> {
        self.deadlines[timer as usize]
    }

    /// Returns `true` if the timer runs, whether its deadline has passed or not.
    pub(super) const fn is_running(&self, timer: Timer) -> bool {
        self.deadlines[timer as usize].is_some()
    }

    /// Returns `true` if the timer runs and its deadline has passed. It keeps running.
    pub(super) fn has_expired(&self, timer: Timer, now: Duration) -> bool {
        self.deadlines[timer as usize].is_some_and(|deadline| deadline <= now)
    }

    /// Running timers with their deadlines.
    pub(super) fn running(&self) -> impl Iterator<Item = (Timer, Duration)> {
        let timers = [Timer::Ack, Timer::RnrBackoff, Timer::Reordering, Timer::Probe].into_iter();
        timers.zip(self.deadlines).filter_map(|(timer, deadline)| Some((timer, deadline?)))
    }

    /// The earliest deadline.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.deadlines.into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_is_next() {
        let second = Duration::from_secs;
        let mut timers = TimerTable::default();
        assert_eq!(timers.next_timeout(), None);
        timers.set(Timer::Ack, Some(second(3)));
        timers.set(Timer::Probe, Some(second(2)));
        assert_eq!(timers.next_timeout(), Some(second(2)));
        assert!(timers.has_expired(Timer::Probe, second(2)) && timers.is_running(Timer::Probe));
        assert!(!timers.has_expired(Timer::Ack, second(2)) && !timers.has_expired(Timer::RnrBackoff, second(9)));
        timers.stop(Timer::Probe);
        assert_eq!(timers.next_timeout(), Some(second(3)));
        timers.stop_all();
        assert!(!timers.is_running(Timer::Ack));
    }
}
