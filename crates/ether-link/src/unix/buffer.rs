//! Buffers of the sockets.

use std::os::fd::AsFd;

/// Bytes that a socket should hold for the reader. The system caps it.
const SOCKET_BUFFER: usize = 4 << 20;

/// Asks for a large buffer; less than that works, too.
pub(super) fn enlarge(socket: &impl AsFd) {
    if let Err(error) = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER) {
        log::debug!("the send buffer keeps its size: {error}");
    }
}
