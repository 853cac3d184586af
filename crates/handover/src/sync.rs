//! Atomics, fences and the lock that the protocols are made of: those of the standard library and `parking_lot`, or
//! those of a model.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicUsize, Ordering, fence};

/// Between operations that are all sequentially consistent, which loom takes for weaker ones: a fence, in a model.
#[cfg(not(loom))]
pub(crate) const fn in_order() {}

#[cfg(not(loom))]
pub use parking_lot::FairMutex;

#[cfg(loom)]
pub use model::*;

#[cfg(loom)]
mod model {
    use std::cell::Cell;

    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
    use loom::sync::{Mutex, MutexGuard};

    /// What a model must notice the loss of.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Step {
        /// A fence.
        Fence,
        /// That a swap is one step, and acquires: it becomes a load and a store.
        Swap,
    }

    thread_local! {
        static LEFT_OUT: Cell<Option<Step>> = const { Cell::new(None) };
    }

    /// Leaves steps out of all protocols in this thread, and so in all threads of a model that runs in it.
    pub fn leave_out(step: Step) {
        LEFT_OUT.set(Some(step));
    }

    fn is_left_out(step: Step) -> bool {
        LEFT_OUT.get() == Some(step)
    }

    pub(crate) fn fence(order: Ordering) {
        if !is_left_out(Step::Fence) {
            loom::sync::atomic::fence(order);
        }
    }

    /// See above.
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
        /// As a read-modify-write that acquires nothing: loom orders those among all that change a value, where it
        /// takes a store and a swap of two threads for unordered.
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
    }

    /// The lock, with the functions that `parking_lot` has.
    #[derive(Debug)]
    pub struct FairMutex<T>(Mutex<T>);

    impl<T> FairMutex<T> {
        /// With this in it.
        pub fn new(value: T) -> Self {
            Self(Mutex::new(value))
        }

        /// Waits for its turn.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|_| unreachable!("nobody panics while it is locked"))
        }

        /// `None` if somebody has it.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}
