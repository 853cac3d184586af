//! Why a socket cannot be made.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, geteuid};
use thiserror::Error;

use super::names::user;

/// Longest path of a socket, in bytes: `sun_path` with its NUL has 108.
const MAX_PATH: usize = 107;

/// Why a socket cannot be made. What the system said is the source, and not repeated here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The path is longer than a socket address.
    #[error("{}: the path is too long for a socket: {} bytes, at most {MAX_PATH}", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// Something else is there, which we will not remove.
    #[error("{}: exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// Somebody listens there.
    #[error("{}: {} is listening there", path.display(), who(*pid))]
    InUse {
        /// Which socket.
        path: PathBuf,
        /// The process, if the system tells.
        pid: Option<Pid>,
    },
    /// The folder is missing.
    #[error("{}: the directory {} does not exist", path.display(), directory.display())]
    NoDirectory {
        /// Which socket.
        path: PathBuf,
        /// Its folder.
        directory: PathBuf,
    },
    /// The folder is not ours.
    #[error("{}: no permission to create a socket in {} (user {user})", path.display(), directory.display())]
    NoPermission {
        /// Which socket.
        path: PathBuf,
        /// Its folder.
        directory: PathBuf,
        /// Who we are.
        user: String,
    },
    /// Somebody else's socket, of which we cannot know whether it is in use.
    #[error("{}: a socket of another user is there", .0.display())]
    Foreign(PathBuf),
    /// Others can exchange files in the folder, so that they could choose which file is given away.
    #[error(
        "{}: no socket for others in {}: others can rename files there (it must be ours or root's, and sticky if others write to it)",
        path.display(), directory.display()
    )]
    OpenDirectory {
        /// Which socket.
        path: PathBuf,
        /// Its folder.
        directory: PathBuf,
    },
    /// What is at the path is not the socket that was bound there a moment ago.
    #[error("{}: somebody has put something else in the place of the socket", .0.display())]
    Exchanged(PathBuf),
    /// The system refused.
    #[error("{}", path.display())]
    Io {
        /// Which socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl SocketError {
    /// What making a socket at `path` failed with.
    pub(crate) fn making(path: &Path, source: io::Error) -> Self {
        let (path, directory) = (path.to_owned(), Self::directory(path));
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoDirectory { path, directory },
            io::ErrorKind::PermissionDenied => Self::NoPermission { path, directory, user: user(geteuid().as_raw()) },
            _ => Self::Io { path, source },
        }
    }

    /// The folder that a path is in.
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
    fn what_the_system_said_in_our_words() {
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
