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
pub(crate) use self::datagram::{DatagramFile, bind_datagram};
pub(crate) use self::names::user;
pub(crate) use self::stream::SocketFile;
