//! The rules of a device in force, and their counts.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Random;
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{QpType, Qpn};
use serde::{Deserialize, Serialize};

use super::rule::{Fault, FaultRule, Site, Trigger};

/// Highest number of keys that one rule revokes.
const MAX_KEYS: usize = 1024;

/// A rule in force.
#[derive(Debug)]
struct Armed {
    rule: FaultRule,
    random: Random,
    seen: u64,
    happened: u64,
    /// Keys that this rule has revoked.
    keys: HashSet<u32>,
}

impl Armed {
    fn new(rule: FaultRule) -> Self {
        // State 0 would yield only zeros.
        let random = Random::Seed(rule.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        Self { rule, random, seen: 0, happened: 0, keys: HashSet::new() }
    }

    /// Counts one time, and returns `true` if the fault happens.
    fn count(&mut self) -> bool {
        self.seen = self.seen.saturating_add(1);
        let due = match self.rule.trigger {
            Trigger::Nth(nth) => self.seen >= nth,
            Trigger::Every(every) => self.seen.is_multiple_of(every),
            Trigger::OneIn(most) => self.random.draw().is_ok_and(|number| number.is_multiple_of(most)),
        };
        let happens = due && self.rule.times.is_none_or(|times| self.happened < times);
        self.happened = self.happened.saturating_add(u64::from(happens));
        happens
    }
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

/// Faults of a device.
#[derive(Debug, Default)]
pub(crate) struct FaultPoint {
    active: AtomicBool,
    armed: Mutex<Vec<Armed>>,
}

impl FaultPoint {
    /// Returns `true` if the device has rules.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Counts that a queue pair has reached a place. Returns the fault that happens there, that of the first rule if
    /// there are several.
    #[inline]
    pub(crate) fn at(&self, site: Site, qp: (QpType, Qpn)) -> Option<Fault> {
        if self.is_active() { self.at_place(site, qp, None) } else { None }
    }

    /// As [`Self::at`], for an access with this key. A revoked key stays revoked.
    #[inline]
    pub(crate) fn at_key(&self, qp: (QpType, Qpn), key: u32) -> Option<Fault> {
        if self.is_active() { self.at_place(Site::Access, qp, Some(key)) } else { None }
    }

    #[cold]
    fn at_place(&self, site: Site, (qp_type, qpn): (QpType, Qpn), key: Option<u32>) -> Option<Fault> {
        if qp_type.is_datagram() {
            return None;
        }
        let mut first = None;
        for armed in self.armed.lock().iter_mut() {
            let rule = armed.rule;
            if rule.fault.site() != site || rule.qp.is_some_and(|only| only != qpn) {
                continue;
            }
            // Each rule counts, even if an earlier one acts.
            let mut happens = armed.count();
            if let Some(key) = key.filter(|_| rule.fault == Fault::KeyRevoked) {
                if happens && armed.keys.len() < MAX_KEYS {
                    armed.keys.insert(key);
                }
                happens |= armed.keys.contains(&key);
            }
            if happens && first.is_none() {
                first = Some(rule.fault);
            }
        }
        first
    }
}

/// Handle for the faults of a device. They last until it is dropped, across restarts of the device's driver.
#[derive(Debug)]
pub struct DeviceFaults(pub(crate) Arc<FaultPoint>);

impl DeviceFaults {
    /// Highest number of rules of a device.
    pub const MAX_RULES: usize = 64;

    /// Replaces the rules. All counts begin anew, and revoked keys become valid again.
    ///
    /// # Errors
    /// There are too many rules; nothing has changed then.
    pub fn set(&self, rules: &[FaultRule]) -> Result<(), VerbsError> {
        if rules.len() > Self::MAX_RULES {
            return Err(VerbsError::Exhausted("faults of this device"));
        }
        let mut armed = self.0.armed.lock();
        *armed = rules.iter().copied().map(Armed::new).collect();
        self.0.active.store(!armed.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Returns the rules in force.
    pub fn status(&self) -> Vec<FaultStatus> {
        let armed = self.0.armed.lock();
        armed.iter().map(|&Armed { rule, seen, happened, .. }| FaultStatus { rule, seen, happened }).collect()
    }
}

impl Drop for DeviceFaults {
    fn drop(&mut self) {
        self.0.armed.lock().clear();
        self.0.active.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_packet::MacAddr;

    use super::*;
    use crate::by_mac::ByMac;

    const QP: (QpType, Qpn) = (QpType::Rc, Qpn::new(0x101));

    fn faults(rules: &[&str]) -> DeviceFaults {
        let faults = DeviceFaults(Arc::default());
        faults.set(&rules.iter().map(|rule| rule.parse().unwrap()).collect::<Vec<_>>()).unwrap();
        faults
    }

    /// Returns the times, of the first `count`, at which a rule acts.
    fn times(rule: &str, count: u64) -> Vec<u64> {
        let faults = faults(&[rule]);
        let site = faults.status()[0].rule.fault.site();
        (1..=count).filter(|_| faults.0.at(site, QP).is_some()).collect()
    }

    #[test]
    fn counts_decide() {
        assert_eq!(times("loss/nth:5", 20), [5]);
        assert_eq!(times("loss/nth:5/times:3", 20), [5, 6, 7]);
        assert_eq!(times("loss/nth:18/times:always", 20), [18, 19, 20]);
        assert_eq!(times("loss/every:7", 20), [7, 14]);
        assert_eq!(times("loss/every:7/times:1", 20), [7]);
        assert_eq!(times("loss/one-in:1", 3), [1, 2, 3]);
    }

    #[test]
    fn the_same_seed_gives_the_same_sequence() {
        let sequence = |seed: u64| times(&format!("loss/one-in:10/seed:{seed}"), 1000);
        for seed in 0..20 {
            assert_eq!(sequence(seed), sequence(seed));
            assert!((50..200).contains(&sequence(seed).len()), "{}", sequence(seed).len());
            assert_ne!(sequence(seed), sequence(seed + 1));
        }
    }

    #[test]
    fn other_queue_pairs_and_places_are_not_counted() {
        let faults = faults(&["loss/qp:0x101/nth:2", "rnr", "remote-access/nth:3"]);
        let point = &faults.0;
        assert_eq!(point.at(Site::Arrival, (QpType::Rc, Qpn::new(0x102))), None);
        assert_eq!(point.at(Site::Arrival, (QpType::Gsi, Qpn::new(0x101))), None);
        assert_eq!((point.at(Site::Arrival, QP), point.at(Site::Arrival, QP)), (None, Some(Fault::Loss)));
        assert_eq!(point.at(Site::Wanted, QP), Some(Fault::Rnr));
        let counts: Vec<_> = faults.status().iter().map(|status| (status.seen, status.happened)).collect();
        assert_eq!(counts, [(2, 1), (1, 1), (0, 0)]);
    }

    #[test]
    fn a_revoked_key_stays_revoked_until_the_rules_change() {
        let faults = faults(&["key-revoked/nth:2"]);
        let at = |key| faults.0.at_key(QP, key);
        assert_eq!([at(7), at(8), at(7), at(8), at(8)], {
            let revoked = Some(Fault::KeyRevoked);
            [None, revoked, None, revoked, revoked]
        });
        faults.set(&[]).unwrap();
        assert!(!faults.0.is_active() && at(8).is_none());
    }

    #[test]
    fn rules_are_bounded_and_end_with_their_handle() {
        let rule = FaultRule::new(Fault::Loss);
        let points = ByMac::<FaultPoint>::default();
        let faults = DeviceFaults(points.of(MacAddr([2; 6])));
        assert!(faults.set(&[rule; DeviceFaults::MAX_RULES + 1]).is_err());
        faults.set(&[rule; DeviceFaults::MAX_RULES]).unwrap();
        let point = points.of(MacAddr([2; 6]));
        assert!(point.is_active());
        drop(faults);
        assert!(!point.is_active());
    }
}
