//! Directory of the sockets of keepers, in which the next daemon finds them if this one is killed.
//!
//! It lies beside the control socket, which belongs to one daemon at a time, so that the next daemon with the same
//! configuration finds it. Only the daemon's user may enter it. The name of a socket consists of the version of the
//! protocol, the device, and the process that made it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use log::{info, warn};
use parking_lot::Mutex;
use pvrdma_vfio_user_server::keeper::client::look;
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::process::{PidfdFlags, geteuid, pidfd_open};

use crate::config::NAME_LENGTH;
use crate::keeper::BACKLOG;
use crate::supervisor::wedged::WorkerProcess;

/// Version of the protocol with keepers and of their notes. A daemon ends the keepers of other versions.
const VERSION: &str = "1";

/// Time for a keeper to answer the next daemon. It includes the end of its worker.
const PATIENCE: Duration = Duration::from_secs(2);

/// The directory. It is removed with the last keeper, once this is dropped.
#[derive(Debug)]
pub(super) struct KeeperPlaces {
    path: PathBuf,
    /// Number of sockets so far.
    made: Mutex<u64>,
}

/// File of a keeper's socket, removed when this is dropped.
#[derive(Debug)]
pub(super) struct KeeperPlace {
    folder: Arc<OwnedFd>,
    name: String,
    address: SocketAddrUnix,
}

impl KeeperPlace {
    fn new(folder: &Arc<OwnedFd>, name: String) -> io::Result<Self> {
        // A path through the descriptor: it is short enough for an address, and is always in this directory.
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))?;
        Ok(Self { folder: Arc::clone(folder), name, address })
    }

    /// Returns the address for this process.
    pub(super) const fn address(&self) -> &SocketAddrUnix {
        &self.address
    }

    /// Leaves the file for the next daemon.
    pub(super) fn leave(mut self) {
        self.name.clear();
    }
}

impl Drop for KeeperPlace {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            let _ = rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// A keeper that an earlier daemon has left, with at least one client.
#[derive(Debug)]
pub(super) struct LeftKeeper {
    pub(super) device: String,
    pub(super) process: WorkerProcess,
    pub(super) place: KeeperPlace,
    /// The device itself has a client, and not its network function alone.
    pub(super) has_client: bool,
}

/// Result of an examination of a socket.
enum Examined {
    Left(LeftKeeper),
    /// No process listens there, or it holds no client.
    Stale,
    Refused(String),
}

impl KeeperPlaces {
    /// Describes the directory of a daemon with this control socket.
    pub(super) fn beside(control: &Path) -> Self {
        let mut path = control.as_os_str().to_owned();
        path.push(".keepers");
        Self { path: path.into(), made: Mutex::default() }
    }

    /// Opens the directory, and creates it if it does not exist.
    fn open(&self) -> io::Result<Arc<OwnedFd>> {
        match rustix::fs::mkdir(&self.path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open_existing(),
            Err(errno) => Err(errno.into()),
        }
    }

    fn open_existing(&self) -> io::Result<Arc<OwnedFd>> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let folder = rustix::fs::open(&self.path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&folder)?;
        if stat.st_uid != geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
            return Err(io::Error::other("other users may enter it"));
        }
        Ok(Arc::new(folder))
    }

    /// Binds a socket for a keeper of a device.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub(super) fn bind(&self, socket: &OwnedFd, device: &str) -> io::Result<KeeperPlace> {
        let number = {
            let mut made = self.made.lock();
            *made = made.wrapping_add(1);
            *made
        };
        let name = format!("{VERSION}@{device}@{}-{number}", std::process::id());
        // A daemon that is replaced may remove the directory between two of these calls.
        let mut tries = 3_u8;
        loop {
            tries = tries.saturating_sub(1);
            let folder = self.open()?;
            let place = KeeperPlace::new(&folder, name.clone())?;
            match rustix::net::bind(socket, &place.address) {
                Err(Errno::NOENT) if tries > 0 => {}
                Err(errno) => {
                    // This socket is not bound, so a file of this name belongs to another one, and stays.
                    place.leave();
                    return Err(errno.into());
                }
                Ok(()) => {
                    rustix::fs::chmodat(&folder, &place.name, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
                    return Ok(place);
                }
            }
        }
    }

    /// Returns the keepers that an earlier daemon has left for devices that `is_known` accepts, at most one for each.
    /// Ends the others, and removes the files of those that have ended.
    pub(super) fn find(&self, is_known: impl Fn(&str) -> bool) -> Vec<LeftKeeper> {
        let folder = match self.open_existing() {
            Ok(folder) => folder,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                // Log: once, at the start.
                warn!("{}: no VMs are looked for: {error}", self.path.display());
                return Vec::new();
            }
        };
        let mut found: Vec<LeftKeeper> = Vec::new();
        for name in names(&folder) {
            let path = self.path.join(&name);
            let Ok(place) = KeeperPlace::new(&folder, name) else { continue };
            let mut keeper = match examine(place) {
                Ok(Examined::Left(keeper)) => keeper,
                Ok(Examined::Stale) => continue,
                Ok(Examined::Refused(reason)) => {
                    // Log: once for each file, at the start.
                    warn!("{}: not a keeper of this daemon: {reason}", path.display());
                    continue;
                }
                Err(error) => {
                    // Log: likewise.
                    warn!("{}: {error}", path.display());
                    continue;
                }
            };
            if is_known(&keeper.device) && !found.iter().any(|other| other.device == keeper.device) {
                found.push(keeper);
            } else {
                // Log: likewise.
                info!("{}: the client of a device that is not served any more is disconnected", path.display());
                keeper.process.kill();
            }
        }
        found
    }
}

impl Drop for KeeperPlaces {
    fn drop(&mut self) {
        // Fails while there are keepers: those of a daemon that has replaced this one, or those for the next daemon.
        let _ = rustix::fs::rmdir(&self.path);
    }
}

/// Returns the names of the files in a directory.
fn names(folder: &OwnedFd) -> Vec<String> {
    let Ok(entries) = Dir::read_from(folder) else { return Vec::new() };
    let name = |name: &CStr| name.to_str().ok().filter(|name| !name.starts_with('.')).map(str::to_owned);
    let mut names: Vec<_> = entries.flatten().filter_map(|entry| name(entry.file_name())).collect();
    names.sort();
    names
}

/// Returns the device in the name of a socket of this version.
fn device_of(name: &str) -> Option<&str> {
    let mut parts = name.split('@');
    let (version, device, maker) = (parts.next()?, parts.next()?, parts.next()?);
    let known = version == VERSION && !device.is_empty() && device.len() <= NAME_LENGTH && !maker.is_empty();
    (known && parts.next().is_none()).then_some(device)
}

/// Finds out which process listens at a socket, and whether it holds clients. The file is removed unless a keeper with
/// clients listens there.
fn examine(place: KeeperPlace) -> io::Result<Examined> {
    let socket = match connect(&place.address) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(Examined::Stale),
        Err(error) => return Err(error),
    };
    let peer = sockopt::socket_peercred(&socket)?;
    if peer.uid != geteuid() {
        return Ok(Examined::Refused(format!("it belongs to user {}", peer.uid.as_raw())));
    }
    let pidfd = pidfd_open(peer.pid, PidfdFlags::empty())?;
    // A process that answers after the descriptor was opened has run all the time, so its number was not given to
    // another one in between.
    let clients = look::has_clients(socket, PATIENCE);
    let mut process = WorkerProcess::adopt(peer.pid, pidfd);
    let device = device_of(&place.name).map(str::to_owned);
    match (clients, device) {
        (Ok([false, false]), _) => Ok(Examined::Stale),
        (Ok([has_client, _]), Some(device)) => Ok(Examined::Left(LeftKeeper { device, process, place, has_client })),
        (Ok(_), None) => {
            process.kill();
            Ok(Examined::Refused("it has another version".to_owned()))
        }
        (Err(error), _) => Ok(Examined::Refused(error.to_string())),
    }
}

/// Connects to a keeper, without waiting for it. The connection does not block, which a worker expects.
pub(super) fn connect(address: &SocketAddrUnix) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, address)?;
    Ok(socket)
}

/// Creates a listening socket for a keeper: in `places` if they are given, or at an address that the kernel chooses.
///
/// # Errors
/// The system refuses.
pub(super) fn listen(places: Option<&KeeperPlaces>, device: &str) -> io::Result<(OwnedFd, Listening)> {
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let place = places.map(|places| (places.bind(&listener, device), places));
    let place = place.and_then(|(bound, places)| {
        // Log: the rate of starts of keepers bounds how often.
        let warn = |error: &io::Error| warn!("{}: keepers end with this daemon: {error}", places.path.display());
        bound.inspect_err(warn).ok()
    });
    if place.is_none() {
        rustix::net::bind(&listener, &SocketAddrUnix::new_unnamed())?;
    }
    rustix::net::listen(&listener, BACKLOG)?;
    let listening = match place {
        Some(place) => Listening::Place(place),
        None => Listening::Unnamed(rustix::net::getsockname(&listener)?.try_into()?),
    };
    Ok((listener, listening))
}

/// Address of a keeper.
#[derive(Debug)]
pub(super) enum Listening {
    /// The next daemon finds it.
    Place(KeeperPlace),
    Unnamed(SocketAddrUnix),
}

impl Listening {
    pub(super) const fn address(&self) -> &SocketAddrUnix {
        match self {
            Self::Place(place) => place.address(),
            Self::Unnamed(address) => address,
        }
    }

    /// Leaves the keeper for the next daemon.
    pub(super) fn leave(self) {
        if let Self::Place(place) = self {
            place.leave();
        }
    }
}

#[cfg(test)]
mod tests;
