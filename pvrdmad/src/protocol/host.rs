//! What a worker asks of the supervisor, which may do what the worker may not.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::message::Incoming;

/// Longest request of a worker, in bytes.
pub const MAX_HOST_REQUEST: usize = 4096;

/// What a worker asks for, or tells. The supervisor holds each against the configuration of that worker's network.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "host", rename_all = "kebab-case", deny_unknown_fields)]
pub enum HostRequest {
    /// A VMM connected. There is no reply.
    ClientConnected {
        /// Name of its device.
        device: String,
    },
    /// A VMM left. There is no reply.
    ClientGone {
        /// Name of its device.
        device: String,
    },
    /// A queue pair went to its error state, not by its guest. There is no reply.
    QueuePairFailed {
        /// Name of its device.
        device: String,
        /// Its number.
        qpn: u32,
        /// Address of its peer.
        peer: IpAddr,
        /// Who ended it and what happened before, in words.
        history: String,
    },
    /// A host beyond the uplink uses an address of a device. There is no reply.
    AddressConflict {
        /// Name of the device.
        device: String,
        /// Which address.
        address: IpAddr,
        /// Its VLAN.
        vlan: Option<u16>,
        /// The device keeps it.
        kept: bool,
    },
    /// The descriptor of a link anew, because its connection ended or its interface was made again. The reply carries
    /// it.
    Connect {
        /// Name of the device whose `nic` it is; none: the uplink of the network.
        device: Option<String>,
    },
    /// A keeper for a device, in the place of the one that it has. The reply carries the socket to it.
    Keeper {
        /// Name of the device.
        device: String,
    },
    /// An address of a guest for the host's interface.
    AddAddress {
        /// Which.
        address: IpAddr,
    },
    /// Takes it away again.
    RemoveAddress {
        /// Which.
        address: IpAddr,
    },
}

impl HostRequest {
    /// What a worker asks for in a frame, with the number that the reply needs.
    ///
    /// # Errors
    /// It is no request.
    pub fn parse(frame: &[u8]) -> Result<(u64, Self), serde_json::Error> {
        let Incoming { id, body } = serde_json::from_slice(frame)?;
        Ok((id, serde_json::from_str(body.get())?))
    }
}

/// What the supervisor says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostReply {
    /// As asked; a descriptor that was asked for is with it.
    Done {},
    /// Not as asked.
    Refused(String),
}
