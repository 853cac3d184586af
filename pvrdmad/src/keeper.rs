//! The program's side of a keeper: its arguments and its confinement. The protocol and the loop are those of
//! [`pvrdma_vfio_user_server::keeper`].

use std::io;
use std::os::fd::AsFd;

use pvrdma_vfio_user_server::{eventfd, keeper};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::config::SandboxMode;
use crate::sandbox::{self, Mismatch};

/// First argument of a keeper process. The other arguments are the sandbox mode and the device. The device only tells
/// keepers apart in lists of processes.
pub const ARGUMENT: &str = "keeper";

/// Serves the workers that connect to the socket on standard input, until there is neither a worker nor a client.
///
/// # Errors
/// Standard input is not a listening socket, or a worker violates the protocol.
pub fn run(mode: SandboxMode) -> io::Result<()> {
    // A keeper that nothing knows any more must not hold clients: their VMMs would wait for every answer in vain.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The setup needs system calls that the sandbox refuses.
    eventfd::prepare();
    match mode {
        SandboxMode::On => sandbox::enter_keeper(Mismatch::Refuse),
        SandboxMode::Strict => sandbox::enter_keeper(Mismatch::Kill),
        SandboxMode::Off => {}
    }
    keeper::process::serve(io::stdin().as_fd())
}
