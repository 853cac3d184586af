//! The rules of a device in force, and their counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pvrdma_verbs_types::{Gid, QpType, Qpn};

use super::armed::{Armed, FaultStatus};
use super::rule::{Fault, FaultRule, Site};
use crate::task::Task;

/// A queue pair at a place.
#[derive(Clone, Copy)]
struct Place {
    qp: (QpType, Qpn),
    now: Duration,
    /// Key of the access, at [`Site::Access`].
    key: Option<u32>,
    /// Source of the request, at [`Site::Request`].
    source: Option<Gid>,
}

/// Rules, and the faults of the device that last.
#[derive(Debug, Default)]
struct Rules {
    armed: Vec<Armed>,
    /// Number of times that the rules were replaced.
    version: u32,
    /// Delays have ended with their rules, and the queue pairs are not scheduled yet.
    delays_ended: bool,
    /// GIDs that faults have removed.
    removed: Vec<Gid>,
    /// The GID table has changed since the last review.
    gids_changed: bool,
    /// Applies faults of the device. It belongs to the handle by which the rules are set.
    effects: Option<Arc<Task>>,
    /// Reviews the addresses of the device, and schedules its queue pairs.
    addresses: Option<Arc<Task>>,
}

/// Time at which a request begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Turn {
    pub(crate) begins: Duration,
    /// [`Rules::version`] of the rules that delay it.
    pub(crate) version: u32,
}

impl Rules {
    /// Counts that a queue pair has reached a place. Returns the first fault that happens there, with its delay, and
    /// `true` if a fault of the device has begun.
    fn count(&mut self, site: Site, place: Place) -> (Option<(Fault, Duration)>, bool) {
        let (qp_type, qpn) = place.qp;
        let (mut first, mut lasts) = (None, false);
        for armed in self.armed.iter_mut().filter(|_| !qp_type.is_datagram()) {
            let fault = armed.rule.fault;
            if fault.site() != site || !armed.is_for(qpn) {
                continue;
            }
            // Each rule counts, even if an earlier one acts.
            let Some(delay) = armed.count(place.now, place.key, place.source) else { continue };
            lasts |= armed.lasts();
            first = first.or(Some((fault, delay)));
        }
        (first, lasts)
    }
}

/// State of a device according to its rules. Default: there are none.
#[derive(Debug, Default)]
pub(super) struct Review {
    /// A fault keeps the link down.
    pub(super) link_down: bool,
    /// The device fails now.
    pub(super) fatal: bool,
    /// The GID table has changed since the last review.
    pub(super) gids_changed: bool,
    /// Time of the next change without a request.
    pub(super) next: Option<Duration>,
}

/// Faults of a device.
#[derive(Debug, Default)]
pub(crate) struct FaultPoint {
    /// There are rules.
    active: AtomicBool,
    /// The device is cut off from its network. Set at the request that causes the fault, so that the same requests are
    /// lost each time; a task then applies the rest of the fault.
    cut: AtomicBool,
    rules: Mutex<Rules>,
}

impl FaultPoint {
    /// Returns `true` if the device has rules.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Returns `true` if a fault cuts off the device.
    #[inline]
    pub(crate) fn is_cut_off(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// Returns `true` if a fault cuts off the device, or has removed this GID of it.
    #[inline]
    pub(crate) fn is_cut(&self, gid: Gid) -> bool {
        self.is_active() && (self.is_cut_off() || self.has_removed(gid))
    }

    /// Returns `true` if a fault has removed this GID of the device.
    pub(crate) fn is_removed(&self, gid: Gid) -> bool {
        self.is_active() && self.has_removed(gid)
    }

    #[cold]
    fn has_removed(&self, gid: Gid) -> bool {
        self.rules.lock().removed.contains(&gid)
    }

    /// Counts that a queue pair has reached a place. Returns the fault that happens there, that of the first rule if
    /// there are several.
    // Always inline, as `at_key`: the local path asks for each request.
    #[inline(always)]
    pub(crate) fn at(&self, site: Site, qp: (QpType, Qpn), now: impl FnOnce() -> Duration) -> Option<Fault> {
        if !self.is_active() {
            return None;
        }
        self.at_place(site, Place { qp, now: now(), key: None, source: None })
    }

    /// As [`Self::at`], for an access with this key. A revoked key stays revoked.
    #[inline(always)]
    pub(crate) fn at_key(&self, qp: (QpType, Qpn), key: u32, now: impl FnOnce() -> Duration) -> Option<Fault> {
        if !self.is_active() {
            return None;
        }
        self.at_place(Site::Access, Place { qp, now: now(), key: Some(key), source: None })
    }

    /// As [`Self::at`], for a request from this GID.
    pub(crate) fn at_request(&self, qp: (QpType, Qpn), source: Option<Gid>, now: Duration) -> Option<Fault> {
        self.at_place(Site::Request, Place { qp, now, key: None, source })
    }

    /// Returns the time at which the next request of a queue pair begins. `known` is the result of an earlier call for
    /// the request, which holds until the rules are replaced: the new ones count the request again.
    #[cold]
    pub(crate) fn turn(&self, qp: (QpType, Qpn), known: Option<Turn>, now: Duration) -> Turn {
        let rules = &mut *self.rules.lock();
        let version = rules.version;
        known.filter(|known| known.version == version).unwrap_or_else(|| {
            let (first, _) = rules.count(Site::Turn, Place { qp, now, key: None, source: None });
            Turn { begins: now.saturating_add(first.map_or(Duration::ZERO, |(_, delay)| delay)), version }
        })
    }

    /// Returns `true` if delays have ended with their rules since the last call.
    pub(crate) fn take_ended_delays(&self) -> bool {
        std::mem::take(&mut self.rules.lock().delays_ended)
    }

    /// Returns the first fault that happens at a place.
    #[cold]
    fn at_place(&self, site: Site, place: Place) -> Option<Fault> {
        let rules = &mut *self.rules.lock();
        let (first, lasts) = rules.count(site, place);
        if lasts {
            self.apply(rules);
            rules.effects.iter().for_each(Task::schedule);
        }
        first.map(|(fault, _)| fault)
    }

    /// Counts that a connection is set up.
    #[cold]
    pub(crate) fn connected(&self, (qp_type, qpn): (QpType, Qpn)) {
        if !qp_type.is_datagram() {
            self.rules.lock().armed.iter_mut().for_each(|armed| armed.connected(qpn));
        }
    }

    /// Sets the task that reviews the addresses of the device when faults remove or return them, and schedules its
    /// queue pairs when delays end with their rules.
    pub(crate) fn set_addresses(&self, task: &Arc<Task>) {
        self.rules.lock().addresses = Some(Arc::clone(task));
    }

    /// Records that the GID table has changed because of a fault.
    pub(crate) fn gids_changed(&self) {
        let rules = &mut *self.rules.lock();
        if let Some(effects) = &rules.effects {
            rules.gids_changed = true;
            effects.schedule();
        }
    }

    /// Makes the lasting faults of the device effective for its queue pairs.
    fn apply(&self, rules: &mut Rules) {
        self.cut.store(rules.armed.iter().any(Armed::cuts), Ordering::Relaxed);
        let removed: Vec<_> = rules.armed.iter().filter_map(Armed::removed).collect();
        if removed != rules.removed {
            rules.removed = removed;
            rules.addresses.iter().for_each(Task::schedule);
        }
    }

    /// Returns the rules if the handle with this task sets them. It does not if a later handle has replaced it.
    fn of_handle(&self, effects: &Arc<Task>) -> Option<MutexGuard<'_, Rules>> {
        let rules = self.rules.lock();
        rules.effects.as_ref().is_some_and(|current| Arc::ptr_eq(current, effects)).then_some(rules)
    }

    /// Returns `true` if the handle with this task sets the rules.
    pub(super) fn is_of_handle(&self, effects: &Arc<Task>) -> bool {
        self.of_handle(effects).is_some()
    }

    /// Ends faults whose time is over, and begins those whose time has come, if the handle sets the rules.
    pub(super) fn review(&self, effects: &Arc<Task>, now: Duration) -> Review {
        let Some(mut guard) = self.of_handle(effects) else { return Review::default() };
        let rules = &mut *guard;
        rules.armed.iter_mut().for_each(|armed| armed.pass(now));
        self.apply(rules);
        Review {
            link_down: rules.armed.iter().any(|armed| armed.is_lasting(Fault::LinkDown)),
            fatal: rules.armed.iter_mut().map(Armed::begin_failure).fold(false, |any, fails| any | fails),
            gids_changed: std::mem::take(&mut rules.gids_changed),
            next: rules.armed.iter().filter_map(Armed::next).min(),
        }
    }

    /// Ends the failures that the last review returned: the device has lost its objects. Rules that were set since, or
    /// have begun another failure, are not affected.
    pub(super) fn has_failed(&self, effects: &Arc<Task>, now: Duration) {
        let Some(mut rules) = self.of_handle(effects) else { return };
        rules.armed.iter_mut().for_each(|armed| armed.end_failure(now));
        self.apply(&mut rules);
    }

    /// Replaces the rules. Returns `false` if another handle sets them.
    pub(super) fn set(&self, effects: &Arc<Task>, rules: &[FaultRule], now: Duration) -> bool {
        let Some(mut known) = self.of_handle(effects) else { return false };
        self.replace(&mut known, rules, now);
        true
    }

    /// Ends all rules and the handle that set them, and makes `effects` the task of a new one.
    pub(super) fn take_over(&self, effects: &Arc<Task>, now: Duration) {
        let rules = &mut *self.rules.lock();
        self.replace(rules, &[], now);
        rules.effects = Some(Arc::clone(effects));
    }

    /// Ends a handle and its rules, unless a later one has done so.
    pub(super) fn end(&self, effects: &Arc<Task>, now: Duration) {
        let Some(mut rules) = self.of_handle(effects) else { return };
        self.replace(&mut rules, &[], now);
        (rules.effects, rules.gids_changed) = (None, false);
    }

    fn replace(&self, known: &mut Rules, rules: &[FaultRule], now: Duration) {
        known.version = known.version.wrapping_add(1);
        if known.armed.iter().any(Armed::has_delayed) {
            known.delays_ended = true;
            known.addresses.iter().for_each(Task::schedule);
        }
        known.armed = rules.iter().map(|rule| Armed::new(*rule, now)).collect();
        self.apply(known);
        self.active.store(!known.armed.is_empty(), Ordering::Relaxed);
        known.effects.iter().for_each(Task::schedule);
    }

    /// Returns the rules in force.
    pub(super) fn status(&self) -> Vec<FaultStatus> {
        self.rules.lock().armed.iter().map(Armed::status).collect()
    }
}
