//! Descriptors on which a thread sleeps, in front of what others bring.

use crate::sync::{AtomicBool, Ordering};

/// An eventfd, or that of a model: readable from [`Self::signal`] until [`Self::clear`]. Neither waits.
pub trait Event {
    /// Makes it readable.
    fn signal(&self);

    /// Makes it not readable.
    fn clear(&self);
}

/// A thread sleeps until others have brought something, by whichever way, or the kernel has.
#[derive(Debug)]
pub struct Waker<E> {
    event: E,
}

impl<E: Event> Waker<E> {
    /// With an event of its own, that nobody has signalled.
    pub const fn new(event: E) -> Self {
        Self { event }
    }

    /// Has the thread look again. Called by whoever has brought something, after that.
    #[inline]
    pub fn wake(&self) {
        self.event.signal();
    }

    /// Sleeps: `wait` returns when the event is readable, or for another reason. The caller looks at everything *after*
    /// this; what is brought from here on wakes it again.
    pub fn sleep<R>(&self, wait: impl FnOnce(&E) -> R) -> R {
        let woken = wait(&self.event);
        self.event.clear();
        woken
    }
}

/// An event that is readable as long as there is something, and a flag that spares who knows that it is the system
/// call. Both change under the lock of what they stand for.
#[derive(Debug)]
pub struct Notice<E> {
    event: E,
    raised: AtomicBool,
}

impl<E: Event> Notice<E> {
    /// There is nothing.
    pub fn new(event: E) -> Self {
        Self { event, raised: AtomicBool::new(false) }
    }

    /// What to wait for.
    pub const fn event(&self) -> &E {
        &self.event
    }

    /// Returns `true` if there is something, for who would take the lock otherwise. Who is told of nothing waits
    /// for the event, which says it if there is something by then.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// There is something. Called with the lock, and behind what there is.
    pub fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// There is nothing any more. Called with the lock.
    pub fn lower(&self) {
        if self.raised.swap(false, Ordering::AcqRel) {
            self.event.clear();
        }
    }
}
