//! Unix sockets in the formats of QEMU's socket back ends: `-netdev stream` puts four bytes of length, big-endian, in
//! front of each frame; `-netdev dgram` sends each as a datagram.

mod buffer;
mod datagram;
mod stream;
#[cfg(test)]
mod tests;

pub use datagram::DatagramLink;
pub use stream::StreamLink;
