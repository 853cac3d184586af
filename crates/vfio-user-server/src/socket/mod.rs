//! Unix sockets in the file system.
//!
//! Until a socket has the owner, group and mode of its [`SocketAccess`], only its owner can use it. Its file is removed
//! when the socket is dropped, unless another file has taken its place.

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
pub use self::file::FileIdentity;
pub use self::names::user;
pub use self::stream::{SocketFile, peer};
