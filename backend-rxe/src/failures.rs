//! Who is told of queue pairs that fail.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use pvrdma_verbs::{Gid, MacAddr, Qpn};

/// A queue pair that has gone to its error state, not by its guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QpFailure {
    /// Which.
    pub qpn: Qpn,
    /// Its peer, if it is connected.
    pub peer: Gid,
    /// Who ended it and what happened before, in words.
    pub history: String,
}

type Observer = Box<dyn Fn(&QpFailure) + Send + Sync>;

/// Who is told, if anybody.
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

/// Those of devices, by address.
#[derive(Debug, Default)]
pub(crate) struct FailureObservers(Mutex<HashMap<MacAddr, Weak<FailureObserver>>>);

impl FailureObservers {
    /// That of a device.
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

/// Somebody who is told, until this is dropped.
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
