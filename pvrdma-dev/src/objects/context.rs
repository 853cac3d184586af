//! A verbs context: one process that opened the device.

/// Handle that stands for the guest's kernel.
pub(crate) const KERNEL: u32 = 0;

/// A context with its doorbell page.
#[derive(Debug)]
pub(crate) struct Context {
    /// Index of its page in BAR 2.
    pub(crate) uar_page: u32,
}
