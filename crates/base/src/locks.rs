//! The locks of the standard library, without poisoning: after a panic of the holder, a lock is free again.
//!
//! Poisoning adds nothing to the containment of panics ([`EndOnPanic`](crate::EndOnPanic)), which ends everything whose
//! state a panic may have left half changed.
//!
//! On Linux, for which these crates are written, a reader that arrives while a writer waits queues behind that writer,
//! so readers that overlap do not starve it. No lock is handed over to its longest waiter: a thread that unlocks a
//! [`Mutex`] and locks it again may be faster than the waiter. Where that matters, take a lock that is fair.

use std::fmt;
use std::sync::{self, PoisonError, TryLockError, TryLockResult};

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// Mutual exclusion.
#[derive(Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `None` if the lock is held.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        without_poison(self.0.try_lock())
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Readers-writer lock.
#[derive(Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits for the writer, and for writers that wait. The caller must not hold the lock.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `None` if a writer holds the lock or waits for it.
    #[inline]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        without_poison(self.0.try_read())
    }

    /// Waits for the writer and all readers. The caller must not hold the lock.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[inline]
fn without_poison<G>(result: TryLockResult<G>) -> Option<G> {
    match result {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::*;

    #[test]
    fn a_lock_is_free_after_a_panic_of_its_holder() {
        let (mutex, lock) = (Mutex::new(1), RwLock::new(2));
        catch_unwind(AssertUnwindSafe(|| {
            let _guards = (mutex.lock(), lock.write());
            panic!("while both are held");
        }))
        .unwrap_err();
        assert_eq!(*mutex.lock(), 1);
        assert_eq!(mutex.try_lock().as_deref(), Some(&1));
        assert_eq!(*lock.read(), 2);
        assert_eq!(lock.try_read().as_deref(), Some(&2));
        assert_eq!(*lock.write(), 2);
    }

    #[test]
    fn a_held_lock_is_refused() {
        let (mutex, lock) = (Mutex::new(()), RwLock::new(()));
        let _guards = (mutex.lock(), lock.write());
        assert!(mutex.try_lock().is_none() && lock.try_read().is_none());
    }

    /// Copies hold the memory map for reading, one after the other without a gap: a change of the map must get its
    /// turn.
    #[test]
    fn a_reader_queues_behind_a_writer_that_waits() {
        let lock = RwLock::new(0);
        thread::scope(|scope| {
            let reader = lock.read();
            scope.spawn(|| *lock.write() = 1);
            // Readers share the lock until the writer waits for it. If it did not keep them away, this would not end.
            while lock.try_read().is_some() {
                thread::yield_now();
            }
            assert_eq!(*reader, 0);
            drop(reader);
        });
        assert_eq!(*lock.read(), 1);
    }
}
