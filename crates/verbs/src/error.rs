//! Errors of the verbs interface.

use pvrdma_guest_memory::{DmaError, OverBudget};
use pvrdma_verbs_types::{InvalidAttribute, QpTransitionError};
use thiserror::Error;

/// Reason why a verb was refused.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// A table of the adapter is full, or a budget is used up.
    #[error("no room for another {0}")]
    Exhausted(&'static str),
    /// The device would exceed its memory budget in this process.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// A parameter is out of range.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// The adapter does not support this operation.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// Another owner already uses the name or number.
    #[error("{0} is already in use")]
    InUse(&'static str),
    /// The device is not permitted to do this, for the given reason.
    #[error("not allowed: {0}")]
    NotAllowed(&'static str),
    /// The object was destroyed.
    #[error("the object no longer exists")]
    Gone,
    /// The transition table does not allow the modify-QP request.
    #[error(transparent)]
    Transition(#[from] QpTransitionError),
    /// Guest memory could not be accessed.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// The operating system or the host adapter returned an error.
    #[error("host: {0}")]
    Host(#[from] std::io::Error),
}

impl From<InvalidAttribute> for VerbsError {
    fn from(InvalidAttribute(what): InvalidAttribute) -> Self {
        Self::Invalid(what)
    }
}

/// Reason why a ring index read from guest memory is invalid.
///
/// Indices of a ring of `capacity` elements run from 0 to `2 * capacity - 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum IndexError {
    /// The index is not below twice the number of elements.
    #[error("ring index {index:#x} is out of range (ring of {capacity} elements)")]
    OutOfRange {
        /// Index read from guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
    /// The producer would be ahead of the consumer by more elements than the ring has.
    #[error("ring index {index:#x} is too far ahead (ring of {capacity} elements)")]
    TooFarAhead {
        /// Index read from guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
    /// The producer moved back over elements that the consumer had taken already.
    #[error("ring index {index:#x} is behind elements that were taken (ring of {capacity} elements)")]
    BehindTaken {
        /// Index read from guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
}

/// Reason why a ring of the guest can no longer be read. Its queue must go to the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The guest stored an invalid index.
    #[error(transparent)]
    BadIndex(#[from] IndexError),
    /// The ring's memory is not mapped any more.
    #[error("ring memory is not accessible: {0}")]
    Memory(#[from] DmaError),
}

/// Error: the completion queue was full. It is unusable from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("completion queue overrun")]
pub struct CqOverrun;
