//! When the guest hears of packets that were sent, if nothing else interrupts it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// How long the guest may wait to hear of them. What answers them is there sooner, as a rule, and one interrupt tells
/// of both.
pub(super) const LATEST: Duration = Duration::from_millis(1);

/// A timer that is set anew once per [`LATEST`] at most, however many packets are sent and answered.
#[derive(Debug)]
pub(super) struct Deadline {
    timer: Arc<OwnedFd>,
    latest: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When the last wait that began is over.
    over_at: Option<Instant>,
    /// What the timer is set to.
    fires_at: Option<Instant>,
}

impl Deadline {
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn new(latest: Duration) -> Result<Self, Errno> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = Arc::new(timerfd_create(TimerfdClockId::Monotonic, flags)?);
        Ok(Self { timer, latest, state: Mutex::default() })
    }

    /// Readable when it is worth asking [`Self::is_over`].
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.timer)
    }

    /// Packets begin to wait.
    pub(super) fn begin(&self) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.over_at = Some(now + self.latest);
        if state.fires_at.is_none() {
            self.set(&mut state, now, self.latest);
        }
    }

    /// Returns `true`, once, if packets that wait have waited long enough.
    pub(super) fn is_over(&self, waits: bool) -> bool {
        let mut state = self.state.lock();
        let Some(fires_at) = state.fires_at else { return false };
        let now = Instant::now();
        if now < fires_at {
            return false;
        }
        let left = state.over_at.filter(|_| waits).map(|at| at.saturating_duration_since(now));
        self.set(&mut state, now, left.unwrap_or_default());
        left == Some(Duration::ZERO)
    }

    /// Sets the timer, or stops it with no time.
    fn set(&self, state: &mut State, now: Instant, left: Duration) {
        state.fires_at = (!left.is_zero()).then(|| now + left);
        let nothing = Timespec::default();
        let value = Itimerspec { it_interval: nothing, it_value: Timespec::try_from(left).unwrap_or(nothing) };
        // It fails for times that are none only.
        let _ = timerfd_settime(&*self.timer, TimerfdTimerFlags::empty(), &value);
    }
}
