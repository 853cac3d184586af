//! Sockets in the file system: made safely, for whom they are meant, and removed only if they are ours.

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
