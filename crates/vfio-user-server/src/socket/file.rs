//! File of a socket, from its creation to its removal.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use log::warn;
use rustix::fs::{Access, AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::net::SocketAddrUnix;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::access::SocketAccess;
use super::error::SocketError;

/// Permissions of a socket at its creation: only its owner can use it until its final mode is set.
const BORN: Mode = Mode::RUSR.union(Mode::WUSR);

/// Path of a socket's file, and the file itself by device and inode. A process passes it to the process that
/// takes over the socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileIdentity {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// File of a bound socket. Dropping it removes the file, unless another file has taken its place or another process
/// owns it.
#[derive(Debug)]
pub(super) struct BoundFile {
    identity: FileIdentity,
    /// Set once this process owns the file.
    owned: OnceLock<()>,
}

impl BoundFile {
    /// Binds `socket` at `path`, where no file exists, and then gives the file to the users that `access` names. Until
    /// then only the process's own user can send to the socket or connect to it, regardless of the umask.
    ///
    /// # Errors
    /// A system call failed, or other users can exchange files in the directory; no file is left behind.
    pub(super) fn bind(socket: impl AsFd, path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        let folder = Folder::open(path)?;
        folder.check(access)?;
        let (file, opened) = folder.born(socket)?;
        apply(&opened, access).map_err(|source| SocketError::making(path, source))?;
        Ok(file)
    }

    /// Describes a file that another process has created, and owns until [`Self::own`] is called.
    pub(super) const fn adopt(identity: FileIdentity) -> Self {
        Self { identity, owned: OnceLock::new() }
    }

    /// Makes this process the owner of the file, which removes it.
    pub(super) fn own(&self) {
        self.owned.get_or_init(|| ());
    }

    pub(super) const fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// Returns the path if the file does not exist any more, so that no client can find the socket.
    pub(super) fn lost(&self) -> Option<&Path> {
        (!self.is_there()).then_some(&self.identity.path)
    }

    fn is_there(&self) -> bool {
        let FileIdentity { path, device, inode } = &self.identity;
        fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (*device, *inode))
    }
}

impl Drop for BoundFile {
    fn drop(&mut self) {
        if self.owned.get().is_some() && self.is_there() {
            let _ = fs::remove_file(&self.identity.path);
        }
    }
}

/// Returns `true` if there is a socket at `path`.
pub(super) fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Directory of a future socket. Held open, so that the directory that was checked is the one that is used.
pub(super) struct Folder<'a> {
    path: &'a Path,
    name: OsString,
    directory: PathBuf,
    handle: OwnedFd,
}

impl<'a> Folder<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, SocketError> {
        let name = path.file_name().ok_or_else(|| SocketError::NotASocket(path.to_owned()))?.to_owned();
        let directory = SocketError::directory(path);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(&directory, flags, Mode::empty())
            .map_err(|errno| SocketError::making(path, errno.into()))?;
        Ok(Self { path, name, directory, handle })
    }

    /// Checks the directory. Refuses a socket for other users in a directory where they can replace it before it has
    /// its owner and mode: the file in its place would get these. For a socket of the process's own user, such a
    /// directory causes only a warning: another user may bind the path first, and the peer then connects to that
    /// socket.
    fn check(&self, access: SocketAccess) -> Result<(), SocketError> {
        let stat = rustix::fs::fstat(&self.handle).map_err(|errno| SocketError::making(self.path, errno.into()))?;
        if access.is_shared() && others_can_rename(&stat) {
            return Err(SocketError::OpenDirectory { path: self.path.to_owned(), directory: self.directory.clone() });
        }
        if others_can_write(&stat) {
            // Log: once, at the start.
            warn!(
                "{}: others can write to {}: they can be here before us",
                self.path.display(),
                self.directory.display()
            );
        }
        Ok(())
    }

    /// Checks that a socket for the users that `access` names could be created here.
    ///
    /// # Errors
    /// The path is too long, the directory is not writable, or other users can exchange files in it.
    pub(super) fn check_access(&self, access: SocketAccess) -> Result<(), SocketError> {
        SocketAddrUnix::new(self.path).map_err(|_| SocketError::TooLong(self.path.to_owned()))?;
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        rustix::fs::accessat(&self.handle, ".", wanted, AtFlags::EACCESS)
            .map_err(|errno| SocketError::making(self.path, errno.into()))?;
        self.check(access)
    }

    /// Binds the socket and opens its file.
    pub(super) fn born(&self, socket: impl AsFd) -> Result<(BoundFile, OwnedFd), SocketError> {
        self.born_with(socket, || ())
    }

    /// The same, with a hook between the two steps for tests.
    pub(super) fn born_with(
        &self,
        socket: impl AsFd,
        meanwhile: impl FnOnce(),
    ) -> Result<(BoundFile, OwnedFd), SocketError> {
        let failed = |errno: rustix::io::Errno| SocketError::making(self.path, errno.into());
        let address = SocketAddrUnix::new(self.path).map_err(|_| SocketError::TooLong(self.path.to_owned()))?;
        // The file gets the permissions of the unbound socket, less the umask.
        rustix::fs::fchmod(&socket, BORN).map_err(failed)?;
        rustix::net::bind(&socket, &address).map_err(failed)?;
        meanwhile();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.handle, &self.name, flags, Mode::empty()).map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        // A second link means that the file existed before.
        let ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
            && stat.st_uid == geteuid().as_raw()
            && stat.st_nlink == 1
            && BORN.contains(Mode::from_raw_mode(stat.st_mode));
        if !ours {
            return Err(SocketError::Exchanged(self.path.to_owned()));
        }
        let identity = FileIdentity { path: self.path.to_owned(), device: stat.st_dev, inode: stat.st_ino };
        let bound = BoundFile::adopt(identity);
        bound.own();
        Ok((bound, file))
    }
}

/// Returns `true` if users other than the process's own and root can create files in this directory.
fn others_can_write(folder: &Stat) -> bool {
    let owned = folder.st_uid == 0 || folder.st_uid == geteuid().as_raw();
    !owned || Mode::from_raw_mode(folder.st_mode).intersects(Mode::WGRP | Mode::WOTH)
}

/// Returns `true` if users other than the process's own and root can rename the process's files in this directory. In a
/// sticky directory only the owner of a file, or of the directory, can.
fn others_can_rename(folder: &Stat) -> bool {
    let owned = folder.st_uid == 0 || folder.st_uid == geteuid().as_raw();
    others_can_write(folder) && !(owned && Mode::from_raw_mode(folder.st_mode).contains(Mode::SVTX))
}

/// Sets the group, mode and owner of the file, in this order. The mode is thus never in effect for a group other than
/// the intended one, and the owner changes last because the process cannot change the file afterwards.
fn apply(file: &OwnedFd, access: SocketAccess) -> io::Result<()> {
    let own = |owner, group| rustix::fs::chownat(file, "", owner, group, AtFlags::EMPTY_PATH);
    if let Some(group) = access.group {
        own(None, Some(Gid::from_raw(group)))?;
    }
    // `fchmod` refuses O_PATH handles, but their path in /proc leads to the file even if it has been renamed.
    let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(&handle, fs::Permissions::from_mode(access.permissions()))?;
    if let Some(owner) = access.owner {
        own(Some(Uid::from_raw(owner)), None)?;
    }
    Ok(())
}
