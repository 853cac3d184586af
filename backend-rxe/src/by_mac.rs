//! Values by MAC address.

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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_while_it_is_in_use() {
        let (values, [one, other]) = (ByMac::default(), [1, 2].map(pvrdma_verbs::testing::mac));
        let found = values.of_or(one, || 7);
        assert!(Arc::ptr_eq(&found, &values.of_or(one, || 8)));
        drop(values.of_or(other, || 9));
        drop(found);
        assert_eq!(*values.of_or(one, || 10), 10);
        assert_eq!(values.0.lock().len(), 1, "an unused value is removed");
    }
}
