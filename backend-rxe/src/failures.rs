//! Observers of failed queue pairs.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use pvrdma_verbs::{Gid, MacAddr, Qpn};

/// A queue pair that has entered its error state, for a reason other than a command of its guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QpFailure {
    /// Number of the queue pair.
    pub qpn: Qpn,
    /// Address of its peer, if it is connected.
    pub peer: Gid,
    /// Cause and preceding events, as text.
    pub history: String,
}

type Observer = Box<dyn Fn(&QpFailure) + Send + Sync>;

/// Observer of a device, if there is one.
#[derive(Default)]
pub(crate) struct FailureObserver(RwLock<Option<Observer>>);

impl fmt::Debug for FailureObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureObserver").finish_non_exhaustive()
    }
}

impl FailureObserver {
    pub(crate) fn tell(&self, failure: &QpFailure) {
        if let Some(observer) = &*self.0.read() {
            observer(failure);
        }
    }
}

/// Observers of devices, by MAC address.
#[derive(Debug, Default)]
pub(crate) struct FailureObservers(Mutex<HashMap<MacAddr, Weak<FailureObserver>>>);

impl FailureObservers {
    /// Returns the observer of a device.
    pub(crate) fn of(&self, mac: MacAddr) -> Arc<FailureObserver> {
        let mut observers = self.0.lock();
        if let Some(observer) = observers.get(&mac).and_then(Weak::upgrade) {
            return observer;
        }
        observers.retain(|_, observer| observer.strong_count() > 0);
        let observer = Arc::default();
        observers.insert(mac, Arc::downgrade(&observer));
        observer
    }
}

/// Handle for an observer, which is removed on drop.
#[derive(Debug)]
pub struct ObservedFailures(Arc<FailureObserver>);

impl ObservedFailures {
    pub(crate) fn new(of: Arc<FailureObserver>, observer: Observer) -> Self {
        *of.0.write() = Some(observer);
        Self(of)
    }
}

impl Drop for ObservedFailures {
    fn drop(&mut self) {
        self.0.0.write().take();
    }
}
