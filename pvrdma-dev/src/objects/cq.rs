//! Completion queues.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

use crate::datapath::CqRing;

/// Completion queue: the guest's ring and the adapter's object that produces into it.
pub(crate) struct Cq<H: Hca> {
    /// Handle of its context, or the kernel.
    pub(crate) owner: u32,
    /// The ring.
    pub(crate) ring: Arc<CqRing>,
    /// Object of the adapter.
    pub(crate) verbs: H::Cq,
    /// Charge for its memory.
    pub(crate) _charge: Charge,
}
