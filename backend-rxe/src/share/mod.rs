//! Shares of devices in common resources: time of the workers and of the ports, and bandwidth.
//!
//! The ready queue serves devices by start-time fair queueing (Goyal, Vin, Cheng 1996). Each device has a *finish tag*,
//! the cost of its work so far divided by its weight, and the device with the smallest tag is next. A device that was
//! idle resumes at the *virtual time*, the tag of the work that began last, so idle time earns no credit. The queue
//! pairs of a device take turns, each with the same budget. The cost is counted in bytes. Each request has an
//! additional fixed cost, and so does a run that finds nothing to do.
//!
//! A device also works on its own threads: the one that handles its doorbells, and that of its port. This work is
//! charged while another device is busy. A device that gets ahead of the others this way must pass its work to the
//! ready queue.

pub(crate) mod token_bucket;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pvrdma_base::Count;
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
use token_bucket::TokenBucket;

/// Default weight of a device.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Number of bytes by which a device may get ahead of the others on its own threads.
const SLACK: u64 = 64 << 10;
/// Maximum number of bytes of work on its own threads that are charged to a device at a time.
pub(crate) const MAX_DEBT: u64 = 4 << 20;

/// Share of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShareConfig {
    /// Weight against the other devices: 1 to 1000, 100 by default.
    pub weight: u32,
    /// Maximum bytes per second that the device moves: payload of local delivery, frames on the wire.
    pub max_rate: Option<u64>,
    /// Maximum burst in bytes after idle time, with `max_rate`. By default the bytes of 10 ms, at least 64 KiB.
    pub burst: Option<u64>,
    /// Maximum bytes per second that the requests of each queue pair move.
    pub qp_max_rate: Option<u64>,
    /// Bytes per second up to which the device has priority over devices that have reached theirs.
    pub min_rate: Option<u64>,
}

impl Default for ShareConfig {
    fn default() -> Self {
        Self { weight: DEFAULT_WEIGHT, max_rate: None, burst: None, qp_max_rate: None, min_rate: None }
    }
}

pvrdma_base::setters!(ShareConfig {
    with_weight => weight: u32,
    with_max_rate => max_rate: Option<u64>,
    with_burst => burst: Option<u64>,
    with_qp_max_rate => qp_max_rate: Option<u64>,
    with_min_rate => min_rate: Option<u64>,
});

/// Usage of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareUsage {
    /// Nanoseconds on the workers that all devices share.
    pub worker_ns: u64,
    /// Nanoseconds on the thread of its port.
    pub port_ns: u64,
    /// Number of times that `max_rate` delayed the device.
    pub throttled: u64,
}

/// State that is read without the lock of the ready queue.
#[derive(Debug, Default)]
pub(crate) struct Contention {
    /// Number of devices that have tasks on the ready queue or on a worker.
    pub(crate) busy: AtomicUsize,
    /// The tag of the work that was begun last.
    pub(crate) virtual_time: AtomicU64,
}

/// A rate limit that can be set, changed and removed while the device moves bytes.
#[derive(Debug)]
struct Rate {
    /// A limit is set.
    given: AtomicBool,
    bucket: Mutex<TokenBucket>,
}

impl Rate {
    fn new(rate: Option<u64>, burst: Option<u64>) -> Self {
        let bucket = Mutex::new(TokenBucket::new(rate.unwrap_or(0), burst));
        Self { given: AtomicBool::new(rate.is_some()), bucket }
    }

    /// Sets the limit and starts with a full bucket.
    fn set(&self, rate: Option<u64>, burst: Option<u64>) {
        *self.bucket.lock() = TokenBucket::new(rate.unwrap_or(0), burst);
        self.given.store(rate.is_some(), Ordering::Relaxed);
    }

    #[inline]
    fn bucket(&self) -> Option<MutexGuard<'_, TokenBucket>> {
        self.given.load(Ordering::Relaxed).then(|| self.bucket.lock())
    }
}

/// Share of a device, with its usage.
#[derive(Debug)]
pub(crate) struct Share {
    /// The current configuration.
    config: Mutex<ShareConfig>,
    weight: AtomicU64,
    max: Rate,
    min: Rate,
    /// Number of changes of `qp_max_rate`, by which queue pairs notice them.
    qp_rates: AtomicU32,
    /// Slot of the device in the ready queue, which verifies it.
    pub(crate) slot: AtomicUsize,
    /// The device has tasks on the ready queue or on a worker.
    pub(crate) busy: AtomicBool,
    /// Virtual time at which the device's work so far would be finished, by which the ready queue orders devices.
    /// Written by the thread that holds the ready queue, and by the device's own threads while it is not busy.
    finish: AtomicU64,
    /// Cost of work on the device's own threads that `finish` does not include yet.
    elsewhere: AtomicU64,
    worker_ns: Count,
    port_ns: Count,
    throttled: Count,
}

impl Default for Share {
    fn default() -> Self {
        Self::new(ShareConfig::default())
    }
}

impl Share {
    pub(crate) fn new(config: ShareConfig) -> Self {
        Self {
            config: Mutex::new(config),
            weight: AtomicU64::new(effective(config.weight)),
            max: Rate::new(config.max_rate, config.burst),
            min: Rate::new(config.min_rate, None),
            qp_rates: AtomicU32::new(0),
            slot: AtomicUsize::new(usize::MAX),
            busy: AtomicBool::new(false),
            finish: AtomicU64::new(0),
            elsewhere: AtomicU64::new(0),
            worker_ns: Count::default(),
            port_ns: Count::default(),
            throttled: Count::default(),
        }
    }

    pub(crate) fn usage(&self) -> ShareUsage {
        let Self { worker_ns, port_ns, throttled, .. } = self;
        ShareUsage { worker_ns: worker_ns.get(), port_ns: port_ns.get(), throttled: throttled.get() }
    }

    pub(crate) fn config(&self) -> ShareConfig {
        *self.config.lock()
    }

    /// Changes the configuration. Limits that have not changed keep their state.
    pub(crate) fn set(&self, new: ShareConfig) {
        let mut config = self.config.lock();
        let old = std::mem::replace(&mut *config, new);
        self.weight.store(effective(new.weight), Ordering::Relaxed);
        if (old.max_rate, old.burst) != (new.max_rate, new.burst) {
            self.max.set(new.max_rate, new.burst);
        }
        if old.min_rate != new.min_rate {
            self.min.set(new.min_rate, None);
        }
        if old.qp_max_rate != new.qp_max_rate {
            self.qp_rates.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns a number that changes with the limits of queue pairs.
    #[inline]
    pub(crate) fn qp_rates(&self) -> u32 {
        self.qp_rates.load(Ordering::Relaxed)
    }

    /// Returns a new limit for a queue pair.
    pub(crate) fn qp_limit(&self) -> Option<TokenBucket> {
        self.config.lock().qp_max_rate.map(|rate| TokenBucket::new(rate, None))
    }

    pub(crate) fn finish(&self) -> u64 {
        self.finish.load(Ordering::Relaxed)
    }

    pub(crate) fn set_finish(&self, finish: u64) {
        self.finish.store(finish, Ordering::Relaxed);
    }

    /// Returns the increase of the finish tag for a cost.
    pub(crate) fn scaled(&self, cost: u64) -> u64 {
        cost.saturating_mul(u64::from(DEFAULT_WEIGHT)) / self.weight.load(Ordering::Relaxed).max(1)
    }

    /// Takes the cost of work on threads of the device since the last call, limited and scaled.
    pub(crate) fn take_elsewhere(&self) -> u64 {
        if self.elsewhere.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.scaled(self.elsewhere.swap(0, Ordering::Relaxed).min(MAX_DEBT))
    }

    /// Returns `true` if the device can use its own threads, because no other device is busy or the device is not
    /// ahead.
    #[inline]
    pub(crate) fn may_run_elsewhere(&self, contention: &Contention) -> bool {
        contention.busy.load(Ordering::Relaxed) == 0 || self.is_behind(contention)
    }

    #[cold]
    fn is_behind(&self, contention: &Contention) -> bool {
        let busy = self.busy.load(Ordering::Relaxed);
        if contention.busy.load(Ordering::Relaxed) <= usize::from(busy) {
            // Only this device is busy.
            return true;
        }
        let now = contention.virtual_time.load(Ordering::Relaxed);
        let tag = self.finish().saturating_add(self.scaled(self.elsewhere.load(Ordering::Relaxed)));
        if tag < now && !busy {
            // Idle time earns no credit: the device resumes at the virtual time.
            self.elsewhere.store(0, Ordering::Relaxed);
            self.set_finish(now);
        }
        tag <= now.saturating_add(self.scaled(SLACK))
    }

    /// Charges work on a thread of the device. `wire`: other devices may wait for room on the same link, and do not
    /// count as busy meanwhile.
    #[inline]
    pub(crate) fn ran_elsewhere(&self, contention: &Contention, cost: u64, wire: bool) {
        let busy = contention.busy.load(Ordering::Relaxed);
        if wire || busy != 0 && busy > usize::from(self.busy.load(Ordering::Relaxed)) {
            self.elsewhere.fetch_add(cost, Ordering::Relaxed);
        }
    }

    /// Returns the time at which the device can move bytes again, if its rate limit delays it.
    #[inline]
    pub(crate) fn throttled_until(&self, now: impl FnOnce() -> Duration) -> Option<Duration> {
        self.max.bucket()?.blocked_until(now())
    }

    /// Counts a delay by the rate limit.
    pub(crate) fn count_throttled(&self) {
        self.throttled.increment();
    }

    /// Returns `true` if the device has not reached its minimum rate.
    pub(crate) fn is_owed(&self, now: Duration) -> bool {
        self.min.bucket().is_some_and(|mut min| min.blocked_until(now).is_none())
    }

    /// Reduces a budget to the rate limit of the device.
    #[inline]
    pub(crate) fn limit(&self, budget: Budget, now: impl FnOnce() -> Duration) -> Budget {
        match self.max.bucket() {
            Some(mut max) => budget.at_most(max.available(now()).max(1)),
            None => budget,
        }
    }

    /// Charges moved bytes and their cost. The minimum rate is compared with the cost: a device whose requests move no
    /// bytes would otherwise stay below it forever.
    #[inline]
    pub(crate) fn spend(&self, bytes: u64, cost: u64) {
        for (rate, used) in [(&self.max, bytes), (&self.min, cost)] {
            if let Some(mut bucket) = rate.bucket() {
                bucket.spend(used);
            }
        }
    }

    pub(crate) fn add_worker_time(&self, time: Duration) {
        self.worker_ns.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn add_port_time(&self, time: Duration) {
        self.port_ns.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Clamps a weight to the allowed range.
fn effective(weight: u32) -> u64 {
    weight.clamp(1, 1000).into()
}

#[cfg(test)]
mod tests;
