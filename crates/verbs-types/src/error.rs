//! Reasons why a change of a queue pair is refused.

use thiserror::Error;

use crate::attrs::QpAttrMask;
use crate::types::{QpState, QpType};

/// Error: an attribute of a modify request is out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("invalid {0}")]
pub struct InvalidAttribute(pub &'static str);

/// Reason why a modify request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QpTransitionError {
    /// The transition does not exist.
    #[error("a {qp_type:?} QP cannot go from {from:?} to {to:?}")]
    NoEdge {
        /// Transport service.
        qp_type: QpType,
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
    },
    /// Required attributes are missing.
    #[error("{from:?} to {to:?} lacks {missing:?}")]
    Missing {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
        /// Missing attributes.
        missing: QpAttrMask,
    },
    /// The request has attributes that this transition does not allow.
    #[error("{from:?} to {to:?} does not allow {extra:?}")]
    Forbidden {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
        /// Attributes that are not allowed.
        extra: QpAttrMask,
    },
}
