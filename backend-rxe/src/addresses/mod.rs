//! Ownership of addresses in a network.
//!
//! [`table`] holds the rules as a value on virtual time. This module adds a lock and a clock, and schedules the tasks
//! that must act: the task of a device whose claim has ended, those of devices that wait for an address, and those of
//! ports that must send a probe.
//!
//! All state is bounded. A device holds at most 256 unbound addresses besides its bound ones, and probes for at most 32
//! at a time. At most 4096 addresses of remote hosts are remembered.

mod address;
pub(crate) mod probe;
mod remote;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use pvrdma_link::Clock;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::AddressRule;
use pvrdma_verbs_types::Gid;

use crate::task::Task;
pub(crate) use address::Address;
use table::{Claim, Table};
pub(crate) use table::{Claimed, Conflict, HOLD, Refused, Wait, Why};

/// Observer of the conflicts of a device.
pub(crate) type Observer = Box<dyn Fn(&Conflict) + Send + Sync>;

/// The tasks of a device.
#[derive(Debug, Default)]
struct Tasks {
    /// Binds GIDs that are waiting.
    bindings: Weak<Task>,
    /// Set while some GIDs are waiting.
    waits: bool,
    /// Sends probes to hosts beyond the uplink.
    prober: Weak<Task>,
}

/// The addresses of a network.
pub(crate) struct Addresses {
    clock: Arc<dyn Clock>,
    table: Mutex<Table>,
    tasks: Mutex<HashMap<MacAddr, Tasks>>,
    observers: RwLock<HashMap<MacAddr, Arc<Observer>>>,
}

impl fmt::Debug for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Addresses").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Addresses {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, table: Mutex::default(), tasks: Mutex::default(), observers: RwLock::default() }
    }

    /// Returns the time on the clock of the network.
    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Registers `observer` for conflicts of a device, in place of an earlier one.
    pub(crate) fn observe(&self, mac: MacAddr, observer: impl Fn(&Conflict) + Send + Sync + 'static) -> Arc<Observer> {
        let observer = Arc::new(Box::new(observer) as Observer);
        self.observers.write().insert(mac, Arc::clone(&observer));
        observer
    }

    /// Removes the observer of a device, unless a later one has replaced it.
    pub(crate) fn stop_observing(&self, mac: MacAddr, observer: &Arc<Observer>) {
        self.observers.write().retain(|of, current| *of != mac || !Arc::ptr_eq(current, observer));
    }

    /// Records that a port or an adapter of a device joins the network.
    pub(crate) fn join(&self, mac: MacAddr, rule: &AddressRule) {
        self.table.lock().join(mac, rule);
    }

    /// Records that a port or an adapter of a device leaves the network. The device keeps its addresses for a while.
    pub(crate) fn leave(&self, mac: MacAddr) {
        self.table.lock().leave(mac);
        self.wake(None);
    }

    /// Sets the task that binds waiting GIDs of a device.
    pub(crate) fn set_bindings(&self, mac: MacAddr, task: &Arc<Task>) {
        self.tasks.lock().entry(mac).or_default().bindings = Arc::downgrade(task);
    }

    /// Records that a device waits for addresses of others, or no longer does. Returns `true` if it has just begun to
    /// wait.
    pub(crate) fn set_waits(&self, mac: MacAddr, waits: bool) -> bool {
        let mut tasks = self.tasks.lock();
        let before = std::mem::replace(&mut tasks.entry(mac).or_default().waits, waits);
        waits && !before
    }

    /// Sets the task that probes for addresses that a device claims. Without a task the device claims addresses
    /// unprobed.
    pub(crate) fn set_prober(&self, mac: MacAddr, task: Option<&Arc<Task>>) {
        self.tasks.lock().entry(mac).or_default().prober = task.map(Arc::downgrade).unwrap_or_default();
        self.table.lock().set_probes(mac, task.is_some());
    }

    /// Records that the link of a device goes up or down.
    pub(crate) fn set_link(&self, mac: MacAddr, up: bool) {
        self.table.lock().set_link(mac, up);
        self.wake(Some(mac));
    }

    /// Claims an address that a device binds.
    ///
    /// # Errors
    /// The rules never give the device this address.
    pub(crate) fn bind(&self, mac: MacAddr, address: Address) -> Result<Claimed, Refused> {
        self.claim(mac, address, Claim::Bind)
    }

    /// Claims an address that a restored device had bound before.
    ///
    /// # Errors
    /// As for [`Self::bind`].
    pub(crate) fn restore(&self, mac: MacAddr, address: Address) -> Result<Claimed, Refused> {
        self.claim(mac, address, Claim::Restore)
    }

    /// Claims an address that the network function of a device announces from the Ethernet address `station`.
    ///
    /// # Errors
    /// The rules never give the device this address.
    pub(crate) fn announce(&self, mac: MacAddr, address: Address, station: MacAddr) -> Result<Claimed, Refused> {
        self.claim(mac, address, Claim::Announce(station))
    }

    /// Returns `true` if a device may probe for an address, in any VLAN: it is not reserved for other devices, which
    /// would give it up because of the probe.
    pub(crate) fn may_probe(&self, mac: MacAddr, gid: Gid) -> bool {
        self.table.lock().may_probe(mac, gid)
    }

    fn claim(&self, mac: MacAddr, address: Address, claim: Claim) -> Result<Claimed, Refused> {
        let now = self.clock.now();
        let claimed = self.table.lock().claim(mac, address, claim, now)?;
        if matches!(claimed, Claimed::Waiting(Wait { why: Why::Probing, .. })) {
            let prober = self.tasks.lock().get(&mac).and_then(|tasks| tasks.prober.upgrade());
            if let Some(prober) = prober {
                prober.schedule();
            }
        }
        Ok(claimed)
    }

    /// Records that a device no longer binds an address.
    pub(crate) fn unbind(&self, mac: MacAddr, address: Address) {
        let now = self.clock.now();
        let is_free = self.table.lock().unbind(mac, address, now);
        if is_free {
            self.wake(None);
        }
    }

    /// Releases an address of a device, so that others can have it immediately.
    pub(crate) fn give_back(&self, mac: MacAddr, address: Address) {
        self.table.lock().give_back(mac, address);
        self.wake(None);
    }

    /// Records that a packet from IP address `address` and Ethernet address `source` arrived over the uplink.
    pub(crate) fn seen(&self, address: Address, source: MacAddr) {
        let now = self.clock.now();
        let (affected, conflict) = self.table.lock().seen(address, source, now);
        if affected.is_some() {
            self.wake(affected);
        }
        self.report(conflict);
    }

    /// Records that a host beyond the uplink announces an address of a device from the device's own MAC address, as
    /// another machine with its state does.
    pub(crate) fn twin(&self, mac: MacAddr, address: Address) {
        let now = self.clock.now();
        let conflict = self.table.lock().twin(mac, address, now);
        self.report(conflict);
    }

    fn report(&self, conflict: Option<Conflict>) {
        if let Some(conflict) = conflict
            && let Some(observer) = self.observers.read().get(&conflict.mac)
        {
            observer(&conflict);
        }
    }

    /// Returns the addresses that a device has to probe for now, and the time of the next call.
    pub(crate) fn due_probes(&self, mac: MacAddr) -> (Vec<Address>, Option<Duration>) {
        let now = self.clock.now();
        self.table.lock().due_probes(mac, now)
    }

    /// Returns `true` if a device has bound an address and still owns it.
    pub(crate) fn has_bound(&self, mac: MacAddr, address: Address) -> bool {
        self.table.lock().has_bound(mac, address)
    }

    /// Returns the number of conflicts of a device with hosts beyond the uplink.
    pub(crate) fn conflicts(&self, mac: MacAddr) -> u64 {
        self.table.lock().conflicts(mac)
    }

    /// Returns the number of messages of other machines with the MAC address and an address of a device.
    pub(crate) fn twins(&self, mac: MacAddr) -> u64 {
        self.table.lock().twins(mac)
    }

    /// Schedules the tasks of all devices that wait, and of the device whose claims have changed.
    fn wake(&self, changed: Option<MacAddr>) {
        let tasks = self.tasks.lock();
        let concerned = tasks.iter().filter(|(mac, tasks)| tasks.waits || changed == Some(**mac));
        let concerned: Vec<_> = concerned.filter_map(|(_, tasks)| tasks.bindings.upgrade()).collect();
        drop(tasks);
        concerned.iter().for_each(Task::schedule);
    }
}
