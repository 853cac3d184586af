//! A memory region.

use std::sync::Arc;

use pvrdma_guest_memory::PAGE_SIZE;
use pvrdma_verbs::{Access, Hca, MrRequest};
use serde::Serialize;

use super::{Charge, Pd};

/// What a memory region covers. Its keys are not shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MrShape {
    /// Memory of a process.
    User {
        /// Virtual address of the first byte.
        start: u64,
        /// Bytes.
        length: u64,
        /// Rights.
        access: Access,
    },
    /// All bus addresses, for the guest's kernel.
    Dma {
        /// Rights.
        access: Access,
    },
    /// A region that work requests fill in.
    FastRegister {
        /// Bytes that it can cover at most.
        max_bytes: u64,
    },
}

impl From<&MrRequest> for MrShape {
    fn from(request: &MrRequest) -> Self {
        match *request {
            MrRequest::User { start, length, access, .. } => Self::User { start, length, access },
            MrRequest::Dma { access } => Self::Dma { access },
            MrRequest::FastRegister { max_pages } => {
                Self::FastRegister { max_bytes: u64::from(max_pages).saturating_mul(PAGE_SIZE) }
            }
        }
    }
}

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
