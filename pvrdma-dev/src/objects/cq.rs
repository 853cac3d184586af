//! A completion queue.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

use crate::datapath::CqRing;

/// A completion queue: the guest's ring and the adapter's producer for it.
pub(crate) struct Cq<H: Hca> {
    /// Handle of its context, or the kernel.
    pub(crate) owner: u32,
    /// The ring.
    pub(crate) ring: Arc<CqRing>,
    /// The adapter's object.
    pub(crate) verbs: H::Cq,
    /// What is kept for it.
    pub(crate) _charge: Charge,
}
