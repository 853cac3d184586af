//! Datagram sockets in the file system.

use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::access::SocketAccess;
use super::error::SocketError;
use super::file::{BoundFile, FileIdentity, is_socket};
use super::stream::peer;

/// File of a datagram socket, removed when this is dropped.
#[derive(Debug)]
pub struct DatagramFile(BoundFile);

impl DatagramFile {
    /// Describes a file that another process of this user has created, and owns until [`Self::own`] is called.
    pub const fn adopt(file: FileIdentity) -> Self {
        Self(BoundFile::adopt(file))
    }

    /// Makes this process the owner of the file, which removes it.
    pub fn own(&self) {
        self.0.own();
    }

    /// Returns the identity of the file.
    pub const fn identity(&self) -> &FileIdentity {
        self.0.identity()
    }

    /// Returns the path if the file does not exist any more.
    pub fn lost(&self) -> Option<&Path> {
        self.0.lost()
    }
}

/// Binds a datagram socket for the users that `access` names. The socket of a process that has ended is replaced.
///
/// # Errors
/// The path is in use, or a system call failed.
pub fn bind_datagram(path: &Path, access: SocketAccess) -> Result<(UnixDatagram, DatagramFile), SocketError> {
    remove_stale(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| SocketError::making(path, errno.into()))?;
    let file = BoundFile::bind(&socket, path, access)?;
    Ok((UnixDatagram::from(socket), DatagramFile(file)))
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source: io::Error| SocketError::making(path, source);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(_) => {}
    }
    let probe = UnixDatagram::unbound().map_err(failed)?;
    match probe.connect(path) {
        Ok(()) => Err(SocketError::InUse { path: path.to_owned(), pid: peer(&probe) }),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(SocketError::Foreign(path.to_owned())),
        // A plain file refuses the connection as well.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {
            fs::remove_file(path).map_err(failed)
        }
        Err(_) => Err(SocketError::NotASocket(path.to_owned())),
    }
}
