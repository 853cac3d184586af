//! What can go wrong across the border.

use pvrdma_guest_memory::{DmaError, OverBudget};
use pvrdma_verbs_types::{InvalidAttribute, QpTransitionError};
use thiserror::Error;

/// Why a verb was refused.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// A table of the adapter is full, or a budget is used up.
    #[error("no room for another {0}")]
    Exhausted(&'static str),
    /// The device may not make this process keep more.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// A parameter is out of its range.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// The adapter cannot do this.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The name or number is taken by somebody else.
    #[error("{0} is already in use")]
    InUse(&'static str),
    /// The device may not do this, for this reason.
    #[error("not allowed: {0}")]
    NotAllowed(&'static str),
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

impl From<InvalidAttribute> for VerbsError {
    fn from(InvalidAttribute(what): InvalidAttribute) -> Self {
        Self::Invalid(what)
    }
}

/// Why an index that was found in the guest's memory is invalid.
///
/// Indices of a ring of `capacity` elements run from 0 to `2 * capacity - 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum IndexError {
    /// It is not below twice the number of elements.
    #[error("ring index {index:#x} is out of range (ring of {capacity} elements)")]
    OutOfRange {
        /// The index as found in guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
    /// There would be more elements between producer and consumer than the ring has.
    #[error("ring index {index:#x} is too far ahead (ring of {capacity} elements)")]
    TooFarAhead {
        /// The index as found in guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
    /// The producer took back elements that the consumer had taken already.
    #[error("ring index {index:#x} is behind elements that were taken (ring of {capacity} elements)")]
    BehindTaken {
        /// The index as found in guest memory.
        index: u32,
        /// Number of elements.
        capacity: u32,
    },
}

/// Why a ring of the guest can no longer be read. The queue it feeds must go to its error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The guest stored an invalid index.
    #[error(transparent)]
    BadIndex(#[from] IndexError),
    /// The ring's memory is not mapped any more.
    #[error("ring memory is not accessible: {0}")]
    Memory(#[from] DmaError),
}

/// The completion queue had no room. It is dead from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("completion queue overrun")]
pub struct CqOverrun;
