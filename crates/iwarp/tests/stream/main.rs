//! Streams against each other over a pipe of bytes, and against bytes that no correct peer sends.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod bad_input;
mod ends;
mod host;
mod operations;
mod pair;
mod properties;
