//! Sockets in the file system, and sockets opened by the service manager.

mod inherited;

use pvrdma_vfio_user_server::socket::SocketError;

pub use self::inherited::Inherited;

/// Returns `true` if the error means that another process listens on the socket.
pub(crate) fn in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(SocketError::InUse { .. }))
}
