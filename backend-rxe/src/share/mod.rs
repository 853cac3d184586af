//! What a device may use of what all devices share: time of the workers and of its port, and bandwidth.
//!
//! The ready queue serves devices by start-time fair queueing (Goyal, Vin, Cheng 1996): each has a *finish tag*, the
//! cost of what was done for it divided by its weight, and the device with the smallest tag is next. Who was idle
//! begins at the *virtual time*, the tag with which work was last begun: nothing is saved up. In a device queue pairs
//! take turns, each with the same budget. The cost is in bytes; a request costs some more, whatever its length, and so
//! does a run that finds nothing to do.
//!
//! What a device does on threads of its own, the one that rings its doorbells and that of its port, is counted while
//! another device is busy. One that is ahead of the others by it goes to the ready queue with what it has to do.

pub(crate) mod token_bucket;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pvrdma_verbs::{Count, MacAddr};
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
use token_bucket::TokenBucket;

/// The weight of a device for which nothing is said.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Bytes by which a device may be ahead of the others on its own threads.
const SLACK: u64 = 64 << 10;
/// Bytes of what it did there that count against it at most, at a time.
pub(crate) const MAX_DEBT: u64 = 4 << 20;

/// What a device may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShareConfig {
    /// Its share, against those of the other devices: 1 to 1000, and 100 for who does not choose.
    pub weight: u32,
    /// Bytes per second that it moves at most: payload of local delivery, frames on the wire.
    pub max_rate: Option<u64>,
    /// Bytes that it moves at once, after a pause, with `max_rate`. Without: what comes in 10 ms, at least 64 KiB.
    pub burst: Option<u64>,
    /// Bytes per second that the requests of one of its queue pairs move at most.
    pub qp_max_rate: Option<u64>,
    /// Bytes per second with which it comes before devices that have that much already.
    pub min_rate: Option<u64>,
}

impl Default for ShareConfig {
    fn default() -> Self {
        Self { weight: DEFAULT_WEIGHT, max_rate: None, burst: None, qp_max_rate: None, min_rate: None }
    }
}

/// What a device has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareUsage {
    /// Nanoseconds of the workers that all devices share.
    pub worker_ns: u64,
    /// Nanoseconds of the thread of its port.
    pub port_ns: u64,
    /// Times that `max_rate` had it wait.
    pub throttled: u64,
}

/// What is looked at without the lock of the ready queue.
#[derive(Debug, Default)]
pub(crate) struct Contention {
    /// Devices that have tasks on the ready queue or on a worker.
    pub(crate) busy: AtomicUsize,
    /// The tag with which one of those last began.
    pub(crate) virtual_time: AtomicU64,
}

/// A rate that can be given, changed and taken away while the device moves bytes.
#[derive(Debug)]
struct Rate {
    /// There is one now.
    given: AtomicBool,
    bucket: Mutex<TokenBucket>,
}

impl Rate {
    fn new(rate: Option<u64>, burst: Option<u64>) -> Self {
        let bucket = Mutex::new(TokenBucket::new(rate.unwrap_or(0), burst));
        Self { given: AtomicBool::new(rate.is_some()), bucket }
    }

    /// From now on, and with nothing owed.
    fn set(&self, rate: Option<u64>, burst: Option<u64>) {
        *self.bucket.lock() = TokenBucket::new(rate.unwrap_or(0), burst);
        self.given.store(rate.is_some(), Ordering::Relaxed);
    }

    #[inline]
    fn bucket(&self) -> Option<MutexGuard<'_, TokenBucket>> {
        self.given.load(Ordering::Relaxed).then(|| self.bucket.lock())
    }
}

/// A device's share.
#[derive(Debug)]
pub(crate) struct Share {
    /// What it is made of now.
    config: Mutex<ShareConfig>,
    weight: AtomicU64,
    max: Rate,
    min: Rate,
    /// Changes of `qp_max_rate`, by which queue pairs learn of them.
    qp_rates: AtomicU32,
    /// Its place in the ready queue, which looks whether it is there.
    pub(crate) slot: AtomicUsize,
    /// It has tasks on the ready queue or on a worker.
    pub(crate) busy: AtomicBool,
    /// Its finish tag. Whoever has the ready queue writes it, and its own threads while it is not busy.
    finish: AtomicU64,
    /// Cost of what was done on its own threads and is not in the tag yet.
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

    /// From now on. What has not changed goes on as it was.
    fn set(&self, new: ShareConfig) {
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

    /// Differs from what it was if limits of queue pairs have changed since.
    #[inline]
    pub(crate) fn qp_rates(&self) -> u32 {
        self.qp_rates.load(Ordering::Relaxed)
    }

    /// The limit of a queue pair.
    pub(crate) fn qp_limit(&self) -> Option<TokenBucket> {
        self.config.lock().qp_max_rate.map(|rate| TokenBucket::new(rate, None))
    }

    pub(crate) fn finish(&self) -> u64 {
        self.finish.load(Ordering::Relaxed)
    }

    pub(crate) fn set_finish(&self, finish: u64) {
        self.finish.store(finish, Ordering::Relaxed);
    }

    /// What a cost does to the finish tag.
    pub(crate) fn scaled(&self, cost: u64) -> u64 {
        cost.saturating_mul(u64::from(DEFAULT_WEIGHT)) / self.weight.load(Ordering::Relaxed).max(1)
    }

    /// What was done on threads of the device since this was asked last, as far as it counts.
    pub(crate) fn take_elsewhere(&self) -> u64 {
        if self.elsewhere.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.scaled(self.elsewhere.swap(0, Ordering::Relaxed).min(MAX_DEBT))
    }

    /// Returns `true` if the device may go on on a thread of its own: nobody else is busy, or it is not ahead.
    #[inline]
    pub(crate) fn may_run_elsewhere(&self, contention: &Contention) -> bool {
        contention.busy.load(Ordering::Relaxed) == 0 || self.is_behind(contention)
    }

    #[cold]
    fn is_behind(&self, contention: &Contention) -> bool {
        let busy = self.busy.load(Ordering::Relaxed);
        if contention.busy.load(Ordering::Relaxed) <= usize::from(busy) {
            // Only this device is.
            return true;
        }
        let now = contention.virtual_time.load(Ordering::Relaxed);
        let tag = self.finish().saturating_add(self.scaled(self.elsewhere.load(Ordering::Relaxed)));
        if tag < now && !busy {
            // Nothing is saved up.
            self.elsewhere.store(0, Ordering::Relaxed);
            self.set_finish(now);
        }
        tag <= now.saturating_add(self.scaled(SLACK))
    }

    /// Something was done on a thread of the device. `wire`: others may wait for room on the same link, and are not
    /// busy meanwhile.
    #[inline]
    pub(crate) fn ran_elsewhere(&self, contention: &Contention, cost: u64, wire: bool) {
        let busy = contention.busy.load(Ordering::Relaxed);
        if wire || busy != 0 && busy > usize::from(self.busy.load(Ordering::Relaxed)) {
            self.elsewhere.fetch_add(cost, Ordering::Relaxed);
        }
    }

    /// When the device may move bytes again, if its rate has it wait.
    #[inline]
    pub(crate) fn throttled_until(&self, now: impl FnOnce() -> Duration) -> Option<Duration> {
        self.max.bucket()?.blocked_until(now())
    }

    /// Counts that the device has to wait.
    pub(crate) fn count_throttled(&self) {
        self.throttled.increment();
    }

    /// Returns `true` if the device has less than it is promised.
    pub(crate) fn is_owed(&self, now: Duration) -> bool {
        self.min.bucket().is_some_and(|mut min| min.blocked_until(now).is_none())
    }

    /// Makes a budget fit the device's rate.
    #[inline]
    pub(crate) fn limit(&self, budget: Budget, now: impl FnOnce() -> Duration) -> Budget {
        match self.max.bucket() {
            Some(mut max) => budget.at_most(max.available(now()).max(1)),
            None => budget,
        }
    }

    /// The device has moved bytes, with what cost so much. That is what a promise is kept by: with requests that move
    /// nothing a device would be owed something for ever.
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

/// A weight as it is used.
fn effective(weight: u32) -> u64 {
    weight.clamp(1, 1000).into()
}

/// The shares of devices, by address.
#[derive(Debug, Default)]
pub(crate) struct Shares(Mutex<HashMap<MacAddr, Weak<Share>>>);

impl Shares {
    /// The share of a device: what was given to it, or that of who has nothing to say.
    pub(crate) fn of(&self, mac: MacAddr) -> Arc<Share> {
        let mut shares = self.0.lock();
        if let Some(share) = shares.get(&mac).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Share::default());
        shares.insert(mac, Arc::downgrade(&share));
        share
    }

    /// Gives a device a share.
    pub(crate) fn set(&self, mac: MacAddr, config: ShareConfig) -> DeviceShare {
        let share = Arc::new(Share::new(config));
        self.0.lock().insert(mac, Arc::downgrade(&share));
        DeviceShare(share)
    }
}

/// What a device may use, for as long as this is there and the device is.
#[derive(Clone, Debug)]
pub struct DeviceShare(Arc<Share>);

impl DeviceShare {
    /// What the device has used.
    pub fn usage(&self) -> ShareUsage {
        self.0.usage()
    }

    /// What it may use.
    pub fn config(&self) -> ShareConfig {
        self.0.config()
    }

    /// Changes what it may use.
    pub(crate) fn set(&self, config: ShareConfig) {
        self.0.set(config);
    }
}

#[cfg(test)]
mod tests;
