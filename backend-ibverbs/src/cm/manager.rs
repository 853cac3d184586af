//! The host's connection manager: one file that receives for all devices, and one that sends for each.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use pvrdma_verbs::{Counter, DeviceLog};

use super::error::CmError;
use super::receiver;
use super::sender::Sender;
use super::umad::{self, Umad};
use crate::config::IbverbsConfig;
use crate::counters::{Counters, Strays};
use crate::gid::{Fabric, HostGids};
use crate::worker::Worker;

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
        // Log: once, at the start.
        log::info!("{}: connection manager on {}", config.device, path.display());
        Ok(Self { path, gids: gids.clone(), strays, _receiver: receiver })
    }

    /// Returns the way out for the device of this name. Without one, which the log says, the device reaches this
    /// process only.
    pub(crate) fn sender(&self, log: &DeviceLog, counters: &Arc<Counters>) -> Option<Sender> {
        let start = |file| Sender::start(file, self.gids.clone(), log.name(), counters).map_err(CmError::Thread);
        let sender = Umad::sending(&self.path).and_then(start);
        sender.inspect_err(|error| log.error(module_path!(), format_args!("{error}"))).ok()
    }

    /// What was received for nobody.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        self.strays.list()
    }
}
