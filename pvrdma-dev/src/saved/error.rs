//! Reasons why a device is not saved or not restored.

use std::error::Error;

use pvrdma_guest_memory::{DmaError, OverBudget, PinError};
use pvrdma_saved_state::LoadError;
use pvrdma_verbs::VerbsError;
use thiserror::Error;

/// Reason why a device was not saved.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The device is not paused.
    #[error("the device is not paused")]
    NotPaused,
    /// A restored device was not finished.
    #[error("the device is being restored")]
    Unfinished,
    /// The adapter cannot save an object.
    #[error("the adapter cannot be saved: {0}")]
    Adapter(#[from] VerbsError),
    /// The stream cannot be written.
    #[error(transparent)]
    Stream(#[from] pvrdma_saved_state::SaveError),
}

/// Reason why a device was not restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The stream cannot be read.
    #[error(transparent)]
    Stream(#[from] LoadError),
    /// The guest or its peers know a property of the saved device that this device does not have.
    #[error("the saved device has another {0}")]
    Differs(&'static str),
    /// A record is missing, or is at the wrong place.
    #[error("{0} is missing or misplaced in the saved state")]
    Misplaced(&'static str),
    /// A value is out of range.
    #[error("invalid {what} in the saved state: {value:#x}")]
    Invalid {
        /// The value's name.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// An object is refused, as a command of a guest would be.
    #[error("{kind} {handle} of the saved state is refused")]
    Object {
        /// Kind of the object.
        kind: &'static str,
        /// Its handle, or its index in the GID table.
        handle: u32,
        /// Reason.
        source: Box<dyn Error + Send + Sync>,
    },
    /// An event ring is refused.
    #[error("the event rings of the saved state are refused")]
    EventRings(#[source] Box<dyn Error + Send + Sync>),
    /// The limits in force exceed those of the adapter.
    #[error("the limits of the saved state: {0}")]
    Limits(#[source] VerbsError),
    /// A limit in force exceeds the configuration of this device.
    #[error("the saved device has {limit}={saved}, more than the {here} of this one")]
    AboveConfigured {
        /// Name of the limit.
        limit: &'static str,
        /// Limit that the driver of the saved device has read.
        saved: u64,
        /// Limit of this device.
        here: u64,
    },
    /// The adapter refuses its state.
    #[error("the adapter refuses its saved state")]
    Adapter(#[source] VerbsError),
    /// The device would exceed its memory budget.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// Memory that the state refers to is not mapped.
    #[error("the memory of a {what} of the saved state is not mapped")]
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// Reason.
        source: DmaError,
    },
    /// Guest memory could not be locked as configured.
    #[error(transparent)]
    Pin(#[from] PinError),
}

impl RestoreError {
    pub(super) fn object(kind: &'static str, handle: u32, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Object { kind, handle, source: Box::new(source) }
    }
}
