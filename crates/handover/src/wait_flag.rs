//! Somebody waits for what others bring.

use crate::sync::{AtomicBool, Ordering, fence, in_order};

/// Set by who found nothing, and looks once more after that; looked at by who has brought something. One of the two
/// sees the other.
#[derive(Debug)]
pub struct WaitFlag {
    set: AtomicBool,
}

impl Default for WaitFlag {
    fn default() -> Self {
        Self::new()
    }
}

impl WaitFlag {
    /// Nobody waits.
    pub fn new() -> Self {
        Self { set: AtomicBool::new(false) }
    }

    /// Somebody waits. The caller looks once more after this: what came before was brought to nobody.
    #[inline]
    pub fn set(&self) {
        self.set.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns `true` if somebody waits, for whoever has just brought something.
    #[inline]
    pub fn is_set(&self) -> bool {
        fence(Ordering::SeqCst);
        self.set.load(Ordering::SeqCst)
    }

    /// As [`Self::is_set`], and nobody waits any more: of several who bring something, one is told.
    #[inline]
    pub fn take(&self) -> bool {
        self.is_set() && self.set.swap(false, Ordering::SeqCst)
    }

    /// As [`Self::is_set`], for who has heard of what was brought by a way through the kernel, or out of a guest: who
    /// went that way has let everybody see what it brought, so that there is no fence here.
    #[inline]
    pub fn is_set_when_heard(&self) -> bool {
        in_order();
        self.set.load(Ordering::SeqCst)
    }

    /// Nobody waits any more.
    #[inline]
    pub fn clear(&self) {
        self.set.store(false, Ordering::SeqCst);
    }
}
