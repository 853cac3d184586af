//! Fields of saved states, checked one by one.

use pvrdma_saved_state::roce::Agreement;
use pvrdma_verbs_types::{MAX_MESSAGE, Psn, WcStatus};
use thiserror::Error;

/// Reason why a saved state is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// A value is not valid.
    #[error("{value:#x} is no valid {field}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A field that must be present is missing.
    #[error("the {field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// There are more elements than a queue pair can have.
    #[error("more than {most} {elements}")]
    TooMany {
        /// The elements.
        elements: &'static str,
        /// Maximum number.
        most: usize,
    },
    /// Values contradict each other.
    #[error("{0}")]
    Contradiction(&'static str),
}

pub(crate) fn invalid(field: &'static str, value: impl Into<u64>) -> RestoreError {
    RestoreError::Value { field, value: value.into() }
}

/// Returns an error with this reason unless the condition holds.
pub(crate) const fn ensure(condition: bool, otherwise: &'static str) -> Result<(), RestoreError> {
    if condition { Ok(()) } else { Err(RestoreError::Contradiction(otherwise)) }
}

/// Restores a number of fewer bits.
pub(crate) fn narrow<T: TryFrom<u32>>(field: &'static str, value: u32) -> Result<T, RestoreError> {
    T::try_from(value).map_err(|_| invalid(field, value))
}

/// Restores a PSN.
pub(crate) fn psn(field: &'static str, value: u32) -> Result<Psn, RestoreError> {
    let psn = Psn::new(value);
    if psn.get() == value { Ok(psn) } else { Err(invalid(field, value)) }
}

/// Restores a number of messages, which has 24 bits.
pub(crate) fn msn(value: u32) -> Result<u32, RestoreError> {
    psn("MSN", value).map(Psn::get)
}

/// Restores a length of a message in bytes.
pub(crate) fn message_length(value: u32) -> Result<u32, RestoreError> {
    if value <= MAX_MESSAGE { Ok(value) } else { Err(invalid("message length", value)) }
}

/// Restores a status of a request that fails.
pub(crate) fn failure(value: u32) -> Result<WcStatus, RestoreError> {
    let status = WcStatus::try_from(value).ok().filter(|&status| status != WcStatus::Success);
    status.ok_or_else(|| invalid("completion status", value))
}

/// Restores the state of an agreement.
pub(crate) fn agreement(value: i32) -> Result<Agreement, RestoreError> {
    Agreement::try_from(value).map_err(|_| invalid("state of selective acknowledgements", value.cast_unsigned()))
}

/// Restores a UDP port.
pub(crate) fn port(value: Option<u32>) -> Result<Option<u16>, RestoreError> {
    value.map(|port| narrow("UDP port", port)).transpose()
}
