//! The vfio-user daemon: one process that serves many PVRDMA devices.
//!
//! [`vfio_user`] turns messages of a VMM into calls of [`pvrdma_dev::PciFunction`]; [`daemon`] builds the devices and
//! their backend from a [`config`] and keeps them until it is told to stop. Each device has a thread that accepts
//! clients and, while there is one, a thread that serves it. All of them sleep when there is nothing to do.

pub mod capture;
pub mod cli;
pub mod config;
pub mod control;
mod control_access;
mod control_path;
pub mod daemon;
mod network;
mod rlimits;
pub mod sigbus;
mod socket;
pub mod status;
#[cfg(feature = "testing")]
pub mod testing;
pub mod vfio_user;
