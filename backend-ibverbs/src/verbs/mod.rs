//! The library's objects as owning types. Dropping one destroys it; each keeps alive what it was made from.
//!
//! All unsafe calls of the library are in the files of this folder. What makes them sound is the same everywhere: a pointer that
//! the library returned is valid until its object is destroyed, objects are destroyed only by `drop`, and the library's
//! functions may be called from any thread (`man 7 rdma`: "libibverbs is fully thread safe").

mod device;
mod memory;
mod qp;
mod queue;

use std::ffi::c_int;
use std::io;

use log::error;

pub use device::OpenError;
pub(crate) use device::{AsyncNotice, HostDevice};
pub(crate) use memory::{HostAh, HostMr, HostMw, HostPd};
pub(crate) use qp::{HostOp, HostQp, HostQpInit, RecvBatch, SendBatch};
pub(crate) use queue::{Channel, HostCq, HostSrq};

/// Most functions return an errno, some return -1 and set `errno`.
fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An object that does not go away stays until the device is closed. Nobody can be told but the log.
fn destroyed(what: &str, code: c_int) {
    if let Err(error) = check(code) {
        error!("the host's {what} cannot be destroyed: {error}");
    }
}
