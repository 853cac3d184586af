//! Frames that a port takes on the thread that reads the uplink: nothing is copied, and nobody is woken.
//!
//! That thread works for all ports, so each has a share of its time: as much as is free, as in a queue of frames, so
//! that there is some left for who had little, however many take as much as they get. Beyond it, and for a while after
//! it was slow once, a port gets its frames on its own thread.

use std::sync::Weak;
use std::time::Duration;

use parking_lot::Mutex;

use crate::{Clock, Frames, LinkReceiver};

/// The time of which ports have shares. Then it begins anew.
pub(super) const ROUND: Duration = Duration::from_millis(2);
/// Longer than this no port has to take for the frames of a batch.
pub(super) const SLOW: Duration = Duration::from_millis(2);
/// As many times longer than it was slow a port gets its frames on its own thread.
pub(super) const REST: u32 = 64;

/// The time of the thread that reads the uplink.
#[derive(Debug, Default)]
pub(super) struct Round {
    number: u64,
    ends: Duration,
    /// That ports have used of it.
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
    /// The round in which it last took something, and the time that it used there.
    round: u64,
    used: Duration,
    /// Until then it takes nothing.
    rests_until: Duration,
}

impl State {
    /// Returns `true` if it may take something now.
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

/// Who is behind a port, and what it has used.
#[derive(Default)]
pub(super) struct Direct(Mutex<State>);

impl Direct {
    /// When this returns the one before takes nothing any more.
    pub(super) fn set(&self, receiver: Option<Weak<dyn LinkReceiver>>) {
        self.0.lock().receiver = receiver;
    }

    /// Has it take frames. Returns how many it took.
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
