//! Deadline for transmit completions: interrupts the guest if no other interrupt reports them earlier.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_base::locks::Mutex;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// Maximum delay of the completion interrupt. An answer to the packets usually arrives earlier, and its interrupt also
/// reports the completions.
pub(super) const LATEST: Duration = Duration::from_millis(1);

/// A timer that is set at most once per [`LATEST`], regardless of the number of packets sent and answered.
#[derive(Debug)]
pub(super) struct Deadline {
    timer: Arc<OwnedFd>,
    latest: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// End of the wait that began last.
    over_at: Option<Instant>,
    /// Time at which the timer fires.
    fires_at: Option<Instant>,
}

impl Deadline {
    /// # Errors
    /// The process or system is out of file descriptors.
    pub(super) fn new(latest: Duration) -> Result<Self, Errno> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = Arc::new(timerfd_create(TimerfdClockId::Monotonic, flags)?);
        Ok(Self { timer, latest, state: Mutex::default() })
    }

    /// Returns a descriptor that becomes readable when [`Self::is_over`] should be called.
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.timer)
    }

    /// Starts a wait for completions.
    pub(super) fn begin(&self) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.over_at = Some(now + self.latest);
        if state.fires_at.is_none() {
            self.set(&mut state, now, self.latest);
        }
    }

    /// Returns `true`, once per wait, if completions have waited until the deadline. `waits`: some completions still
    /// wait.
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

    /// Sets the timer. Zero stops it.
    fn set(&self, state: &mut State, now: Instant, left: Duration) {
        state.fires_at = (!left.is_zero()).then(|| now + left);
        let nothing = Timespec::default();
        let value = Itimerspec { it_interval: nothing, it_value: Timespec::try_from(left).unwrap_or(nothing) };
        // The call fails only for invalid times.
        let _ = timerfd_settime(&*self.timer, TimerfdTimerFlags::empty(), &value);
    }
}
