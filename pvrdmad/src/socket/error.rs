//! Why a socket cannot be made.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a socket cannot be made.
#[derive(Debug, Error)]
pub(crate) enum SocketError {
    /// The path is longer than a socket address.
    #[error("{0}: the path is too long for a socket")]
    TooLong(PathBuf),
    /// Something else is there, which we will not remove.
    #[error("{0}: exists and is not a socket")]
    NotASocket(PathBuf),
    /// Somebody listens there.
    #[error("{0}: another process is listening there")]
    InUse(PathBuf),
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// Which socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
