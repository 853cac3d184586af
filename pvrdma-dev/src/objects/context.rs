//! A verbs context: one process that opened the device.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Handle that stands for the guest's kernel.
pub(crate) const KERNEL: u32 = 0;

/// A context with its doorbell page.
#[derive(Debug)]
pub(crate) struct Context {
    /// Index of its page in BAR 2.
    pub(crate) uar_page: u32,
    /// Its page is memory: its doorbells are not heard.
    mapped: AtomicBool,
    /// Held while that changes, and while what is watched changes with it. Outside of a view, a table's and a queue's
    /// lock.
    changing: Mutex<()>,
}

impl Context {
    /// A context whose doorbells trap.
    pub(crate) const fn new(uar_page: u32) -> Self {
        Self { uar_page, mapped: AtomicBool::new(false), changing: Mutex::new(()) }
    }

    /// Returns `true` if its doorbells are not heard.
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Ordering::SeqCst)
    }

    /// Runs `watch` if its doorbells are not heard, and holds on to that meanwhile.
    pub(crate) fn if_mapped(&self, watch: impl FnOnce()) {
        let _changing = self.changing.lock();
        if self.is_mapped() {
            watch();
        }
    }

    /// Its doorbells are not heard any more, or are again; `follow` does what goes with it, if that is new. Returns
    /// `true` if it is.
    pub(crate) fn set_mapped(&self, mapped: bool, follow: impl FnOnce()) -> bool {
        let _changing = self.changing.lock();
        let changes = self.mapped.swap(mapped, Ordering::SeqCst) != mapped;
        if changes {
            follow();
        }
        changes
    }
}
