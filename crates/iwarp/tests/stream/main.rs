//! Streams connected by a pipe of bytes or by sockets, and streams that receive bytes that no correct peer sends.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod bad_input;
mod ends;
mod host;
mod operations;
mod pair;
mod properties;
mod sockets;
