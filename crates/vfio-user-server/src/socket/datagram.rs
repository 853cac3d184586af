//! Datagram sockets in the file system.

use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::access::SocketAccess;
use super::error::SocketError;
use super::file::{BoundFile, is_socket};
use super::stream::peer;

/// The file of a datagram socket, which goes away with us.
#[derive(Debug)]
pub struct DatagramFile(BoundFile);

impl DatagramFile {
    /// Its path, if the file is not there any more.
    pub fn lost(&self) -> Option<&Path> {
        self.0.lost()
    }
}

/// Binds a datagram socket for whom `access` names. The socket of a process that is gone is replaced.
///
/// # Errors
/// Something is there already, or the system refused.
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
        // Refused is also what a plain file says.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {
            fs::remove_file(path).map_err(failed)
        }
        Err(_) => Err(SocketError::NotASocket(path.to_owned())),
    }
}
