//! Unix sockets in the formats of QEMU's socket back ends: `-netdev stream` puts four bytes of length, big-endian, in front
//! of each frame; `-netdev dgram` sends each as a datagram.

mod datagram;
mod stream;
#[cfg(test)]
mod tests;

pub use datagram::DatagramLink;
pub use stream::StreamLink;

use std::os::fd::AsFd;

/// Bytes that a socket should hold for the reader. The system caps it.
const SOCKET_BUFFER: usize = 4 << 20;

/// Asks for a large buffer; less than that works, too.
fn enlarge(socket: &impl AsFd) {
    if let Err(error) = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER) {
        log::debug!("the send buffer keeps its size: {error}");
    }
}
