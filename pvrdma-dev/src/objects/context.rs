//! Verbs contexts: each belongs to one process that opened the device.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Handle of the guest's kernel.
pub(crate) const KERNEL: u32 = 0;

/// Context with its doorbell page.
#[derive(Debug)]
pub(crate) struct Context {
    /// Index of its page in BAR 2.
    pub(crate) uar_page: u32,
    /// `true` if its page is mapped as memory: its doorbells do not trap.
    mapped: AtomicBool,
    /// Held while `mapped` and the set of watched rings change together. It is taken before a view, a table's lock and
    /// a queue's lock.
    changing: Mutex<()>,
}

impl Context {
    /// Creates a context whose doorbells trap.
    pub(crate) const fn new(uar_page: u32) -> Self {
        Self { uar_page, mapped: AtomicBool::new(false), changing: Mutex::new(()) }
    }

    /// Returns `true` if its doorbells do not trap.
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Ordering::SeqCst)
    }

    /// Runs `watch` if the context's doorbells do not trap. The state cannot change meanwhile.
    pub(crate) fn if_mapped(&self, watch: impl FnOnce()) {
        let _changing = self.changing.lock();
        if self.is_mapped() {
            watch();
        }
    }

    /// Sets whether the doorbell page is mapped, so that its doorbells do not trap. If that is a change, runs `follow`
    /// under the same lock. Returns `true` if it was one.
    pub(crate) fn set_mapped(&self, mapped: bool, follow: impl FnOnce()) -> bool {
        let _changing = self.changing.lock();
        let changes = self.mapped.swap(mapped, Ordering::SeqCst) != mapped;
        if changes {
            follow();
        }
        changes
    }
}
