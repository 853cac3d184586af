//! Datagram sockets in the file system.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::error::SocketError;

/// The file of a datagram socket, which goes away with us.
#[derive(Debug)]
pub(crate) struct DatagramFile(PathBuf);

impl Drop for DatagramFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Binds a datagram socket for this user only. The socket of a process that is gone is replaced.
pub(crate) fn bind_datagram(path: &Path) -> Result<(UnixDatagram, DatagramFile), SocketError> {
    let io_error = |source: io::Error| SocketError::Io { path: path.to_owned(), source };
    let make = || -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(socket)
    };
    let socket = match make() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let probe = UnixDatagram::unbound().map_err(io_error)?;
            match probe.connect(path) {
                Ok(()) => return Err(SocketError::InUse(path.to_owned())),
                // Refused is also what a plain file says.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {}
                Err(_) => return Err(SocketError::NotASocket(path.to_owned())),
            }
            fs::remove_file(path).and_then(|()| make())
        }
        made => made,
    };
    Ok((socket.map_err(io_error)?, DatagramFile(path.to_owned())))
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_sockets_are_ours_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixDatagram::bind(&path).unwrap());
        let (socket, file) = bind_datagram(&path).unwrap();
        assert!(matches!(bind_datagram(&path), Err(SocketError::InUse(_))));
        drop((socket, file));
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind_datagram(&path), Err(SocketError::NotASocket(_))));
    }
}
