//! What can go wrong across the border.

use thiserror::Error;

use crate::qp_state::QpTransitionError;
use pvrdma_guest_memory::DmaError;

/// Why a verb was refused.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// A table of the adapter is full, or a budget is used up.
    #[error("no room for another {0}")]
    Exhausted(&'static str),
    /// A parameter is out of its range.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// The adapter cannot do this.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The name or number is taken by somebody else.
    #[error("{0} is already in use")]
    InUse(&'static str),
    /// The object was destroyed.
    #[error("the object no longer exists")]
    Gone,
    /// A modify-QP request that the transition table does not allow.
    #[error(transparent)]
    Transition(#[from] QpTransitionError),
    /// Guest memory could not be reached.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// The operating system or the host adapter refused.
    #[error("host: {0}")]
    Host(#[from] std::io::Error),
}

/// Why a ring of the guest can no longer be read. The queue it feeds must go to its error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The producer index is outside its range or too far ahead.
    #[error("invalid ring index {index:#x} (ring of {capacity} elements)")]
    BadIndex {
        /// The index as found in guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
    /// The ring's memory is not mapped any more.
    #[error("ring memory is not accessible: {0}")]
    Memory(#[from] DmaError),
}

/// The completion queue had no room. It is dead from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("completion queue overrun")]
pub struct CqOverrun;
