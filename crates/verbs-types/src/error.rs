//! Why a change of a queue pair is refused.

use thiserror::Error;

use crate::attrs::QpAttrMask;
use crate::types::{QpState, QpType};

/// An attribute of a modify request that is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("invalid {0}")]
pub struct InvalidAttribute(pub &'static str);

/// Why a modify request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QpTransitionError {
    /// No such edge.
    #[error("a {qp_type:?} QP cannot go from {from:?} to {to:?}")]
    NoEdge {
        /// Transport service.
        qp_type: QpType,
        /// Present state.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// Required attributes are absent.
    #[error("{from:?} to {to:?} lacks {missing:?}")]
    Missing {
        /// Present state.
        from: QpState,
        /// State asked for.
        to: QpState,
        /// What is absent.
        missing: QpAttrMask,
    },
    /// Attributes that this edge does not allow.
    #[error("{from:?} to {to:?} does not allow {extra:?}")]
    Forbidden {
        /// Present state.
        from: QpState,
        /// State asked for.
        to: QpState,
        /// What is too much.
        extra: QpAttrMask,
    },
}
