//! The program's side of a keeper: its arguments and its confinement. The protocol and the loop are those of
//! [`pvrdma_vfio_user_server::keeper`].

use std::io;
use std::os::fd::AsFd;

pub use pvrdma_vfio_user_server::keeper::client;
use pvrdma_vfio_user_server::{eventfd, keeper};

use crate::config::SandboxMode;
use crate::sandbox::{self, Mismatch};

/// First argument of a keeper process. The other arguments are the sandbox mode and the device. The device only tells
/// keepers apart in lists of processes.
pub const ARGUMENT: &str = "keeper";

/// Serves the worker at the other end of standard input until that end is closed.
///
/// # Errors
/// Standard input does not lead to a worker.
pub fn run(mode: SandboxMode) -> io::Result<()> {
    // The setup needs system calls that the sandbox refuses.
    eventfd::prepare();
    match mode {
        SandboxMode::On => sandbox::enter_keeper(Mismatch::Refuse),
        SandboxMode::Strict => sandbox::enter_keeper(Mismatch::Kill),
        SandboxMode::Off => {}
    }
    keeper::process::serve(io::stdin().as_fd())
}
