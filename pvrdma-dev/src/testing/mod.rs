//! An in-process guest.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test guest that goes wrong ends the test")]

#[cfg(test)]
pub(crate) mod bed;
mod memory;

pub use memory::{Directory, GuestMemory, MEMORY_BASE, Placement};
