//! A tap device: a network interface of the host whose other end is this process. A bridge or routes of the host
//! connect it to a network.

mod attach;
mod error;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_link::{Connector, Frames, Link, LinkInspect, MAX_LINK_FRAME, Readiness, Reconnect};
use rustix::io::Errno;

use super::InterfaceName;

pub use error::TapError;

/// Creates the interface, or attaches to it if it exists.
///
/// # Errors
/// Neither is possible.
pub fn attach(name: &InterfaceName) -> Result<OwnedFd, TapError> {
    attach::attach(name)
}

/// Attaches to an interface, for a process that may.
#[derive(Clone, Debug)]
pub struct TapConnector(pub InterfaceName);

impl Connector for TapConnector {
    fn connect(&self) -> io::Result<OwnedFd> {
        attach(&self.0).map_err(io::Error::other)
    }
}

/// A link to a tap device. The interface is created if it does not exist; its owner can use an existing one without
/// privileges. While the interface is down or deleted, sent frames are lost.
#[derive(Debug)]
pub struct TapLink {
    name: InterfaceName,
    device: Mutex<Option<Arc<OwnedFd>>>,
    reconnect: Reconnect,
    lost: AtomicU64,
}

impl TapLink {
    /// Creates the interface, or attaches to it if it exists.
    ///
    /// # Errors
    /// Neither is possible.
    pub fn open(name: InterfaceName) -> Result<Self, TapError> {
        let device = attach(&name)?;
        let connector = Arc::new(TapConnector(name.clone()));
        Ok(Self::from_device(name, device, connector))
    }

    /// Uses a device that is [attached](attach) to `name`. If the interface is deleted, `connector` attaches to it
    /// again.
    pub fn from_device(name: InterfaceName, device: OwnedFd, connector: Arc<dyn Connector>) -> Self {
        let device = Mutex::new(Some(Arc::new(device)));
        Self { name, device, reconnect: Reconnect::new(connector), lost: AtomicU64::new(0) }
    }

    fn device(&self) -> Option<Arc<OwnedFd>> {
        self.device.lock().clone()
    }

    /// Returns the device. Attaches to the interface again if it was deleted.
    fn attached(&self) -> Option<Arc<OwnedFd>> {
        let mut device = self.device.lock();
        if device.is_none() {
            *device = self.reconnect.attempt().map(Arc::new);
            if device.is_some() {
                // Log: only the host's administrator causes this, by deleting the interface and creating it again.
                log::info!("tap {}: it is back", self.name);
            }
        }
        device.clone()
    }

    fn detach(&self, old: &Arc<OwnedFd>, errno: Errno) {
        let mut device = self.device.lock();
        if device.as_ref().is_some_and(|now| Arc::ptr_eq(now, old)) {
            // Log: as above.
            log::warn!("tap {}: it went away: {errno}", self.name);
            *device = None;
        }
    }
}

impl Link for TapLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let Some(device) = self.attached() else { return };
        for _ in 0..most {
            let mut result = Ok(0);
            let more = frames.push_with(MAX_LINK_FRAME, |room| {
                result = rustix::io::read(&device, room);
                result.ok().filter(|&count| count > 0)
            });
            match result {
                Ok(_) | Err(Errno::INTR) if more => {}
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => return,
                Err(errno) => return self.detach(&device, errno),
            }
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let device = self.device();
        let mut taken = 0;
        for frame in frames.iter_from(from) {
            match device.as_ref().map_or(Err(Errno::BADFD), |device| rustix::io::write(device, frame)) {
                Ok(_) => {}
                Err(Errno::AGAIN) => return taken,
                // The interface is down or deleted, or the data are not a frame.
                Err(_) => _ = self.lost.fetch_add(1, Ordering::Relaxed),
            }
            taken += 1;
        }
        taken
    }

    fn readiness(&self) -> Readiness {
        let device = self.device();
        let wait = device.is_none().then(|| self.reconnect.interval());
        Readiness { readable: device.clone(), writable: device, wait, ..Readiness::default() }
    }

    fn inspect(&self) -> LinkInspect {
        let up = self.device.try_lock().map(|device| device.is_some());
        LinkInspect { kind: "tap", name: self.name.to_string(), peers: Vec::new(), up: up.into() }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
