//! A memory region.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

use super::Pd;

/// A memory region; its pages are the adapter's.
pub(crate) struct Mr<H: Hca> {
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// The adapter's object.
    pub(crate) verbs: H::Mr,
    /// What is kept for it.
    pub(crate) _charge: Charge,
}
