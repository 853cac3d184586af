//! The GIDs that a guest has bound, and their state: usable, or waiting for the address.
//!
//! A guest's driver binds a GID once and does not retry. If the address belongs to another device or host, the bind
//! therefore succeeds, but the GID waits, and the claim is repeated whenever the owner may have changed.
//! `docs/dev/addresses.md` lists the rules. Until the device owns the address, no packets are sent from the GID or
//! received for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::{EndOnPanic, Snapshot};
use pvrdma_packet::MacAddr;
use pvrdma_verbs::VerbsError;
use serde::Serialize;

use crate::adapter::Adapter;
use crate::addresses::{Address, Addresses, Claimed, HOLD, Refused, Wait, Why};
use crate::budget::Budget;
use crate::counters::Counters;
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::{Directory, Node, address};
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// Delay before a claim that lost a race is repeated: the former owner has not removed the address from its table yet.
const AGAIN: Duration = Duration::from_millis(10);

/// A GID that a guest has bound at an index.
#[derive(Clone, Copy, Debug)]
struct Binding {
    bound: BoundGid,
    /// Reason why the GID cannot be used yet, if it cannot.
    wait: Option<Wait>,
    /// A fault has removed the GID, and the guest has not had it since.
    removed: bool,
    /// The guest's wait for another device or host has been logged.
    told: bool,
    /// The claim is not repeated earlier: it waited in another process, where the owner of the address may be restored
    /// later than this device.
    not_before: Option<Duration>,
}

/// Indices of GIDs whose addresses the device did not own in the process in which it was saved.
#[derive(Debug, Default)]
struct Expected {
    /// Another device or host had it.
    taken: BTreeSet<u8>,
    /// It was not known if another host had it.
    unasked: BTreeSet<u8>,
}

#[derive(Debug)]
struct State {
    /// The device, until it ends. Nothing else may own it for long: the port accepts packets for the device while any
    /// reference to it exists, and those that it accepts after the device has ended are lost.
    node: Option<Arc<Node<Endpoint>>>,
    bindings: BTreeMap<u8, Binding>,
    /// Time since which the link is down, if it is.
    down: Option<Duration>,
    timer: Option<TimerKey>,
    /// GIDs of a restored device that were not usable.
    expected: Expected,
}

/// A GID that is bound and cannot be used yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct WaitingGid {
    /// Index in the table.
    index: u8,
    #[serde(flatten)]
    bound: BoundGid,
    /// Reason why it waits.
    why: Why,
}

impl Binding {
    /// Records whether a fault has removed the GID. Returns `true` if the fault has just taken the GID from the table,
    /// or if the GID is back. It returns when the device gets the address again, which may be long after the fault.
    fn note_removal(&mut self) -> bool {
        let removed = match self.wait {
            Some(Wait { why: Why::Removed, .. }) => true,
            Some(_) => self.removed,
            None => false,
        };
        std::mem::replace(&mut self.removed, removed) != removed
    }
}

/// The GIDs that the guest of a device has bound.
#[derive(Debug)]
pub(crate) struct Bindings {
    adapter: Arc<Adapter>,
    directory: Arc<Directory<Endpoint>>,
    addresses: Arc<Addresses>,
    state: Mutex<State>,
    /// Reviews all bindings.
    task: Arc<Task>,
}

impl Bindings {
    pub(crate) fn new(
        node: &Arc<Node<Endpoint>>,
        directory: &Arc<Directory<Endpoint>>,
        addresses: &Arc<Addresses>,
    ) -> Arc<Self> {
        let (bindings, expected) = (BTreeMap::new(), Expected::default());
        let state = State { node: Some(Arc::clone(node)), bindings, down: None, timer: None, expected };
        let bindings = Arc::new_cyclic(|me: &Weak<Self>| Self {
            adapter: Arc::clone(&node.adapter),
            directory: Arc::clone(directory),
            addresses: Arc::clone(addresses),
            state: Mutex::new(state),
            task: Task::new(node.adapter.engine.ready_queue(), &node.adapter.share, me.clone() as _),
        });
        addresses.set_bindings(node.adapter.point.mac, &bindings.task);
        node.adapter.faults.set_addresses(&bindings.task);
        bindings
    }

    /// Binds a GID at an index and replaces the one that is bound there.
    ///
    /// # Errors
    /// The rules never give the device this address.
    pub(crate) fn bind(&self, index: u8, new: BoundGid) -> Result<(), VerbsError> {
        self.bind_claimed(index, new, Addresses::bind, None)
    }

    /// Binds a GID that a restored device had bound before.
    ///
    /// # Errors
    /// The rules never give the device this address.
    pub(crate) fn restore(&self, index: u8, new: BoundGid) -> Result<(), VerbsError> {
        let (taken, unasked) = {
            let expected = &mut self.state.lock().expected;
            (expected.taken.remove(&index), expected.unasked.remove(&index))
        };
        match (taken, unasked) {
            (true, _) => {
                // Another device or host had the address a moment ago. As its last owner, it keeps it for a minute.
                let later = Some(self.addresses.now().saturating_add(HOLD));
                let wait = Claimed::Waiting(Wait { why: Why::Taken, until: later });
                self.bind_claimed(index, new, |_, _, _| Ok(wait), later)
            }
            (false, true) => self.bind_claimed(index, new, Addresses::bind, None),
            (false, false) => self.bind_claimed(index, new, Addresses::restore, None),
        }
    }

    /// Returns the indices of the GIDs that wait for another device or host, and of those for which hosts are to be
    /// asked.
    pub(crate) fn save(&self) -> (Vec<u32>, Vec<u32>) {
        let state = self.state.lock();
        let waiting = |reasons: &[Why]| -> Vec<u32> {
            let waits = |binding: &Binding| binding.wait.is_some_and(|wait| reasons.contains(&wait.why));
            let indices = state.bindings.iter().filter(|(_, binding)| waits(binding));
            indices.map(|(&index, _)| u32::from(index)).collect()
        };
        (waiting(&[Why::Taken, Why::Remote]), waiting(&[Why::Probing, Why::Busy, Why::LinkDown]))
    }

    /// Records the indices that [`Self::save`] has returned, for a device that is being restored.
    ///
    /// # Errors
    /// An index is not one of a GID.
    pub(crate) fn expect(&self, taken: &[u32], unasked: &[u32]) -> Result<(), VerbsError> {
        let indices = |list: &[u32]| {
            let indices = list.iter().map(|&index| u8::try_from(index).map_err(|_| VerbsError::Invalid("GID index")));
            indices.collect::<Result<BTreeSet<_>, _>>()
        };
        self.state.lock().expected = Expected { taken: indices(taken)?, unasked: indices(unasked)? };
        Ok(())
    }

    fn bind_claimed(
        &self,
        index: u8,
        new: BoundGid,
        claim: impl FnOnce(&Addresses, MacAddr, Address) -> Result<Claimed, Refused>,
        not_before: Option<Duration>,
    ) -> Result<(), VerbsError> {
        let state = &mut *self.state.lock();
        let old = state.bindings.get(&index).copied();
        if old.is_some_and(|old| old.bound == new) {
            return Ok(());
        }
        let wait = self.claim(new, claim).inspect_err(|error| self.refused(new, error))?;
        let node = state.node.as_ref().ok_or(VerbsError::Gone)?;
        let wait = self.place(node, index, new, wait);
        let told = wait.is_some_and(|wait| self.waits(new, wait));
        let mut binding = Binding { bound: new, wait, removed: false, told, not_before };
        binding.note_removal();
        state.bindings.insert(index, binding);
        if let Some(old) = old {
            self.let_go(old);
        }
        self.arm(state);
        Ok(())
    }

    /// Unbinds the GID at an index.
    pub(crate) fn unbind(&self, index: u8) {
        let state = &mut *self.state.lock();
        let Some(old) = state.bindings.remove(&index) else { return };
        if let Some(node) = &state.node {
            // As in `suspend`, this cannot fail.
            let _ = self.directory.set_gid(node, index, None);
        }
        self.adapter.gids.stop_waiting(index);
        self.let_go(old);
        self.arm(state);
    }

    /// Ends the bindings of a device: unbinds all GIDs and drops the reference to the device.
    pub(crate) fn end(&self) {
        let indices: Vec<u8> = self.state.lock().bindings.keys().copied().collect();
        indices.into_iter().for_each(|index| self.unbind(index));
        self.state.lock().node = None;
    }

    /// Records that the link goes up or down.
    pub(crate) fn set_link(&self, up: bool) {
        self.state.lock().down = (!up).then(|| self.addresses.now());
        self.addresses.set_link(self.adapter.point.mac, up);
        self.task.schedule();
    }

    /// Returns the GIDs that wait.
    pub(crate) fn inspect(&self) -> Snapshot<Vec<WaitingGid>> {
        let waiting = |(index, binding): (&u8, &Binding)| {
            let Wait { why, .. } = binding.wait?;
            Some(WaitingGid { index: *index, bound: binding.bound, why })
        };
        self.state.try_lock().map(|state| state.bindings.iter().filter_map(waiting).collect()).into()
    }

    fn claim(
        &self,
        bound: BoundGid,
        claim: impl FnOnce(&Addresses, MacAddr, Address) -> Result<Claimed, Refused>,
    ) -> Result<Option<Wait>, VerbsError> {
        if self.adapter.faults.is_removed(bound.gid) {
            // The end of the fault schedules the task.
            return Ok(Some(Wait { why: Why::Removed, until: None }));
        }
        match claim(&self.addresses, self.adapter.point.mac, address(bound))? {
            Claimed::Granted => Ok(None),
            Claimed::Waiting(wait) => Ok(Some(wait)),
        }
    }

    /// Makes a GID usable, or suspends it if its claim waits. Returns the reason why it cannot be used.
    fn place(&self, node: &Arc<Node<Endpoint>>, index: u8, bound: BoundGid, wait: Option<Wait>) -> Option<Wait> {
        let wait = wait.or_else(|| {
            // Another device has just lost the address, and its task has not yet removed the GID from the directory.
            self.directory.set_gid(node, index, Some(bound)).err()?;
            self.addresses.unbind(self.adapter.point.mac, address(bound));
            Some(Wait { why: Why::Taken, until: Some(self.addresses.now().saturating_add(AGAIN)) })
        });
        match wait {
            Some(Wait { why, .. }) => self.suspend(node, index, bound, why == Why::Probing),
            None => self.adapter.gids.stop_waiting(index),
        }
        wait
    }

    /// Stops sending from a GID and receiving for it, but keeps it bound. With `holds`, packets from it wait instead of
    /// being dropped.
    fn suspend(&self, node: &Arc<Node<Endpoint>>, index: u8, bound: BoundGid, holds: bool) {
        // The GID is marked as waiting before it is removed from the directory, so that a sender never finds the index
        // unbound.
        self.adapter.gids.wait(index, bound, holds);
        // This cannot fail: every u8 is a valid index, and removing a GID conflicts with no other binding.
        let _ = self.directory.set_gid(node, index, None);
    }

    fn let_go(&self, old: Binding) {
        if old.wait.is_none() {
            self.addresses.unbind(self.adapter.point.mac, address(old.bound));
        }
    }

    fn refused(&self, bound: BoundGid, error: &VerbsError) {
        let adapter = &self.adapter;
        Counters::bump(&adapter.counters.gids_refused);
        adapter.log.warn(module_path!(), format_args!("the guest may not bind {}: {error}", bound.gid));
    }

    /// Logs that the guest has to wait, except for reasons with which every claim begins. Returns `true` if it was
    /// logged.
    fn waits(&self, bound: BoundGid, wait: Wait) -> bool {
        let adapter = &self.adapter;
        let reason = match wait.why {
            Why::Probing | Why::Busy => return false,
            Why::Taken => "another device has it, or had it a minute ago",
            Why::Remote => "a host beyond the uplink has it",
            Why::LinkDown => "the link is down",
            Why::Removed => "a fault on request has removed it",
            Why::NoHost => "it is not the address of a single host",
        };
        Counters::bump(&adapter.counters.gids_waited);
        adapter
            .log
            .warn(module_path!(), format_args!("the guest may not use {} yet: {reason}; it is tried again", bound.gid));
        true
    }

    /// Reviews all bindings: suspends GIDs whose address now belongs to others, and repeats claims that wait.
    fn review(&self, state: &mut State) {
        let (mac, now) = (self.adapter.point.mac, self.addresses.now());
        let is_given_up = state.down.is_some_and(|since| now.saturating_sub(since) >= HOLD);
        let Some(node) = &state.node else { return };
        let (mut any, mut gids_changed) = (self.adapter.faults.take_ended_delays(), false);
        for (&index, binding) in &mut state.bindings {
            let at = address(binding.bound);
            match binding.wait {
                None if is_given_up => {
                    self.suspend(node, index, binding.bound, false);
                    self.addresses.give_back(mac, at);
                    binding.wait = Some(Wait { why: Why::LinkDown, until: None });
                }
                None if self.adapter.faults.is_removed(binding.bound.gid) => {
                    // Another device may claim the address as soon as it is given back.
                    self.suspend(node, index, binding.bound, false);
                    self.addresses.give_back(mac, at);
                    self.again(node, index, binding);
                }
                None if self.addresses.has_bound(mac, at) => {}
                // Another device or host has ended the claim.
                None => {
                    self.suspend(node, index, binding.bound, false);
                    self.again(node, index, binding);
                }
                // While the link is down, the address would immediately be given up again.
                Some(_) if state.down.is_some() || binding.not_before.is_some_and(|time| time > now) => {}
                Some(before) => {
                    self.again(node, index, binding);
                    any |= binding.wait.is_none_or(|wait| before.why == Why::Probing && wait.why != before.why);
                }
            }
            gids_changed |= binding.note_removal();
        }
        if any {
            // Queue pairs that held packets for the address send them now, or drop them. Those that a fault delayed
            // continue.
            node.qps().iter().for_each(|endpoint| endpoint.qp().task().schedule());
        }
        if gids_changed {
            self.adapter.faults.gids_changed();
        }
    }

    /// Repeats the claim of an address.
    fn again(&self, node: &Arc<Node<Endpoint>>, index: u8, binding: &mut Binding) {
        let (bound, before) = (binding.bound, binding.wait);
        let later = Some(Wait { why: Why::Taken, until: Some(self.addresses.now().saturating_add(HOLD)) });
        let wait = self.claim(bound, Addresses::bind).inspect_err(|error| self.refused(bound, error)).unwrap_or(later);
        binding.wait = self.place(node, index, bound, wait);
        match binding.wait {
            Some(wait) if before.is_none_or(|before| before.why != wait.why) => {
                binding.told |= self.waits(bound, wait);
            }
            None if std::mem::take(&mut binding.told) => {
                let adapter = &self.adapter;
                Counters::bump(&adapter.counters.gids_granted);
                adapter.log.info(module_path!(), format_args!("the guest may use {} now", bound.gid));
            }
            _ => {}
        }
    }

    /// Arms the timer for the next time at which repeating a claim may have another result.
    fn arm(&self, state: &mut State) {
        let held = || state.bindings.values().any(|binding| binding.wait.is_none());
        let given_up = state.down.filter(|_| held()).map(|since| since.saturating_add(HOLD));
        let waits = state.bindings.values().filter_map(|binding| binding.wait?.until);
        let waits = waits.filter(|_| state.down.is_none()).chain(given_up).min();
        if self.addresses.set_waits(self.adapter.point.mac, state.bindings.values().any(|it| it.wait.is_some())) {
            // An address may have become free after the claim failed and before this device was recorded as waiting.
            // Its release then woke no task, so the claims are checked once more.
            self.task.schedule();
        }
        self.adapter.engine.set_timer(&self.task, waits, &mut state.timer);
    }
}

impl Runnable for Bindings {
    fn run(&self, _: &mut Budget) -> bool {
        let _guard = EndOnPanic::new("the addresses of a device");
        let state = &mut *self.state.lock();
        self.review(state);
        self.arm(state);
        false
    }
}

impl Drop for Bindings {
    fn drop(&mut self) {
        self.adapter.engine.set_timer(&self.task, None, &mut self.state.get_mut().timer);
    }
}
