//! Listening sockets.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::error::SocketError;

/// A listening socket whose file goes away with it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    id: (u64, u64),
}

impl SocketFile {
    /// Listens at `path`, for this user only. The socket of a process that is gone is replaced.
    ///
    /// # Errors
    /// Something is there already, or the system refused.
    pub(crate) fn bind(path: &Path) -> Result<Self, SocketError> {
        let io_error = |source: io::Error| SocketError::Io { path: path.to_owned(), source };
        let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong(path.to_owned()))?;
        remove_stale(path)?;
        let make = || -> io::Result<(OwnedFd, (u64, u64))> {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            rustix::net::bind(&socket, &address)?;
            // Before it listens nobody can connect, so nobody can slip in before the mode is right.
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            let metadata = fs::symlink_metadata(path)?;
            rustix::net::listen(&socket, 16)?;
            Ok((socket, (metadata.dev(), metadata.ino())))
        };
        let (socket, id) = make().map_err(io_error)?;
        Ok(Self { listener: UnixListener::from(socket), path: path.to_owned(), id })
    }

    /// What to accept from.
    pub(crate) const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have put their own in its place.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let io_error = |source: io::Error| SocketError::Io { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error(error)),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(io_error),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error(error)),
        Ok(_) => Err(SocketError::InUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_life_of_a_socket_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let socket = SocketFile::bind(&path).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(SocketFile::bind(&path), Err(SocketError::InUse(_))));
        drop(socket);
        assert!(!path.exists());

        // A crash leaves the file behind.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = SocketFile::bind(&path).unwrap();

        // What replaced ours stays.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        drop(socket);
        assert!(matches!(SocketFile::bind(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");

        let long = folder.path().join("x".repeat(200));
        assert!(matches!(SocketFile::bind(&long), Err(SocketError::TooLong(_))));
    }
}
