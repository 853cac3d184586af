//! The error of parsers.

/// A frame is too short for this header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("truncated in the {0}")]
pub struct Truncated(pub &'static str);
