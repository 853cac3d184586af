//! The interface between a PCI function and its VMM ([`PciFunction`], [`InterruptSink`], [`DoorbellWindow`],
//! [`Migratable`]), and the configuration space and interrupt pin that the functions of this project share
//! ([`ConfigSpace`], [`InterruptPin`]).
//!
//! # Example
//!
//! The configuration space of a function with one BAR, as its guest finds and enables it:
//!
//! ```
//! use pvrdma_pci_function::{Bar, ConfigLayout, ConfigSpace, Identity};
//!
//! let mut config = ConfigSpace::new(&ConfigLayout {
//!     identity: Identity { vendor: 0x15ad, device: 0x0820, revision: 0, class: [0, 0x80, 0x02] },
//!     bars: [Some(Bar { size: 4096, is_64bit: false }), None, None, None, None, None],
//!     msix: None,
//!     interrupt_pin: false,
//!     multifunction: false,
//! });
//!
//! let mut vendor = [0; 2];
//! config.read(0, &mut vendor, false);
//! assert_eq!(u16::from_le_bytes(vendor), 0x15ad);
//!
//! // The driver sets Bus Master Enable in the command register.
//! assert!(!config.switches().bus_master);
//! config.write(4, &[0x04, 0]);
//! assert!(config.switches().bus_master);
//! ```

mod config_space;
mod doorbell_window;
mod function;
mod interrupt_pin;
mod migratable;
mod outline;
mod state_error;

pub use config_space::{ConfigLayout, ConfigSpace, FIRST_CAPABILITY, Identity, Switches};
pub use doorbell_window::{DOORBELL_PAGE_SIZE, DoorbellPages, DoorbellWindow};
pub use function::{Bar, Doorbell, InterruptSink, MsixPlace, PciFunction};
pub use interrupt_pin::InterruptPin;
pub use migratable::Migratable;
pub use outline::{CONFIG_SIZE, Outline};
pub use state_error::StateError;
