//! The vfio-user daemon: one process that serves many PVRDMA devices.

pub mod log_limit;
pub mod sigbus;
pub mod vfio_user;
