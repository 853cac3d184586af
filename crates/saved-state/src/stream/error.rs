//! Errors of the container.

use std::io;

use thiserror::Error;

/// Reason why a state was not written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The output failed.
    #[error("the saved state cannot be written")]
    Io(#[from] io::Error),
    /// The state has more bytes than the caller allows.
    #[error("the saved state has more than {limit} bytes")]
    TooLong {
        /// Maximum number of bytes.
        limit: u64,
    },
    /// A record has a body of more than [`crate::MAX_RECORD`] bytes.
    #[error("a record of kind {kind:#06x} has {length} bytes")]
    RecordTooLong {
        /// Kind of the record.
        kind: u16,
        /// Length of its body in bytes.
        length: usize,
    },
}

/// Reason why a stream was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The input failed.
    #[error("the saved state cannot be read")]
    Io(#[source] io::Error),
    /// The stream ends before the end record.
    #[error("the saved state is truncated")]
    Truncated,
    /// The stream does not begin as a saved state does.
    #[error("this is no saved state")]
    NotSavedState,
    /// The format has another version than [`crate::Header::FORMAT`].
    #[error("the saved state has format version {found}, which this program does not read")]
    Version {
        /// Version of the stream.
        found: u32,
    },
    /// The state uses a feature that this program does not know.
    #[error("the saved state needs the feature {name:?}, which this program does not have")]
    Needs {
        /// Name of the feature.
        name: String,
    },
    /// The stream has more bytes than the caller allows.
    #[error("the saved state has more than {limit} bytes")]
    TooLong {
        /// Maximum number of bytes.
        limit: u64,
    },
    /// The header or a record claims a body of more than [`crate::MAX_RECORD`] bytes.
    #[error("a record of kind {kind:#06x} claims {length} bytes")]
    RecordTooLong {
        /// Kind of the record; 0 for the header.
        kind: u16,
        /// Length of its body in bytes.
        length: u32,
    },
    /// A field of a record's header that must be zero is not.
    #[error("the header of a record of kind {kind:#06x} is malformed")]
    RecordHeader {
        /// Kind of the record.
        kind: u16,
    },
    /// A body is not the message that its kind promises.
    #[error("a record of kind {kind:#06x} is malformed")]
    Malformed {
        /// Kind of the record; 0 for the header and the end record.
        kind: u16,
        /// Reason.
        source: prost::DecodeError,
    },
    /// A value of the header is not a valid one.
    #[error("the {field} of the saved state is invalid")]
    Header {
        /// The field.
        field: &'static str,
    },
    /// A record is not of the kind that the owner expects at its place.
    #[error("a record of kind {found:#06x} is at the place of one of kind {expected:#06x}")]
    Unexpected {
        /// Kind of the record; 0 for the end record.
        found: u16,
        /// Kind that belongs there.
        expected: u16,
    },
    /// The end record has another number of records.
    #[error("the saved state has {found} records instead of {expected}")]
    Records {
        /// Number of records of the stream.
        found: u64,
        /// Number in the end record.
        expected: u64,
    },
    /// The checksum is wrong.
    #[error("the checksum of the saved state is wrong")]
    Checksum,
}

impl From<io::Error> for LoadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Io(error),
        }
    }
}
