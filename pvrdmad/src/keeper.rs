//! The program's side of a keeper: its arguments and its confinement. The protocol and the loop are those of
//! [`pvrdma_vfio_user_server::keeper`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use pvrdma_vfio_user_server::{eventfd, keeper};
use rustix::net::SocketAddrUnix;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::config::SandboxMode;
use crate::sandbox::{self, Mismatch};

/// First argument of a keeper process. The other arguments are the sandbox mode and the device. The device only tells
/// keepers apart in lists of processes.
pub const ARGUMENT: &str = "keeper";

/// Maximum number of connections that a keeper has not accepted: those of its first worker, and of workers that came
/// and went while it was in a system call.
pub(crate) const BACKLOG: i32 = 16;

/// Time for which a keeper holds clients without a worker: longer than a daemon takes to start the next worker, and
/// than the service manager takes to start the next daemon.
const ALONE: Duration = Duration::from_secs(60);

/// Serves the workers that connect to the socket on standard input, until there is neither a worker nor a client.
///
/// # Errors
/// Standard input is not a listening socket, or a worker violates the protocol.
pub fn run(mode: SandboxMode) -> io::Result<()> {
    let (stdin, alone) = (io::stdin(), alone());
    if can_be_found(stdin.as_fd())? {
        // Makes the kernel report this process to those that connect, instead of the daemon that made the socket.
        rustix::net::listen(&stdin, BACKLOG)?;
    } else {
        // A keeper that the next daemon cannot find must end with the present one: the VMMs of its clients would wait
        // for every answer in vain.
        set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    // The setup needs system calls that the sandbox refuses.
    eventfd::prepare();
    match mode {
        SandboxMode::On => sandbox::enter_keeper(Mismatch::Refuse),
        SandboxMode::Strict => sandbox::enter_keeper(Mismatch::Kill),
        SandboxMode::Off => {}
    }
    keeper::process::serve(stdin.as_fd(), alone)
}

/// Returns `true` if the next daemon finds the socket in the file system.
fn can_be_found(listener: BorrowedFd<'_>) -> io::Result<bool> {
    let address: SocketAddrUnix = rustix::net::getsockname(listener)?.try_into()?;
    Ok(address.path_bytes().is_some())
}

/// Returns [`ALONE`], unless a test has shortened it.
fn alone() -> Duration {
    let shortened = std::env::var("PVRDMAD_ALONE_MS").ok().filter(|_| cfg!(feature = "testing"));
    shortened.and_then(|millis| millis.parse().ok()).map_or(ALONE, Duration::from_millis)
}
