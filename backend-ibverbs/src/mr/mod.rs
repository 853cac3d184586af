//! Memory regions: registrations with the host, and translation of local keys.

mod pieces;
mod region;
mod registration;
mod table;

pub(crate) use region::{Bind, FastStep, Mr};
pub(crate) use table::MrTable;
