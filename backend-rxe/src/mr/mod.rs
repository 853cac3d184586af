//! Memory regions and the table of keys.
//!
//! A key consists of an index in bits 31:8 and a byte in bits 7:0. The first index is random. The byte starts at one
//! and changes with each use of the slot, so that a stale key does not refer to the next region of its slot. A user of
//! a region holds the table for the whole copy ([`crate::sg::MemoryGuard`]), and the removal of a region waits for its
//! users without blocking others ([`MrTables`]). Fast-registered regions change while the table is held, so each has a
//! lock of its own, which is held during a copy.

mod saved;
mod table;
mod tables;
#[cfg(test)]
mod tests;

pub(crate) use table::{Mr, MrTable, Region, RegionRef};
pub(crate) use tables::{MrTableGuard, MrTables};
