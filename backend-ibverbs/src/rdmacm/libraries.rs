//! The libraries.

use std::sync::Arc;

use crate::sys::library::Library;
use crate::sys::rdmacm::RdmaCm;

/// The libraries by which the host's connection manager is reached.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    pub(crate) cm: Arc<RdmaCm>,
    pub(crate) verbs: Arc<Library>,
}
