//! The vfio-user daemon: a supervisor, and a process for each network that serves its PVRDMA devices.
//!
//! [`daemon`] runs everything that a [`config`] describes. Its supervisor opens sockets and starts a [`worker`] for
//! each network. It sends the workers requests in the same [`protocol`] that the command line uses. In a worker,
//! [`pvrdma_vfio_user_server`] turns messages of a VMM into calls of [`pvrdma_pci_function::PciFunction`]. Each device
//! has a thread that accepts clients and, while a client is connected, a thread that serves it. Idle threads sleep.
//!
//! # Example
//!
//! A configuration is complete before anything is opened: defaults are filled in, and conflicts are refused.
//!
//! ```
//! use pvrdmad::config::{Config, ConfigSpec, DEFAULT_NETWORK};
//!
//! let device = "name=vm0,socket=/run/pvrdmad/vm0.sock,mac=52:54:00:00:00:01".parse()?;
//! let config = Config::load(None, ConfigSpec { devices: vec![device], ..ConfigSpec::default() })?;
//! assert_eq!(config.networks[0].name, DEFAULT_NETWORK);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod capture;
pub mod check;
pub mod cli;
pub mod complete;
pub mod config;
pub mod control;
mod control_access;
pub mod control_path;
mod control_server;
pub mod daemon;
pub mod doorbells;
mod events;
pub mod failures;
mod fault_point;
pub mod history;
pub mod keeper;
pub mod logging;
mod man;
mod metrics;
mod notify;
pub mod package;
pub mod protocol;
mod rlimits;
pub mod sandbox;
pub mod saved_file;
pub mod service;
pub mod since;
mod socket;
pub mod status;
mod stop;
mod supervisor;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod top;
pub mod vmx;
pub mod worker;
pub mod xml;

/// Version of this program, and the commit that it was built from. The build script determines both.
pub const VERSION: &str = env!("PVRDMAD_VERSION");
