//! Directories of objects, by the key that the host uses for them.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

/// Objects of one type, by the key that the host uses in completions and events: a number, or the address of the host's
/// object. An entry does not keep its object alive.
pub(crate) struct Directory<K, T>(RwLock<HashMap<K, Weak<T>>>);

impl<K, T> Default for Directory<K, T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K, T> fmt::Debug for Directory<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} objects", self.0.read().len())
    }
}

impl<K: Copy + Eq + Hash, T> Directory<K, T> {
    /// Adds an object. It replaces an earlier object with the same key, which is gone, because the host reuses keys.
    pub(crate) fn insert(&self, key: K, object: &Arc<T>) {
        self.0.write().insert(key, Arc::downgrade(object));
    }

    pub(crate) fn remove(&self, key: K) {
        self.0.write().remove(&key);
    }

    /// Returns the object for a key, or `None` if there is none or it is being dropped.
    pub(crate) fn get(&self, key: K) -> Option<Arc<T>> {
        self.0.read().get(&key)?.upgrade()
    }

    /// Returns all objects that are alive. The directory is not locked while the caller uses them.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.0.read().values().filter_map(Weak::upgrade).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_do_not_keep_objects_alive_and_names_are_given_again() {
        let directory = Directory::default();
        let first = Arc::new("first");
        directory.insert(7_u32, &first);
        assert_eq!((directory.get(7).as_deref(), directory.get(8)), (Some(&"first"), None));
        drop(first);
        assert_eq!((directory.get(7), directory.all().len()), (None, 0));
        let second = Arc::new("second");
        directory.insert(7, &second);
        assert_eq!(directory.all(), [Arc::clone(&second)]);
        directory.remove(7);
        assert_eq!(directory.get(7), None);
    }
}
