//! Unix sockets in the file system.
//!
//! A socket can be used by its owner alone from its creation until it has the owner, group and mode of its
//! [`SocketAccess`]. Its file is removed with it, unless another file has taken its place.

mod access;
mod datagram;
mod error;
mod file;
mod names;
mod stream;
#[cfg(test)]
mod tests;

pub use self::access::SocketAccess;
pub use self::datagram::{DatagramFile, bind_datagram};
pub use self::error::SocketError;
pub use self::names::user;
pub use self::stream::{SocketFile, peer};
