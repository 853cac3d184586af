//! Memory regions that work requests fill and invalidate.

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::check;

/// No key is valid.
const INVALID: u64 = 0;

/// A region (`backend-rxe/src/mr/mod.rs`).
struct Region {
    /// The key that is valid.
    valid: AtomicU64,
    filled: Mutex<Option<u64>>,
}

impl Region {
    fn register(&self, key: u64) -> bool {
        let mut filled = self.filled.lock().unwrap();
        if filled.is_some() {
            return false;
        }
        *filled = Some(key);
        self.valid.store(key, Ordering::Release);
        true
    }

    /// `one_step`: the validity of the key is checked and changed in a single step.
    fn invalidate(&self, key: u64, one_step: bool) -> bool {
        let was_valid = if one_step {
            self.valid.compare_exchange(key, INVALID, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        } else {
            self.valid.load(Ordering::Relaxed) == key && self.valid.swap(INVALID, Ordering::AcqRel) != INVALID
        };
        was_valid && self.filled.lock().unwrap().take().is_some()
    }
}

/// Two threads invalidate the same key, and one of them registers memory with the next key. Exactly one invalidates,
/// and the registration stays.
fn regions_of(one_step: bool) {
    let region = Arc::new(Region { valid: AtomicU64::new(1), filled: Mutex::new(Some(1)) });
    let other = Arc::clone(&region);
    let other = thread::spawn(move || other.invalidate(1, one_step));
    let first = region.invalidate(1, one_step);
    let registered = region.register(2);
    let second = other.join().unwrap();
    assert!(first || second);
    assert!(!(first && second), "an invalidation takes a later registration");
    let filled = *region.filled.lock().unwrap();
    // A thread that arrives while the other one is changing the region is refused.
    assert_eq!(filled, registered.then_some(2), "an invalidation takes a later registration");
}

fn regions() {
    regions_of(true);
}

protocol!(regions,);

#[test]
#[should_panic(expected = "takes a later registration")]
fn an_invalidation_in_two_steps_takes_a_later_registration() {
    check(|| regions_of(false));
}
