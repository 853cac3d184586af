//! Inline delivery: the thread that reads the uplink calls a port's receiver directly, which saves a copy and a
//! wake-up.
//!
//! That thread works for all ports, so each port has a share of its time. As in the queues, a share is at most the time
//! that is still free, so that ports that use little always find some, even if many others use as much as they can. A
//! port that has used up its share, or was slow recently, gets its frames on its own thread instead.

use std::sync::Weak;
use std::time::Duration;

use parking_lot::Mutex;

use crate::{Clock, Frames, LinkReceiver};

/// Length of an accounting round. The shares of the ports apply to one round.
pub(super) const ROUND: Duration = Duration::from_millis(2);
/// Maximum time that a port may use for the frames of one batch without counting as slow.
pub(super) const SLOW: Duration = Duration::from_millis(2);
/// Factor between the time that a slow port used and the time for which it then gets no inline delivery.
pub(super) const REST: u32 = 64;

/// Accounting round of the thread that reads the uplink.
#[derive(Debug, Default)]
pub(super) struct Round {
    number: u64,
    ends: Duration,
    /// Time of this round that all ports have used.
    used: Duration,
}

impl Round {
    fn begin_next_at(&mut self, now: Duration) {
        if now >= self.ends {
            *self = Self { number: self.number.wrapping_add(1), ends: now.saturating_add(ROUND), used: Duration::ZERO };
        }
    }
}

#[derive(Default)]
struct State {
    receiver: Option<Weak<dyn LinkReceiver>>,
    /// Round of the last inline delivery, and the time that this port used in it.
    round: u64,
    used: Duration,
    /// No inline delivery before this time.
    rests_until: Duration,
}

impl State {
    /// Returns `true` if inline delivery is permitted now.
    fn may_take(&mut self, round: &Round, now: Duration) -> bool {
        if self.round != round.number {
            (self.round, self.used) = (round.number, Duration::ZERO);
        }
        now >= self.rests_until && self.used < ROUND.saturating_sub(round.used)
    }

    fn has_used(&mut self, time: Duration, round: &mut Round, now: Duration) {
        self.used = self.used.saturating_add(time);
        round.used = round.used.saturating_add(time);
        if time > SLOW {
            self.rests_until = now.saturating_add(time.saturating_mul(REST));
        }
    }
}

/// Receiver behind a port, and the time that it has used.
#[derive(Default)]
pub(super) struct Direct(Mutex<State>);

impl Direct {
    /// Sets the receiver. Once this returns, the previous receiver is no longer called, because calls hold the lock.
    pub(super) fn set(&self, receiver: Option<Weak<dyn LinkReceiver>>) {
        self.0.lock().receiver = receiver;
    }

    /// Offers frames to the receiver. Returns the number that it took.
    pub(super) fn take(&self, frames: &Frames, list: &[usize], round: &mut Round, clock: &dyn Clock) -> usize {
        let state = &mut *self.0.lock();
        let Some(receiver) = &state.receiver else { return 0 };
        let Some(receiver) = receiver.upgrade() else { return 0 };
        let began = clock.now();
        round.begin_next_at(began);
        if !state.may_take(round, began) {
            return 0;
        }
        let taken = receiver.take(frames, list);
        let now = clock.now();
        state.has_used(now.saturating_sub(began), round, now);
        taken.min(list.len())
    }
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Direct").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
