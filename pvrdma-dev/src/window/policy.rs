//! Policy that decides when a doorbell page is mapped and when it traps again. Pure values on virtual time, in
//! nanoseconds.

use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use thiserror::Error;

/// Number of doorbells that a process must exceed, without arming, before its page is mapped.
const HOT_DOORBELLS: u32 = 64;
/// Time within which these doorbells must arrive.
const HOT_TIME: u64 = 1_000_000;
/// Time for which the process must not have armed anything before its page is mapped.
const HOT_QUIET: u64 = 100_000_000;

/// Minimum time for which a page keeps trapping after the system refused to map it. It limits attempts, because each
/// one arms all queues of the process.
const REFUSED: u64 = 1_000_000_000;

/// Time for which the watcher looks without a pause after it found work.
const SPIN: u64 = 50_000;
/// Minimum and maximum of the watcher's pauses after that time.
const NAPS: (u64, u64) = (20_000, 50_000);
/// Idle time after which pages trap again: initially, and at most.
const IDLE: (u64, u64) = (2_000_000, 100_000_000);
/// If pages are mapped again within this time after they trapped, their process polls and finds nothing, and their idle
/// time is doubled.
const AGAIN: u64 = 10_000_000;

/// Error: unknown doorbell mode.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("doorbells are auto, trapped or mapped, not '{0}'")]
pub struct WindowConfigError(String);

/// Configured handling of a VM's doorbells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DoorbellMode {
    /// Mapped if that is of use and a processor is free for the watcher.
    #[default]
    Auto,
    /// Each doorbell traps.
    Trapped,
    /// Mapped from the process's first post or poll on, even if threads then compete for processors.
    Mapped,
}

impl FromStr for DoorbellMode {
    type Err = WindowConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "trapped" => Ok(Self::Trapped),
            "mapped" => Ok(Self::Mapped),
            other => Err(WindowConfigError(other.to_owned())),
        }
    }
}

/// Number of processors and of the threads that need them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processors {
    /// Processors on which this process may run.
    pub available: usize,
    /// Virtual processors of all guests of this process.
    pub virtual_processors: usize,
    /// Number of guests of this process with a watcher.
    pub watchers: usize,
}

impl Processors {
    /// Returns `true` if a watcher that never pauses takes no processor from other threads.
    const fn suffice(self) -> bool {
        self.available >= self.virtual_processors.saturating_add(self.watchers)
    }
}

/// Conditions under which pages are memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowPolicy {
    /// Number of consecutive doorbells after which a page becomes memory.
    doorbells: u32,
    /// Maximum time in which they must arrive.
    within: u64,
    /// Minimum time without arming.
    quiet: u64,
    /// Initial idle time after which pages trap again.
    idle: u64,
    /// `true` if the watcher looks without a pause after work.
    spins: bool,
}

impl WindowPolicy {
    /// Returns the policy for this mode and number of processors; `None` if doorbells are to trap.
    pub const fn choose(mode: DoorbellMode, processors: Processors) -> Option<Self> {
        let spins = processors.suffice();
        match mode {
            DoorbellMode::Auto if spins => {
                Some(Self { doorbells: HOT_DOORBELLS + 1, within: HOT_TIME, quiet: HOT_QUIET, idle: IDLE.0, spins })
            }
            DoorbellMode::Auto | DoorbellMode::Trapped => None,
            // A thread that waits for a processor posts late, so pages stay mapped for longer.
            DoorbellMode::Mapped => Some(Self { doorbells: 1, within: 0, quiet: 0, idle: IDLE.1, spins }),
        }
    }
}

/// Doorbell rate of a page while it traps.
///
/// Several processors of a guest may update it at the same time. This loses a few counts, which is cheaper than a lock.
#[derive(Debug, Default)]
pub(super) struct Heat {
    count: AtomicU32,
    since: AtomicU64,
    /// The page does not become memory before this time.
    quiet_until: AtomicU64,
}

impl Heat {
    /// Counts a doorbell. Returns `true` if the page should be mapped.
    pub(super) fn heard(&self, policy: &WindowPolicy, arms: bool, now: impl Fn() -> u64) -> bool {
        if arms {
            self.quiet_until.fetch_max(now().saturating_add(policy.quiet), Ordering::Relaxed);
            return false;
        }
        let count = self.count.load(Ordering::Relaxed).saturating_add(1);
        if count == 1 {
            self.since.store(now(), Ordering::Relaxed);
        }
        if count < policy.doorbells {
            self.count.store(count, Ordering::Relaxed);
            return false;
        }
        self.count.store(0, Ordering::Relaxed);
        let now = if count == 1 { self.since.load(Ordering::Relaxed) } else { now() };
        let took = now.saturating_sub(self.since.load(Ordering::Relaxed));
        took <= policy.within && now >= self.quiet_until.load(Ordering::Relaxed)
    }

    /// Records that the system refused to map the page.
    pub(super) fn refused(&self, now: u64) {
        self.quiet_until.fetch_max(now.saturating_add(REFUSED), Ordering::Relaxed);
    }

    /// Resets the counts for another process.
    pub(super) fn forget(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.quiet_until.store(0, Ordering::Relaxed);
    }
}

/// Next action of the watcher.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Look again at once.
    Spin,
    /// Look again after this time.
    Nap(u64),
    /// Make all pages trap.
    Retire,
    /// Sleep: no page is memory.
    Sleep,
}

/// Schedules the watcher.
#[derive(Debug)]
pub(super) struct Pacer {
    spins: bool,
    /// Time of the last work.
    worked: u64,
    /// Time for which pages stay memory without work: current and initial.
    idle: u64,
    shortest_idle: u64,
    retired: Option<u64>,
}

impl Pacer {
    pub(super) const fn new(policy: &WindowPolicy) -> Self {
        Self { spins: policy.spins, worked: 0, idle: policy.idle, shortest_idle: policy.idle, retired: None }
    }

    /// Records that a page has become memory.
    pub(super) fn mapped(&mut self, now: u64) {
        self.worked = now;
        if let Some(retired) = self.retired.take() {
            let again = now.saturating_sub(retired) <= AGAIN;
            self.idle = if again { self.idle.saturating_mul(2).min(IDLE.1) } else { self.shortest_idle };
        }
    }

    /// Returns the next action after a look that found `moved` rings with new requests. `mapped` is `true` if any page
    /// is memory.
    pub(super) fn next(&mut self, now: u64, moved: u32, mapped: bool) -> Step {
        if moved > 0 {
            self.worked = now;
        }
        if !mapped {
            return if moved > 0 { Step::Spin } else { Step::Sleep };
        }
        match now.saturating_sub(self.worked) {
            idle if idle >= self.idle => {
                self.retired = Some(now);
                Step::Retire
            }
            idle if idle < SPIN && self.spins => Step::Spin,
            idle => Step::Nap((idle / 8).clamp(NAPS.0, NAPS.1)),
        }
    }
}
