//! A memory region.

use std::sync::Arc;

use pvrdma_verbs::Hca;

use super::{Charge, Pd};
use crate::inspect::MrShape;

/// A memory region; its pages are the adapter's.
pub(crate) struct Mr<H: Hca> {
    /// Its protection domain.
    pub(crate) pd: Arc<Pd<H>>,
    /// What it covers, for those who look at it.
    pub(crate) shape: MrShape,
    /// The adapter's object.
    pub(crate) verbs: H::Mr,
    /// Room for its pages.
    pub(crate) _charge: Charge,
}
