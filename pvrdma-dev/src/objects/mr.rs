//! Memory regions.

use std::sync::Arc;

use pvrdma_guest_memory::Charge;
use pvrdma_verbs::Hca;

use super::Pd;

/// Memory region; the adapter holds its pages.
pub(crate) struct Mr<H: Hca> {
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// Object of the adapter.
    pub(crate) verbs: H::Mr,
    /// Charge for its memory.
    pub(crate) _charge: Charge,
}
