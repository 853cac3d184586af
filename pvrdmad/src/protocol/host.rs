//! Requests of a worker to its supervisor, which has privileges that the worker lacks.

use std::net::IpAddr;

use pvrdma_rxe::FailureCause;
use serde::{Deserialize, Serialize};

use super::message::Incoming;

/// Longest request of a worker in bytes.
pub const MAX_HOST_REQUEST: usize = 4096;

/// Requests and notes of a worker. The supervisor checks each against the configuration of that worker's network.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "host", rename_all = "kebab-case", deny_unknown_fields)]
pub enum HostRequest {
    /// A VMM connected. There is no reply.
    ClientConnected {
        /// Name of its device.
        device: String,
    },
    /// A VMM disconnected. There is no reply.
    ClientGone {
        /// Name of its device.
        device: String,
    },
    /// The client that a crashed worker has left is served. There is no reply.
    ClientRecovered {
        /// Name of its device.
        device: String,
        /// It is the client of the network function.
        network_function: bool,
        /// Reason why the driver was not told.
        problem: Option<String>,
    },
    /// A queue pair entered the error state without a request of its guest, and the log has a line about it. There is
    /// no reply.
    QueuePairFailed {
        /// Name of its device.
        device: String,
        /// Its number.
        qpn: u32,
        /// Address of its peer.
        peer: IpAddr,
        /// Cause.
        cause: FailureCause,
        /// The half that failed and preceding events, as text.
        history: String,
    },
    /// A host beyond the uplink uses an address of a device. There is no reply.
    AddressConflict {
        /// Name of the device.
        device: String,
        /// The address.
        address: IpAddr,
        /// Its VLAN.
        vlan: Option<u16>,
        /// Tells whether the device keeps it.
        kept: bool,
    },
    /// Reopens the descriptor of a link, because its connection ended or its interface was recreated. The reply carries
    /// the descriptor.
    Connect {
        /// Name of the device whose `nic` it is, or `None` for the uplink of the network.
        device: Option<String>,
        /// Index of the interface, for an uplink that has two.
        #[serde(default)]
        interface: usize,
    },
    /// Starts a keeper for a device in place of the current one. The reply carries the socket to the keeper.
    Keeper {
        /// Name of the device.
        device: String,
    },
    /// Adds an address of a guest to the host's interface.
    AddAddress {
        /// The address.
        address: IpAddr,
    },
    /// Removes an address from the host's interface.
    RemoveAddress {
        /// The address.
        address: IpAddr,
    },
}

impl HostRequest {
    /// Parses a frame of a worker. Returns the number that the reply must carry, and the request.
    ///
    /// # Errors
    /// The frame is not a request.
    pub fn parse(frame: &[u8]) -> Result<(u64, Self), serde_json::Error> {
        let Incoming { id, body } = serde_json::from_slice(frame)?;
        Ok((id, serde_json::from_str(body.get())?))
    }
}

/// Reply of the supervisor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostReply {
    /// The request was performed. A requested descriptor accompanies the reply.
    Done {},
    /// The request was refused.
    Refused(String),
}
