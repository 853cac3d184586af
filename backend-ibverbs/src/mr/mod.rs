//! Memory regions: registrations with the host, and what local keys mean.

mod pieces;
mod region;
mod registration;
mod table;

pub(crate) use region::{Bind, FastStep, Mr};
pub(crate) use table::MrTable;
