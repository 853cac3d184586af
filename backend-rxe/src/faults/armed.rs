//! A rule in force: its counts, and the state of its fault.

use std::collections::HashSet;
use std::time::Duration;

use pvrdma_base::Random;
use pvrdma_verbs_types::{Gid, Qpn};
use serde::{Deserialize, Serialize};

use super::rule::{Fault, FaultRule, Scope, Trigger};

/// Highest number of keys that one rule revokes.
const MAX_KEYS: usize = 1024;

/// A rule in force.
#[derive(Debug)]
pub(super) struct Armed {
    pub(super) rule: FaultRule,
    random: Random,
    /// Time at which the rule was set, or at which its last fault of the device ended.
    since: Duration,
    seen: u64,
    happened: u64,
    /// Time of the first fault.
    first: Option<Duration>,
    /// Number of connections since the rule was set.
    connections: u64,
    /// Queue pair of the connection that the rule is for.
    connected: Option<Qpn>,
    /// Keys that this rule has revoked.
    keys: HashSet<u32>,
    /// Time at which its fault of the device began, while that lasts.
    began: Option<Duration>,
    /// GID that the fault has removed, while it lasts.
    removed: Option<Gid>,
    /// Its failure of the device is being applied.
    fails: bool,
}

/// A rule in force, with its counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FaultStatus {
    /// The rule.
    pub rule: FaultRule,
    /// Number of times that its place was reached.
    pub seen: u64,
    /// Number of faults.
    pub happened: u64,
}

impl Armed {
    pub(super) fn new(rule: FaultRule, now: Duration) -> Self {
        Self {
            rule,
            // State 0 would yield only zeros.
            random: Random::Seed(rule.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            since: now,
            seen: 0,
            happened: 0,
            first: None,
            connections: 0,
            connected: None,
            keys: HashSet::new(),
            began: None,
            removed: None,
            fails: false,
        }
    }

    pub(super) const fn status(&self) -> FaultStatus {
        FaultStatus { rule: self.rule, seen: self.seen, happened: self.happened }
    }

    /// Returns `true` if the rule counts what this queue pair does.
    pub(super) fn is_for(&self, qpn: Qpn) -> bool {
        match self.rule.connection {
            Some(_) => self.connected == Some(qpn),
            None => self.rule.qp.is_none_or(|only| only == qpn),
        }
    }

    /// Counts a connection of this queue pair.
    pub(super) fn connected(&mut self, qpn: Qpn) {
        self.connections = self.connections.saturating_add(1);
        if self.rule.connection == Some(self.connections) {
            self.connected = Some(qpn);
        } else if self.connected == Some(qpn) {
            // The queue pair has left the connection that the rule is for.
            self.connected = None;
        }
    }

    /// Counts one time, at an access with this key or at a request from this GID. Returns the delay if the fault
    /// happens; for all faults but delays it is zero.
    pub(super) fn count(&mut self, now: Duration, key: Option<u32>, source: Option<Gid>) -> Option<Duration> {
        self.seen = self.seen.saturating_add(1);
        let due = match self.rule.trigger {
            Trigger::Nth(nth) => self.seen >= nth,
            Trigger::Every(every) => self.seen.is_multiple_of(every),
            Trigger::OneIn(most) => self.random.draw().is_ok_and(|number| number.is_multiple_of(most)),
            Trigger::After(_) => self.due().is_some_and(|due| now >= due),
        };
        let mut happens = due && self.begin(now);
        if happens && self.rule.fault == Fault::GidRemoved {
            self.removed = source;
        }
        if let Some(key) = key.filter(|_| self.rule.fault == Fault::KeyRevoked) {
            if happens && self.keys.len() < MAX_KEYS {
                self.keys.insert(key);
            }
            happens |= self.keys.contains(&key);
        }
        happens.then(|| self.delay())
    }

    /// Begins a fault, unless the rule has reached one of its limits. Returns `true` if it happens.
    fn begin(&mut self, now: Duration) -> bool {
        let FaultRule { fault, times, lasts, .. } = self.rule;
        let is_over = fault.scope() == Scope::QueuePair
            && lasts.zip(self.first).is_some_and(|(lasts, first)| now >= first.saturating_add(lasts));
        if is_over || self.began.is_some() || times.is_some_and(|times| self.happened >= times) {
            return false;
        }
        self.happened = self.happened.saturating_add(1);
        self.first.get_or_insert(now);
        self.began = (fault.scope() == Scope::Device).then_some(now);
        true
    }

    /// Returns the length of a delay that happens now.
    fn delay(&mut self) -> Duration {
        let FaultRule { fault, by, jitter, .. } = self.rule;
        if fault != Fault::Delay {
            return Duration::ZERO;
        }
        if jitter.is_zero() {
            return by;
        }
        let most = u32::try_from(jitter.as_micros()).unwrap_or(u32::MAX);
        let part = self.random.draw().unwrap_or_default() % most.saturating_add(1);
        by.saturating_add(Duration::from_micros(part.into()))
    }

    /// Returns the time at which a trigger by time is due. `None`: there is none, or the rule is used up.
    fn due(&self) -> Option<Duration> {
        let Trigger::After(time) = self.rule.trigger else { return None };
        let is_used_up = self.rule.times.is_some_and(|times| self.happened >= times);
        (!is_used_up).then(|| self.since.saturating_add(time))
    }

    /// Returns the time at which the rule's fault of the device ends.
    fn end_time(&self) -> Option<Duration> {
        self.began.zip(self.rule.lasts).map(|(began, lasts)| began.saturating_add(lasts))
    }

    /// Returns `true` if the rule's fault of the device begins without a request. The removal of a GID needs a request,
    /// whose GID it removes.
    fn begins_alone(&self) -> bool {
        self.rule.fault.scope() == Scope::Device && self.rule.fault != Fault::GidRemoved && self.began.is_none()
    }

    /// Ends the rule's fault of the device if its time is over, and begins one if it is due.
    pub(super) fn pass(&mut self, now: Duration) {
        if self.end_time().is_some_and(|end| now >= end) {
            self.end(now);
        }
        if self.begins_alone() && self.due().is_some_and(|due| now >= due) {
            self.begin(now);
        }
    }

    /// Ends the rule's fault of the device.
    const fn end(&mut self, now: Duration) {
        (self.began, self.removed, self.since, self.fails) = (None, None, now, false);
    }

    /// Returns `true` if the rule makes the device fail. The caller applies that, and then calls [`Self::end_failure`].
    pub(super) fn begin_failure(&mut self) -> bool {
        self.fails = self.is_lasting(Fault::DeviceFatal);
        self.fails
    }

    /// Ends a failure of the device that has been applied.
    pub(super) const fn end_failure(&mut self, now: Duration) {
        if self.fails {
            self.end(now);
        }
    }

    /// Returns the time of the next change of the device without a request.
    pub(super) fn next(&self) -> Option<Duration> {
        self.end_time().or_else(|| self.due().filter(|_| self.begins_alone()))
    }

    /// Returns `true` if the rule has delayed requests, which may not have begun yet.
    pub(super) fn has_delayed(&self) -> bool {
        self.rule.fault == Fault::Delay && self.happened > 0
    }

    /// Returns `true` while the rule's fault of the device lasts.
    pub(super) const fn lasts(&self) -> bool {
        self.began.is_some()
    }

    /// Returns `true` if the rule's fault is `fault`, and lasts now.
    pub(super) fn is_lasting(&self, fault: Fault) -> bool {
        self.rule.fault == fault && self.lasts()
    }

    /// Returns `true` while the rule's fault cuts off the device.
    pub(super) fn cuts(&self) -> bool {
        self.lasts() && self.rule.fault != Fault::GidRemoved
    }

    /// Returns the GID that the rule's fault has removed, while it lasts.
    pub(super) const fn removed(&self) -> Option<Gid> {
        self.removed
    }
}
