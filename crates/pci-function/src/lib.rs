//! The interface between a PCI function and its VMM ([`PciFunction`], [`InterruptSink`], [`DoorbellWindow`]), and the
//! configuration space and interrupt pin that the functions of this project share ([`ConfigSpace`], [`InterruptPin`]).

mod config_space;
mod doorbell_window;
mod function;
mod interrupt_pin;

pub use config_space::{CONFIG_SIZE, ConfigLayout, ConfigSpace, FIRST_CAPABILITY, Identity, Switches};
pub use doorbell_window::{DOORBELL_PAGE_SIZE, DoorbellPages, DoorbellWindow};
pub use function::{Bar, Doorbell, InterruptSink, MsixPlace, PciFunction};
pub use interrupt_pin::InterruptPin;
