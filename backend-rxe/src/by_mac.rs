//! State of devices by MAC address, which a restart of a device's driver does not end.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;

/// Values of devices, by MAC address. A value lasts as long as it is in use.
#[derive(Debug)]
pub(crate) struct ByMac<T>(Mutex<HashMap<MacAddr, Weak<T>>>);

impl<T> Default for ByMac<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> ByMac<T> {
    /// Returns the value of a device, or a new one if none is in use.
    pub(crate) fn of_or(&self, mac: MacAddr, new: impl FnOnce() -> T) -> Arc<T> {
        let mut values = self.0.lock();
        if let Some(value) = values.get(&mac).and_then(Weak::upgrade) {
            return value;
        }
        values.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(new());
        values.insert(mac, Arc::downgrade(&value));
        value
    }

    /// Returns the number of values, including those that are not in use any more.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Sets the value of a device.
    pub(crate) fn set(&self, mac: MacAddr, value: &Arc<T>) {
        self.0.lock().insert(mac, Arc::downgrade(value));
    }
}

impl<T: Default> ByMac<T> {
    /// Returns the value of a device, or a default one if none is in use.
    pub(crate) fn of(&self, mac: MacAddr) -> Arc<T> {
        self.of_or(mac, T::default)
    }
}
