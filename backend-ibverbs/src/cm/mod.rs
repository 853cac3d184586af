//! The connection manager's datagrams beyond this process.
//!
//! QP 1 of the host's port belongs to the host's kernel. Its `ib_umad` lends one class of management datagrams to one process,
//! which for the connection manager's class is possible while the kernel's own manager (`ib_cm`) is not loaded. One file of
//! `ib_umad` receives for all devices. Each device sends with a file of its own: the kernel holds a file while it
//! looks for the MAC address of a peer, and it refuses two datagrams with one transaction number on a file.
//!
//! A guest sends from its own address only, so the host must have that address ([`Bound::is_own`]); what arrives goes to the device
//! whose address it was sent to. The kernel replaces the upper half of transaction numbers; managers find each other by
//! communication ids, which stay as they are.
//!
//! [`Bound::is_own`]: crate::gid::Bound::is_own

mod message;
mod receiver;
mod sender;
mod umad;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use pvrdma_verbs::Counter;
use thiserror::Error;

use crate::adapter::Adapter;
use crate::backend::IbverbsConfig;
use crate::counters::Strays;
use crate::gid::{Fabric, HostGids};
use crate::worker::Worker;

pub(crate) use message::Outgoing;
pub(crate) use sender::Sender;
use umad::Umad;

/// How far the guests' connection managers (`rdma_cm`) reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CmMode {
    /// As with [`CmMode::Umad`] if that is possible; otherwise as with [`CmMode::Local`], with a warning.
    #[default]
    Auto,
    /// Everybody, through `/dev/infiniband/umadN`.
    Umad,
    /// Guests of this process.
    Local,
}

/// Why the host's QP 1 cannot be had.
#[derive(Debug, Error)]
pub(crate) enum CmError {
    #[error("port {port} of {device} has no /dev/infiniband/umad file (is the kernel's ib_umad loaded?)")]
    NoFile { device: String, port: u8 },
    #[error("cannot open {}: {source} (needs read and write access)", .path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "the host's kernel has its own connection manager on QP 1 (rmmod rdma_ucm rdma_cm ib_cm, and what else uses ib_cm)"
    )]
    KernelHasIt,
    #[error("{}: another process has the connection manager on QP 1", .path.display())]
    ProcessHasIt { path: PathBuf },
    #[error("{}: {source}", .path.display())]
    Refused { path: PathBuf, source: io::Error },
    #[error("no thread for the connection manager: {0}")]
    Thread(io::Error),
}

/// The host's connection manager, for as long as this lives.
pub(crate) struct ConnectionManager {
    path: PathBuf,
    gids: HostGids,
    strays: Arc<Strays>,
    _receiver: Worker,
}

impl fmt::Debug for ConnectionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionManager").field("path", &self.path).finish_non_exhaustive()
    }
}

impl ConnectionManager {
    /// Takes the class, and starts to receive.
    pub(crate) fn start(config: &IbverbsConfig, gids: &HostGids, fabric: &Arc<Fabric>) -> Result<Self, CmError> {
        let path = umad::path(&config.device, config.port)
            .ok_or_else(|| CmError::NoFile { device: config.device.clone(), port: config.port })?;
        let file = Umad::receiving(&path)?;
        let strays = Arc::<Strays>::default();
        let receiver = receiver::start(file, gids.clone(), Arc::clone(fabric), Arc::clone(&strays));
        let receiver = receiver.map_err(CmError::Thread)?;
        log::info!("{}: connection manager on {}", config.device, path.display());
        Ok(Self { path, gids: gids.clone(), strays, _receiver: receiver })
    }

    /// The way out for a device. Without one, which is said in the log, the device has that inside this process.
    pub(crate) fn sender(&self, adapter: &Adapter) -> Option<Sender> {
        let start =
            |file| Sender::start(file, self.gids.clone(), &adapter.name, &adapter.counters).map_err(CmError::Thread);
        let sender = Umad::sending(&self.path).and_then(start);
        sender.inspect_err(|error| log::error!("{}: {error}", adapter.name)).ok()
    }

    /// What was received for nobody.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.strays.list()
    }
}
