//! Descriptors on which a thread sleeps until other threads bring work.

use crate::sync::{AtomicBool, Ordering};

/// An eventfd, or its counterpart in a model: readable from [`Self::signal`] until [`Self::clear`]. Neither call
/// blocks.
pub trait Event {
    /// Makes the event readable.
    fn signal(&self);

    /// Clears the event, so that it is not readable.
    fn clear(&self);
}

/// Wakes a thread that sleeps until other threads or the kernel bring work, by any path.
#[derive(Debug)]
pub struct Waker<E> {
    event: E,
}

impl<E: Event> Waker<E> {
    /// Creates a waker around an event that is not signalled and has no other user.
    pub const fn new(event: E) -> Self {
        Self { event }
    }

    /// Makes the thread look for work again. The caller publishes the work before this call.
    #[inline]
    pub fn wake(&self) {
        self.event.signal();
    }

    /// Sleeps until `wait` returns, because the event is readable or for another reason, and clears the event. The
    /// caller then checks all its sources of work: a wake-up that arrives before the event is cleared leaves no trace
    /// but the work that was published before it.
    pub fn sleep<R>(&self, wait: impl FnOnce(&E) -> R) -> R {
        let woken = wait(&self.event);
        self.event.clear();
        woken
    }
}

/// An event that is readable while there is work, with a flag that saves the system call when the event already has the
/// right state. Both change only under the lock that protects the work.
#[derive(Debug)]
pub struct Notice<E> {
    event: E,
    raised: AtomicBool,
}

impl<E: Event> Notice<E> {
    /// Creates a notice that is not raised.
    pub fn new(event: E) -> Self {
        Self { event, raised: AtomicBool::new(false) }
    }

    /// Event to wait for.
    pub const fn event(&self) -> &E {
        &self.event
    }

    /// Returns `true` if there is work, without taking the lock. A caller that gets `false` waits for the event, which
    /// is readable if work has arrived by then.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Announces work. The caller holds the lock and has already added the work.
    pub fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Withdraws the announcement: there is no work left. The caller holds the lock.
    pub fn lower(&self) {
        if self.raised.swap(false, Ordering::AcqRel) {
            self.event.clear();
        }
    }
}
