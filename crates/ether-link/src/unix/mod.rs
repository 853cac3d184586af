//! Unix sockets in the formats of QEMU's socket back ends: `-netdev stream` puts four bytes of length, big-endian, in
//! front of each frame; `-netdev dgram` sends each frame as a datagram.
//!
//! A process without privileges gets a prepared listening socket ([`ready_listener`]), a prepared bound datagram socket
//! ([`ready_datagram`]), and connections from a [`Connector`](pvrdma_link::Connector) that does the same as
//! [`PathConnector`].

mod buffer;
mod datagram;
mod open;
mod stream;
#[cfg(test)]
mod tests;

pub use datagram::DatagramLink;
pub use open::{PathConnector, connect_datagram, connect_stream, ready_datagram, ready_listener};
pub use stream::StreamLink;
