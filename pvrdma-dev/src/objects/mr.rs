//! A memory region.

use std::sync::Arc;

use pvrdma_verbs::Hca;

use super::{Charge, Pd};

/// A memory region; its pages are the adapter's.
pub(crate) struct Mr<H: Hca> {
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// The adapter's object.
    pub(crate) verbs: H::Mr,
    /// Room for its pages.
    pub(crate) _charge: Charge,
}
