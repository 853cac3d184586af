//! What is kept of a network over the lives of its workers: its configuration and its sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::services::Services;
use super::sockets::NetworkSockets;
use super::timing::Timing;
use crate::config::Device;
use crate::protocol::{NetworkSetup, Request, VERSION};

/// What a worker's process runs.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The file.
    pub(crate) path: PathBuf,
    /// In front of the name of the network, which is there to be seen in lists of processes.
    pub(crate) arguments: Vec<String>,
}

impl Program {
    /// This program, as a worker. As it is now: the file may be replaced while we run.
    pub(crate) fn own() -> Self {
        Self { path: PathBuf::from("/proc/self/exe"), arguments: vec!["worker".to_owned()] }
    }
}

/// What is kept of a network.
#[derive(Debug)]
pub(super) struct Plan {
    /// Without devices.
    pub(super) setup: NetworkSetup,
    pub(super) devices: Vec<Device>,
    pub(super) sockets: NetworkSockets,
    pub(super) services: Arc<Services>,
    pub(super) timing: Timing,
}

impl Plan {
    pub(super) fn name(&self) -> &str {
        &self.setup.network.name
    }

    /// Descriptors of the uplink, for a worker.
    pub(super) fn uplink(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.uplink()
    }

    /// The first request. The socket of upcalls goes in front of its descriptors.
    pub(super) fn hello(&self) -> Request {
        Request::Hello { version: VERSION, network: Box::new(self.setup.clone()) }
    }

    /// A request for each device, with its descriptors and its name.
    pub(super) fn additions(&self) -> impl Iterator<Item = io::Result<(&str, Request, Vec<OwnedFd>)>> {
        self.devices.iter().enumerate().map(|(index, device)| {
            let request = Request::AddDevice { device: Box::new(device.clone()) };
            Ok((device.config.name.as_str(), request, self.sockets.device(index)?))
        })
    }
}
