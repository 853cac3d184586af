//! When a doorbell page becomes memory, and when it traps again: values on virtual time, in nanoseconds.

use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use thiserror::Error;

/// A page whose process rings more doorbells than these, none of which arms,
const HOT_DOORBELLS: u32 = 64;
/// in this time,
const HOT_TIME: u64 = 1_000_000;
/// and has armed nothing for this long, becomes memory.
const HOT_QUIET: u64 = 100_000_000;

/// How long a page that the system does not let be memory traps, at least. An attempt has all queues of its process
/// armed.
const REFUSED: u64 = 1_000_000_000;

/// How long the watcher goes on looking without a pause after there was work.
const SPIN: u64 = 50_000;
/// Its pauses then, at least and at most.
const NAPS: (u64, u64) = (20_000, 50_000);
/// How long there is no work until pages trap again: at first, and at most.
const IDLE: (u64, u64) = (2_000_000, 100_000_000);
/// Pages that become memory again this soon after they trapped belong to a process that polls and finds nothing: they
/// stay for twice as long.
const AGAIN: u64 = 10_000_000;

/// A mode of doorbells that there is not.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("doorbells are auto, trapped or mapped, not '{0}'")]
pub struct WindowConfigError(String);

/// What somebody wants of the doorbells of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DoorbellMode {
    /// Memory where that is of use and there is a processor for it.
    #[default]
    Auto,
    /// Each doorbell stops the guest's processor.
    Trapped,
    /// Memory from a process's first post or poll on, whoever has to wait for a processor.
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

/// How many processors there are, and who wants them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processors {
    /// Those that this process may run on.
    pub available: usize,
    /// Processors of all guests of this process.
    pub virtual_processors: usize,
    /// Guests of this process with a watcher.
    pub watchers: usize,
}

impl Processors {
    /// Returns `true` if a watcher that does not pause keeps nobody waiting.
    const fn suffice(self) -> bool {
        self.available >= self.virtual_processors.saturating_add(self.watchers)
    }
}

/// When pages are memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowPolicy {
    /// Doorbells that a page hears in a row before it becomes memory.
    doorbells: u32,
    /// How soon they come, at the latest.
    within: u64,
    /// How long nothing was armed.
    quiet: u64,
    /// How long there is no work until pages trap again, at first.
    idle: u64,
    /// The watcher looks without a pause after work.
    spins: bool,
}

impl WindowPolicy {
    /// What is right for this mode with so many processors; `None` where doorbells are to trap.
    pub const fn choose(mode: DoorbellMode, processors: Processors) -> Option<Self> {
        let spins = processors.suffice();
        match mode {
            DoorbellMode::Auto if spins => {
                Some(Self { doorbells: HOT_DOORBELLS + 1, within: HOT_TIME, quiet: HOT_QUIET, idle: IDLE.0, spins })
            }
            DoorbellMode::Auto | DoorbellMode::Trapped => None,
            // Who has to wait for a processor posts late.
            DoorbellMode::Mapped => Some(Self { doorbells: 1, within: 0, quiet: 0, idle: IDLE.1, spins }),
        }
    }
}

/// How often a page's doorbells ring while it traps.
///
/// Processors of one guest may ring at the same time. What is lost then is a few counts: nobody waits for another.
#[derive(Debug, Default)]
pub(super) struct Heat {
    count: AtomicU32,
    since: AtomicU64,
    /// Not hot before then.
    quiet_until: AtomicU64,
}

impl Heat {
    /// A doorbell has come. Returns `true` if the page is to become memory.
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

    /// The system does not let the page be memory.
    pub(super) fn refused(&self, now: u64) {
        self.quiet_until.fetch_max(now.saturating_add(REFUSED), Ordering::Relaxed);
    }

    /// The page has another process.
    pub(super) fn forget(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.quiet_until.store(0, Ordering::Relaxed);
    }
}

/// What the watcher does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Look again at once.
    Spin,
    /// Look again after this time.
    Nap(u64),
    /// Let all pages trap.
    Retire,
    /// Sleep: no page is memory.
    Sleep,
}

/// How the watcher spends its time.
#[derive(Debug)]
pub(super) struct Pacer {
    spins: bool,
    /// When there was work last.
    worked: u64,
    /// How long pages stay memory without any, now and at first.
    idle: u64,
    shortest_idle: u64,
    retired: Option<u64>,
}

impl Pacer {
    pub(super) const fn new(policy: &WindowPolicy) -> Self {
        Self { spins: policy.spins, worked: 0, idle: policy.idle, shortest_idle: policy.idle, retired: None }
    }

    /// A page has become memory.
    pub(super) fn mapped(&mut self, now: u64) {
        self.worked = now;
        if let Some(retired) = self.retired.take() {
            let again = now.saturating_sub(retired) <= AGAIN;
            self.idle = if again { self.idle.saturating_mul(2).min(IDLE.1) } else { self.shortest_idle };
        }
    }

    /// Somebody has looked, and found so many rings that had moved. `mapped` tells whether any page is memory.
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
