//! Protection domains.

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

/// Protection domain and its owner.
pub(crate) struct Pd<H: Hca> {
    /// Its handle.
    pub(crate) handle: u32,
    /// Handle of its context, or the kernel.
    pub(crate) owner: u32,
    /// Object of the adapter.
    pub(crate) verbs: H::Pd,
    /// Charge for its memory.
    pub(crate) _charge: Charge,
}
