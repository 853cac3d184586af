//! Sockets in the file system: made safely, for whom they are meant, and removed only if they are ours.

mod access;
mod datagram;
mod error;
mod file;
mod inherited;
mod names;
mod stream;
#[cfg(test)]
mod tests;

pub use self::access::SocketAccess;
pub(crate) use self::datagram::{DatagramFile, bind_datagram};
pub use self::inherited::Inherited;
pub(crate) use self::names::user;
pub(crate) use self::stream::{SocketFile, peer};

/// Returns `true` if an error is that somebody listens at a socket's place.
pub(crate) fn in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(error::SocketError::InUse { .. }))
}
