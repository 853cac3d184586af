//! Errors of creating sockets.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, geteuid};
use thiserror::Error;

use super::names::user;

/// Maximum length of a socket's path, in bytes: `sun_path` has 108 with its NUL.
const MAX_PATH: usize = 107;

/// Reason why a socket cannot be created. A system error is attached as the source and not repeated in the text.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The path is longer than a socket address.
    #[error("{}: the path is too long for a socket: {} bytes, at most {MAX_PATH}", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// Another kind of file exists at the path and is not removed.
    #[error("{}: exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// A process is listening at the path.
    #[error("{}: {} is listening there", path.display(), who(*pid))]
    InUse {
        /// Path of the socket.
        path: PathBuf,
        /// PID of the process, if known.
        pid: Option<Pid>,
    },
    /// The directory does not exist.
    #[error("{}: the directory {} does not exist", path.display(), directory.display())]
    NoDirectory {
        /// Path of the socket.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
    },
    /// The process may not write to the directory.
    #[error("{}: no permission to create a socket in {} (user {user})", path.display(), directory.display())]
    NoPermission {
        /// Path of the socket.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
        /// User of this process.
        user: String,
    },
    /// A socket of another user. This process cannot tell if it is in use.
    #[error("{}: a socket of another user is there", .0.display())]
    Foreign(PathBuf),
    /// Other users can exchange files in the directory, and could thus choose the file that gets the socket's owner and
    /// mode.
    #[error(
        "{}: no socket for others in {}: others can rename files there (it must be ours or root's, and sticky if others write to it)",
        path.display(), directory.display()
    )]
    OpenDirectory {
        /// Path of the socket.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
    },
    /// The file at the path is not the socket that was bound there a moment ago.
    #[error("{}: another file has replaced the socket", .0.display())]
    Exchanged(PathBuf),
    /// Any other error of the system.
    #[error("{}", path.display())]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl SocketError {
    /// Converts an error of creating a socket at `path`.
    pub(crate) fn making(path: &Path, source: io::Error) -> Self {
        let (path, directory) = (path.to_owned(), Self::directory(path));
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoDirectory { path, directory },
            io::ErrorKind::PermissionDenied => Self::NoPermission { path, directory, user: user(geteuid().as_raw()) },
            _ => Self::Io { path, source },
        }
    }

    /// Returns the directory of a path.
    pub(super) fn directory(path: &Path) -> PathBuf {
        match path.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory.to_owned(),
            _ => PathBuf::from("."),
        }
    }
}

fn who(pid: Option<Pid>) -> String {
    match pid {
        Some(pid) if pid == rustix::process::getpid() => "this process".to_owned(),
        Some(pid) => format!("another process (PID {pid})"),
        None => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_are_explained() {
        let denied = SocketError::making(Path::new("/run/vm0.sock"), io::ErrorKind::PermissionDenied.into());
        let expected =
            format!("/run/vm0.sock: no permission to create a socket in /run (user {})", user(geteuid().as_raw()));
        assert_eq!(denied.to_string(), expected);
        let missing = SocketError::making(Path::new("/nowhere/vm0.sock"), io::ErrorKind::NotFound.into());
        assert_eq!(missing.to_string(), "/nowhere/vm0.sock: the directory /nowhere does not exist");
        let other = SocketError::making(Path::new("vm0.sock"), io::ErrorKind::OutOfMemory.into());
        assert_eq!(other.to_string(), "vm0.sock");
        let long = PathBuf::from("x".repeat(120));
        assert!(SocketError::TooLong(long).to_string().ends_with("too long for a socket: 120 bytes, at most 107"));
        let ours = SocketError::InUse { path: "/a".into(), pid: Some(rustix::process::getpid()) };
        assert_eq!(ours.to_string(), "/a: this process is listening there");
    }
}
