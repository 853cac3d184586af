//! Errors of saving and restoring, and the checks of saved values.

use pvrdma_guest_memory::DmaError;
use thiserror::Error;

/// Reason a device was not saved.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The device is not paused, so its state changes.
    #[error("the device is not paused")]
    NotPaused,
    /// The state was not written.
    #[cfg(feature = "saved-state")]
    #[error(transparent)]
    Stream(#[from] pvrdma_saved_state::SaveError),
}

/// Reason a state was not restored. The device is as after a reset.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The stream is damaged, or not one that this release reads.
    #[cfg(feature = "saved-state")]
    #[error(transparent)]
    Stream(#[from] pvrdma_saved_state::LoadError),
    /// The state is that of another kind of device.
    #[error("the state is not that of a network function")]
    Device,
    /// The device has another permanent MAC address.
    #[error("the state is that of a device with the MAC address {0}")]
    Mac(pvrdma_packet::MacAddr),
    /// A part of the state is missing.
    #[error("the state has no {0}")]
    Missing(&'static str),
    /// A value is one that the state of a device cannot have.
    #[error("invalid {field}: {value:#x}")]
    Invalid {
        /// Name of the value.
        field: &'static str,
        /// The value. For a list, the number of its elements.
        value: u64,
    },
    /// The guest has no such memory.
    #[error("{part}: {source}")]
    Memory {
        /// Name of the structure in the memory.
        part: &'static str,
        /// Reason.
        source: DmaError,
    },
}

/// Requires a condition of a value.
pub(crate) fn require(field: &'static str, value: impl Into<u64>, valid: bool) -> Result<(), RestoreError> {
    if valid { Ok(()) } else { Err(RestoreError::Invalid { field, value: value.into() }) }
}

/// Returns a part of the state that must be there.
pub(crate) fn present<T>(name: &'static str, part: Option<T>) -> Result<T, RestoreError> {
    part.ok_or(RestoreError::Missing(name))
}

/// Converts a number to a narrower type.
pub(crate) fn narrow<T: TryFrom<u32>>(field: &'static str, value: u32) -> Result<T, RestoreError> {
    T::try_from(value).map_err(|_| RestoreError::Invalid { field, value: value.into() })
}

/// Returns bytes whose number is fixed.
pub(crate) fn exact<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], RestoreError> {
    bytes.try_into().map_err(|_| RestoreError::Invalid { field, value: bytes.len() as u64 })
}
