//! Host side of the connection manager: one file that receives for all devices, and one file per device that sends.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use pvrdma_base::{Counter, DeviceLog};

use super::error::CmError;
use super::receiver;
use super::sender::Sender;
use super::umad::{self, Umad};
use crate::config::IbverbsConfig;
use crate::counters::{Counters, Strays};
use crate::gid::{Fabric, HostGids};
use crate::worker::Worker;

/// Connection manager on the host. It is active until dropped.
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
    /// Registers for the management class, and starts to receive.
    pub(crate) fn start(config: &IbverbsConfig, gids: &HostGids, fabric: &Arc<Fabric>) -> Result<Self, CmError> {
        let path = umad::path(&config.device, config.port)
            .ok_or_else(|| CmError::NoFile { device: config.device.clone(), port: config.port })?;
        let file = Umad::receiving(&path)?;
        let strays = Arc::<Strays>::default();
        let receiver = receiver::start(file, gids.clone(), Arc::clone(fabric), Arc::clone(&strays));
        let receiver = receiver.map_err(CmError::Thread)?;
        // Log: once, at the start.
        log::info!("{}: connection manager on {}", config.device, path.display());
        Ok(Self { path, gids: gids.clone(), strays, _receiver: receiver })
    }

    /// Returns a sender for the device with this name. Without one, which is logged, the device reaches this process
    /// only.
    pub(crate) fn sender(&self, log: &DeviceLog, counters: &Arc<Counters>) -> Option<Sender> {
        let start = |file| Sender::start(file, self.gids.clone(), log.name(), counters).map_err(CmError::Thread);
        let sender = Umad::sending(&self.path).and_then(start);
        sender.inspect_err(|error| log.error(module_path!(), format_args!("{error}"))).ok()
    }

    /// Returns the counters of received datagrams that belong to no device.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.strays.list()
    }
}
