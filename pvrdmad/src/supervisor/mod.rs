//! The process that opens sockets and starts workers: it has the rights, and touches neither the memory of a guest nor
//! what a guest sends.
//!
//! [`Supervisor`] has a [`network::Network`] for each network of the configuration. Where networks are isolated, a
//! thread ([`process`]) starts the worker's process, tells it what it is for, watches it ([`session`]) and starts the
//! next one when it ends. Otherwise the same requests go to a [`crate::worker::Worker`] in this process.

mod connection;
mod network;
mod plan;
mod process;
mod services;
mod session;
mod sockets;
#[cfg(test)]
mod tests;
mod timing;
mod upcalls;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use pvrdma_dev::ObjectKind;
use pvrdma_ether_link::vxlan::VxlanPorts;
use serde_json::value::RawValue;

use self::connection::CallError;
use self::network::Network;
use self::plan::Plan;
pub(crate) use self::plan::Program;
use self::timing::Timing;
use crate::config::Config;
use crate::protocol::{Reply, Request};
use crate::status::{DaemonStatus, DeviceReport};

/// Why it is not known that a capture runs.
#[derive(Debug)]
pub(crate) enum CaptureError {
    /// It does not, which whoever asked has yet to be told.
    Refused(String),
    /// The worker had the connection when it ended. What stands there already is a capture, perhaps.
    HandedOver,
}

/// All networks. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    started: Instant,
    backend: String,
    networks: Vec<Network>,
}

impl Supervisor {
    /// Opens all sockets and starts all networks: in processes that run `program`, or else in this one.
    ///
    /// # Errors
    /// A socket cannot be made or a network cannot be served; nothing is left behind then.
    pub(crate) fn start(config: &Config, program: Option<&Program>) -> Result<Self> {
        Self::with_timing(config, program, Timing::default())
    }

    fn with_timing(config: &Config, program: Option<&Program>, timing: Timing) -> Result<Self> {
        // All sockets first: they are what fails most often.
        let tunnels = VxlanPorts::default();
        let plans = config.networks.iter().map(|network| Plan::new(config, network, &tunnels, timing).map(Arc::new));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let networks = plans.into_iter().map(|plan| {
            let name = plan.name().to_owned();
            Network::start(plan, program.cloned()).with_context(|| format!("network {name}"))
        });
        let networks = networks.collect::<Result<_>>()?;
        Ok(Self { started: Instant::now(), backend: config.backend.to_string(), networks })
    }

    /// Has all workers end, without waiting for that.
    pub(crate) fn begin_stop(&self) {
        self.networks.iter().for_each(Network::begin_stop);
    }

    /// Everything at this moment. Workers are asked all at once; one that does not reply in time is said not to.
    pub(crate) fn status(&self) -> DaemonStatus {
        let asked: Vec<_> = self.networks.iter().map(Network::ask_status).collect();
        let deadline = self.networks.first().map_or_else(Instant::now, Network::status_deadline);
        let replies = self.networks.iter().zip(asked).map(|(network, asked)| network.status(asked, deadline));
        let (networks, said): (Vec<_>, Vec<_>) = replies.unzip();
        let lost_mappings = said.iter().flatten().map(|status| status.lost_mappings).fold(0, u64::saturating_add);
        let devices: Vec<DeviceReport> = said.into_iter().flatten().flat_map(|status| status.devices).collect();
        DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            backend: self.backend.clone(),
            lost_mappings,
            // Whoever serves the socket knows them.
            control: BTreeMap::new(),
            networks,
            devices,
        }
    }

    /// The objects of a device.
    ///
    /// # Errors
    /// There is no such device, or its network does not say.
    pub(crate) fn show(&self, device: &str, object: ObjectKind) -> Result<Box<RawValue>, String> {
        let network = self.network(device)?;
        let request = Request::Show { device: device.to_owned(), object };
        match network.call(request, Vec::new()).map_err(|error| failure(network, error))? {
            // Whoever asked takes what ends with a line.
            Reply::Objects(objects) if !objects.get().contains('\n') => Ok(objects),
            Reply::Error(problem) => Err(problem),
            _ => Err("its worker's reply is not understood".to_owned()),
        }
    }

    /// Has what goes over a device sent to a connection, to which the worker says by itself that it does.
    ///
    /// # Errors
    /// There is no such device, or it cannot be watched.
    pub(crate) fn capture(&self, device: &str, snaplen: Option<u32>, to: OwnedFd) -> Result<(), CaptureError> {
        let network = self.network(device).map_err(CaptureError::Refused)?;
        let problem = match network.call(Request::Capture { device: device.to_owned(), snaplen }, vec![to]) {
            Ok(Reply::Capturing {}) => return Ok(()),
            Ok(Reply::Error(problem)) => problem,
            Ok(_) => "its worker's reply is not understood".to_owned(),
            Err(CallError::Ended) => return Err(CaptureError::HandedOver),
            Err(error) => failure(network, error),
        };
        Err(CaptureError::Refused(problem))
    }

    /// The network that has this device.
    fn network(&self, device: &str) -> Result<&Network, String> {
        self.networks.iter().find(|network| network.has(device)).ok_or_else(|| {
            let names: Vec<_> = self.networks.iter().flat_map(Network::devices).collect();
            format!("there is no device '{device}' (the devices are {})", names.join(", "))
        })
    }
}

/// Why a network gave no reply, in words.
fn failure(network: &Network, error: CallError) -> String {
    format!("network {}: {error}", network.name())
}
