//! Clients of a worker that has crashed.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use log::{error, warn};
use pvrdma_vfio_user_server::{Endpoint, Recovery, Server};

use super::Host;

/// Commands for the guest. The driver of the device depends on that of the network function.
const RELOAD: &str = "reload its drivers in the guest: modprobe -r vmw_pvrdma vmxnet3; modprobe -a vmxnet3 vmw_pvrdma";

/// Serves a function, with the client that a worker which has crashed has left at its keeper.
///
/// # Errors
/// The system cannot start another thread.
pub(super) fn serve(
    (device, network_function): (&str, bool),
    listener: UnixListener,
    endpoint: Endpoint,
    host: &Arc<dyn Host>,
) -> io::Result<Server> {
    let name = endpoint.name.clone();
    let (server, recovery) = Server::recover(listener, endpoint)?;
    let problem = match recovery {
        Recovery::Nothing => return Ok(server),
        Recovery::Lost(reason) => {
            // Log: once for each function and start of a worker, as all in this function.
            error!("{name}: the VM lost the device until it restarts: {reason}");
            return Ok(server);
        }
        Recovery::Recovered => None,
        Recovery::Untold(reason) => Some(reason),
    };
    match &problem {
        // Log: once for each function and start of a worker.
        None => warn!("{name}: the VM keeps the device, which is in reset: {RELOAD}"),
        Some(reason) => {
            // Log: once for each function and start of a worker.
            warn!("{name}: the VM keeps the device, which is in reset. Its driver is not told: {reason}. {RELOAD}")
        }
    }
    host.client_recovered(device, network_function, problem.as_deref());
    Ok(server)
}
