//! A protection domain.

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

/// A protection domain and whose it is.
pub(crate) struct Pd<H: Hca> {
    /// Its handle.
    pub(crate) handle: u32,
    /// Handle of its context, or the kernel.
    pub(crate) owner: u32,
    /// The adapter's object.
    pub(crate) verbs: H::Pd,
    /// What is kept for it.
    pub(crate) _charge: Charge,
}
