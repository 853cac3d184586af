//! Socket buffers.

use std::os::fd::AsFd;

/// Requested send buffer, in bytes. The system limits it.
const SOCKET_BUFFER: usize = 4 << 20;

/// Requests a large send buffer. A smaller one works, too.
pub(super) fn enlarge(socket: &impl AsFd) {
    if let Err(error) = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER) {
        log::debug!("the send buffer keeps its size: {error}");
    }
}
