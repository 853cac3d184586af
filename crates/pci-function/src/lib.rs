//! What a VMM needs of a PCI function and a function of its VMM ([`PciFunction`], [`InterruptSink`]), and the
//! configuration space that our functions have in common ([`ConfigSpace`]).

mod config_space;
mod function;

pub use config_space::{CONFIG_SIZE, ConfigLayout, ConfigSpace, Identity, MsixPlace, Switches};
pub use function::{Bar, InterruptSink, PciFunction};
