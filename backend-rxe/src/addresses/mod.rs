//! Who may have which address in a network.
//!
//! [`table`] has the rules, as a value on virtual time; this gives them a lock and a clock, and wakes the tasks that
//! have to act: a device whose claim has ended, devices that wait for an address, and ports that have to ask for one.
//!
//! All of it is bounded: a device holds at most 256 addresses that it has bound and as many that it has not, asks for
//! 32 at a time, and 4096 addresses of other hosts are remembered.

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
use pvrdma_verbs::{AddressRule, MacAddr};

use crate::task::Task;
pub(crate) use table::{Address, Claimed, Conflict, HOLD, Refused, Wait, Why};
use table::{Claim, Table};

type Observer = Box<dyn Fn(&Conflict) + Send + Sync>;

/// The tasks of a device.
#[derive(Debug, Default)]
struct Tasks {
    /// Binds GIDs that wait.
    bindings: Weak<Task>,
    /// There are such.
    waits: bool,
    /// Asks hosts beyond the uplink.
    prober: Weak<Task>,
}

/// The addresses of a network.
pub(crate) struct Addresses {
    clock: Arc<dyn Clock>,
    table: Mutex<Table>,
    tasks: Mutex<HashMap<MacAddr, Tasks>>,
    observers: RwLock<HashMap<MacAddr, Observer>>,
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

    /// The time, on the clock of the network.
    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Tells `observer` of conflicts of a device from now on.
    pub(crate) fn observe(&self, mac: MacAddr, observer: impl Fn(&Conflict) + Send + Sync + 'static) {
        self.observers.write().insert(mac, Box::new(observer));
    }

    /// Tells nobody any more.
    pub(crate) fn stop_observing(&self, mac: MacAddr) {
        self.observers.write().remove(&mac);
    }

    /// A port or an adapter of a device joins the network.
    pub(crate) fn join(&self, mac: MacAddr, rule: &AddressRule) {
        self.table.lock().join(mac, rule);
    }

    /// A port or an adapter of a device leaves the network. What the device had stays its own for a while.
    pub(crate) fn leave(&self, mac: MacAddr) {
        self.table.lock().leave(mac);
        self.wake(None);
    }

    /// `task` binds GIDs of the device that wait.
    pub(crate) fn set_bindings(&self, mac: MacAddr, task: &Arc<Task>) {
        self.tasks.lock().entry(mac).or_default().bindings = Arc::downgrade(task);
    }

    /// The device waits for addresses of others, or does not. Returns `true` if it did not before.
    pub(crate) fn set_waits(&self, mac: MacAddr, waits: bool) -> bool {
        let mut tasks = self.tasks.lock();
        let before = std::mem::replace(&mut tasks.entry(mac).or_default().waits, waits);
        waits && !before
    }

    /// `task` asks for addresses that the device claims. Without one the device needs nobody's answer.
    pub(crate) fn set_prober(&self, mac: MacAddr, task: Option<&Arc<Task>>) {
        self.tasks.lock().entry(mac).or_default().prober = task.map(Arc::downgrade).unwrap_or_default();
        self.table.lock().set_probes(mac, task.is_some());
    }

    /// The link of a device goes up or down.
    pub(crate) fn set_link(&self, mac: MacAddr, up: bool) {
        self.table.lock().set_link(mac, up);
        self.wake(Some(mac));
    }

    /// A device binds an address.
    ///
    /// # Errors
    /// It never gets it.
    pub(crate) fn bind(&self, mac: MacAddr, address: Address) -> Result<Claimed, Refused> {
        self.claim(mac, address, Claim::Bind)
    }

    /// The network function of a device says that it has an address, from this Ethernet address.
    ///
    /// # Errors
    /// It never gets it.
    pub(crate) fn announce(&self, mac: MacAddr, address: Address, station: MacAddr) -> Result<Claimed, Refused> {
        self.claim(mac, address, Claim::Announce(station))
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

    /// A device no longer binds an address.
    pub(crate) fn unbind(&self, mac: MacAddr, address: Address) {
        let now = self.clock.now();
        let is_free = self.table.lock().unbind(mac, address, now);
        if is_free {
            self.wake(None);
        }
    }

    /// A device gives an address back, and others may have it at once.
    pub(crate) fn give_back(&self, mac: MacAddr, address: Address) {
        self.table.lock().give_back(mac, address);
        self.wake(None);
    }

    /// A packet from an Ethernet address came from an address over the uplink.
    pub(crate) fn seen(&self, address: Address, source: MacAddr) {
        let now = self.clock.now();
        let (affected, conflict) = self.table.lock().seen(address, source, now);
        if affected.is_some() {
            self.wake(affected);
        }
        if let Some(conflict) = conflict
            && let Some(observer) = self.observers.read().get(&conflict.mac)
        {
            observer(&conflict);
        }
    }

    /// Addresses that a device is to ask for now, and when it is to look again.
    pub(crate) fn due_probes(&self, mac: MacAddr) -> (Vec<Address>, Option<Duration>) {
        let now = self.clock.now();
        self.table.lock().due_probes(mac, now)
    }

    /// Returns `true` if a device has bound an address, and still has it.
    pub(crate) fn has_bound(&self, mac: MacAddr, address: Address) -> bool {
        self.table.lock().has_bound(mac, address)
    }

    /// Conflicts of a device with hosts beyond the uplink.
    pub(crate) fn conflicts(&self, mac: MacAddr) -> u64 {
        self.table.lock().conflicts(mac)
    }

    /// Devices that wait look at their claims again, and the one whose claims have changed.
    fn wake(&self, changed: Option<MacAddr>) {
        let tasks = self.tasks.lock();
        let concerned = tasks.iter().filter(|(mac, tasks)| tasks.waits || changed == Some(**mac));
        let concerned: Vec<_> = concerned.filter_map(|(_, tasks)| tasks.bindings.upgrade()).collect();
        drop(tasks);
        concerned.iter().for_each(Task::schedule);
    }
}
