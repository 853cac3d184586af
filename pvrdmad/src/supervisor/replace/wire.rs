//! Messages between the supervisor that is replaced and the next one.
//!
//! | from the old supervisor | from the new one |
//! | --- | --- |
//! | [`Old::Daemon`], its descriptors, and for each network [`Old::Network`] with descriptors; [`Old::End`] | |
//! | | [`New::Prepared`], and for each network the socket to its new worker; or [`New::Refused`] |
//! | [`Old::Ready`] | |
//! | | [`New::Proceed`] |
//! | [`Old::Replaced`] | |
//! | | [`New::Serves`] |
//!
//! The old supervisor may send [`Old::Kept`] in place of its second and third message.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use pvrdma_vfio_user_server::socket::FileIdentity;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::logging::LogFilter;
use crate::metrics::DescribedPlace;
use crate::protocol::Upgraded;
use crate::protocol::exchange;
use crate::supervisor::plan::transfer::DescribedPlan;

/// Longest message in bytes.
const MAX_MESSAGE: usize = 64 << 20;

/// Maximum number of descriptors of a network.
const MAX_NETWORK: usize = 1 << 16;

/// Message of the old supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Old {
    /// Everything but the networks.
    Daemon(Box<DescribedDaemon>),
    /// A network.
    Network {
        /// Its plan.
        plan: Box<DescribedPlan>,
        /// It ends with its last device.
        temporary: bool,
        /// Number of descriptors.
        descriptors: usize,
    },
    /// There are no more networks.
    End {},
    /// All networks stand still, and all new workers are ready.
    Ready {},
    /// The new supervisor serves all networks, with these results.
    Replaced { networks: Vec<Upgraded> },
    /// The old supervisor serves all networks as before, for these reasons.
    Kept { networks: Vec<Upgraded> },
}

/// Message of the new supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum New {
    /// The new workers wait for their devices.
    Prepared {},
    /// The networks can be handed over now.
    Proceed {},
    /// The networks cannot be taken, for these reasons.
    Refused { networks: Vec<Upgraded> },
    /// It serves the control socket.
    Serves {},
}

/// State of a daemon without its networks and descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DescribedDaemon {
    /// Current configuration.
    pub(super) config: Config,
    /// Configuration of the start or the last reload.
    pub(super) loaded: Config,
    /// Log filter, if it was changed at run time.
    pub(super) log: Option<LogFilter>,
    /// File of the control socket, if there is one.
    pub(super) control: Option<Option<FileIdentity>>,
    pub(super) metrics: Option<DescribedPlace>,
}

impl DescribedDaemon {
    /// Returns the number of descriptors: the control socket, then that of metrics.
    pub(super) fn descriptors(&self) -> usize {
        usize::from(self.control.is_some()).saturating_add(usize::from(self.metrics.is_some()))
    }
}

/// A network that arrived.
#[derive(Debug)]
pub(super) struct ArrivedNetwork {
    pub(super) plan: DescribedPlan,
    pub(super) temporary: bool,
    pub(super) fds: Vec<OwnedFd>,
}

/// Receives a message of the old supervisor.
///
/// # Errors
/// It has ended, does not continue, or its message is not understood.
pub(super) fn get_old(stream: &UnixStream) -> Result<Old> {
    exchange::get(stream, MAX_MESSAGE)?.context("the old daemon has ended")
}

/// Receives a message of the new supervisor.
///
/// # Errors
/// It has ended, does not continue, or its message is not understood.
pub(super) fn get_new(stream: &UnixStream) -> Result<New> {
    exchange::get(stream, MAX_MESSAGE)?.context("the new program ended")
}

/// Receives the description of a daemon.
///
/// # Errors
/// It is not understood.
pub(super) fn get_daemon(stream: &UnixStream) -> Result<(DescribedDaemon, Vec<OwnedFd>, Vec<ArrivedNetwork>)> {
    let Old::Daemon(daemon) = get_old(stream)? else { anyhow::bail!("the old daemon does not describe itself") };
    let fds = exchange::get_descriptors(stream, daemon.descriptors())?;
    let mut networks = Vec::new();
    loop {
        match get_old(stream)? {
            Old::Network { plan, temporary, descriptors } => {
                ensure!(descriptors <= MAX_NETWORK, "a network with {descriptors} descriptors");
                let fds = exchange::get_descriptors(stream, descriptors)?;
                networks.push(ArrivedNetwork { plan: *plan, temporary, fds });
            }
            Old::End {} => return Ok((*daemon, fds, networks)),
            _ => anyhow::bail!("the old daemon does not describe its networks"),
        }
    }
}
