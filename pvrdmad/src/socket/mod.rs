//! Sockets in the file system: made safely, removed only if they are ours.

mod datagram;
mod error;
mod stream;

pub(crate) use self::datagram::{DatagramFile, bind_datagram};
pub(crate) use self::stream::SocketFile;
