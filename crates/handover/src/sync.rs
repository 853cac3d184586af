//! Atomics, fences and locks of the protocols: those of the standard library and `parking_lot`, or their counterparts
//! in a model.

use std::sync::PoisonError;

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};

/// Marks a place between operations that are all sequentially consistent. Loom treats those as weaker, so in a model
/// this is a fence.
#[cfg(not(loom))]
pub(crate) const fn in_order() {}

#[cfg(loom)]
use loom::sync as locks;
#[cfg(not(loom))]
use std::sync as locks;

pub(crate) use locks::MutexGuard;

/// Mutex without poisoning: no panic leaves its content half changed.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(locks::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(locks::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(feature = "locks", not(loom)))]
pub use parking_lot::{FairMutex, RwLock, RwLockReadGuard};

/// Steps of a protocol that are not operations on an atomic. Models leave them out to check that they notice.
#[cfg(not(loom))]
pub(crate) enum Step {
    /// A second check, under the lock.
    Look,
    /// A writer waits for the threads that still hold the old value.
    #[cfg_attr(not(feature = "locks"), expect(dead_code, reason = "a step of `TwoCopies`"))]
    Wait,
    /// A lock serializes threads.
    Lock,
    /// A flag is cleared before the state that it announces ends.
    Order,
}

/// Returns `true`, except in a model without that step.
#[cfg(not(loom))]
#[inline]
pub(crate) const fn has(step: Step) -> bool {
    matches!(step, Step::Look | Step::Wait | Step::Lock | Step::Order)
}

#[cfg(loom)]
pub use model::*;

#[cfg(loom)]
mod model {
    use std::cell::Cell;

    pub use loom::sync::RwLockReadGuard;
    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
    use loom::sync::{MutexGuard, RwLockWriteGuard};

    /// Steps whose loss a model must notice.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Step {
        /// A fence.
        Fence,
        /// The atomicity and the acquire ordering of a swap or an update. Without them, it becomes a load and a store.
        Swap,
        /// A second check, under the lock.
        Look,
        /// A writer waits for the threads that still hold the old value.
        Wait,
        /// A lock serializes threads.
        Lock,
        /// A flag is cleared before the state that it announces ends.
        Order,
    }

    thread_local! {
        static LEFT_OUT: Cell<Option<Step>> = const { Cell::new(None) };
    }

    /// Leaves a step out of all protocols in this thread, and therefore in all threads of a model that runs in it.
    pub fn leave_out(step: Step) {
        LEFT_OUT.set(Some(step));
    }

    fn is_left_out(step: Step) -> bool {
        LEFT_OUT.get() == Some(step)
    }

    /// Returns `true` unless the step is left out.
    pub(crate) fn has(step: Step) -> bool {
        !is_left_out(step)
    }

    pub(crate) fn fence(order: Ordering) {
        if !is_left_out(Step::Fence) {
            loom::sync::atomic::fence(order);
        }
    }

    /// Issues the fence that loom needs between sequentially consistent operations.
    pub(crate) fn in_order() {
        fence(Ordering::SeqCst);
    }

    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    self.0.load(order)
                }

                pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                    if is_left_out(Step::Swap) {
                        let old = self.0.load(Ordering::Relaxed);
                        self.0.store(value, Ordering::Release);
                        return old;
                    }
                    self.0.swap(value, order)
                }
            }
        };
    }

    atomic!(AtomicBool, bool);
    atomic!(AtomicU8, u8);

    impl AtomicBool {
        /// Implemented as a read-modify-write that acquires nothing. Loom orders those among all operations that change
        /// a value, but treats a store and a swap of two threads as unordered.
        pub(crate) fn store(&self, value: bool, _: Ordering) {
            self.0.swap(value, Ordering::Release);
        }
    }

    impl AtomicU8 {
        pub(crate) fn store(&self, value: u8, order: Ordering) {
            self.0.store(value, order);
        }

        pub(crate) fn fetch_or(&self, bits: u8, order: Ordering) -> u8 {
            self.0.fetch_or(bits, order)
        }

        pub(crate) fn fetch_update(
            &self,
            set: Ordering,
            fetch: Ordering,
            next: impl Fn(u8) -> Option<u8>,
        ) -> Result<u8, u8> {
            if is_left_out(Step::Swap) {
                let old = self.0.load(fetch);
                next(old).map(|new| self.0.store(new, Ordering::Release)).ok_or(old)?;
                return Ok(old);
            }
            self.0.fetch_update(set, fetch, next)
        }
    }

    /// Mutex with the functions that `parking_lot` has. The order in which waiters get it does not matter to a model.
    #[derive(Debug, Default)]
    pub struct FairMutex<T>(loom::sync::Mutex<T>);

    impl<T> FairMutex<T> {
        /// Creates a mutex around the value.
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        /// Waits for the lock.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|_| unreachable!("no thread panics while it is locked"))
        }

        /// Returns `None` if the lock is held.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// Readers-writer lock with the functions that `parking_lot` has.
    #[derive(Debug)]
    pub struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        /// Creates a lock around the value.
        pub fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }

        /// Waits for the writer.
        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(|_| unreachable!("no thread panics while it is locked"))
        }

        /// Waits for the writer and all readers.
        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(|_| unreachable!("no thread panics while it is locked"))
        }
    }
}
