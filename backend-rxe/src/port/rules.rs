//! Rules of a device on its network: its VLAN, its addresses, and the marks on its packets.
//!
//! The rules are those of a port of a virtual switch. Without a VLAN, both functions send and receive untagged frames
//! only. A port with a VLAN is an access port: the functions still send and receive untagged frames, and the network
//! carries them in that VLAN and delivers no others. Only on a trunk do the functions choose tags themselves.

use pvrdma_roce::{Congestion, EgressMarking, IcrcRule};
use pvrdma_verbs::{AddressRule, VerbsError};
use serde::{Deserialize, Serialize};

/// Treatment of IEEE 802.1Q tags by the ports of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VlanMode {
    /// Frames are untagged, or have a priority tag (VLAN 0).
    #[default]
    Untagged,
    /// Access port of this VLAN, 1 to 4094: the functions send and receive untagged frames, which the network carries
    /// in that VLAN. Frames of other VLANs are not delivered.
    Access(u16),
    /// The functions choose tags themselves: each GID has the VLAN that it was bound with, and frames of the network
    /// function pass unchanged.
    Trunk,
}

/// Rules of a port. By default it sends from its own MAC address only.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PortRules {
    /// RDMA packets without a VLAN carry their priority in a tag with VLAN 0.
    pub priority_tags: bool,
    /// Frames that the network function can send although they are not its own.
    pub forged: ForgedTransmits,
    /// Addresses of the device, whether its driver runs or not. Without a rule, only the rule of the RDMA function
    /// applies.
    pub addresses: Option<AddressRule>,
    /// IP packets of the network function must come from an address listed in `addresses`, from the link-local address
    /// of the MAC address, or from the unspecified address.
    pub source_guard: bool,
    /// The network function is not a router: it cannot send router advertisements.
    pub ra_guard: bool,
    /// The network function is not a DHCP server or relay.
    pub dhcp_guard: bool,
    /// The link leads to no other hosts, so the device need not probe for addresses there.
    pub alone: bool,
    /// Congestion control with these parameters.
    pub congestion: Option<Congestion>,
    /// Connections negotiate selective acknowledgements with peers that also run this engine
    /// ([`pvrdma_roce::wire::OFFER`]).
    pub negotiate: bool,
    /// Connections that have negotiated them change their path, by another UDP source port, when it is congested or the
    /// peer stops responding ([`pvrdma_roce::Tuning::multipath`]).
    pub multipath: bool,
    /// Requests from other hosts that are held off while the device is paused.
    pub held: HeldRequests,
    /// Connections leave the ICRC out if the peer agrees ([`pvrdma_roce::wire::REQUEST_WITHOUT_ICRC`]). For links that
    /// have an integrity check of their own, or whose ends the administrator trusts. Requires `negotiate`.
    #[serde(default)]
    pub omit_icrc: bool,
}

/// Rules for the packets of queue pairs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PacketRules {
    /// Marking of outgoing packets.
    pub(crate) marks: EgressMarking,
    /// Use of the ICRC by connections.
    pub(crate) icrc: IcrcRule,
}

pvrdma_base::setters!(PortRules {
    with_priority_tags => priority_tags: bool,
    with_forged => forged: ForgedTransmits,
    with_addresses => addresses: Option<AddressRule>,
    with_source_guard => source_guard: bool,
    with_ra_guard => ra_guard: bool,
    with_dhcp_guard => dhcp_guard: bool,
    with_alone => alone: bool,
    with_congestion => congestion: Option<Congestion>,
    with_negotiate => negotiate: bool,
    with_multipath => multipath: bool,
    with_held => held: HeldRequests,
    with_omit_icrc => omit_icrc: bool,
});

/// Requests from other hosts that are held off while the device is paused: the peer gets an RNR NAK, and repeats the
/// request after a while without spending a retry for lost packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeldRequests {
    /// None: the peer spends its retries.
    Off,
    /// SENDs, for which the InfiniBand specification provides RNR NAKs.
    #[default]
    Sends,
    /// RDMA WRITEs and READs and atomics, too. Linux's `rdma_rxe` accepts this.
    All,
}

/// Frames that a network function can send although they are not its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ForgedTransmits {
    /// None.
    #[default]
    Off,
    /// Frames from Ethernet addresses other than the device's, as a bridge inside the guest sends them.
    Mac,
    /// RoCE packets, which receivers cannot tell from those of the device's queue pairs.
    Roce,
    /// Both.
    All,
}

impl ForgedTransmits {
    /// Returns `true` if frames from other Ethernet addresses pass.
    pub const fn allow_mac(self) -> bool {
        matches!(self, Self::Mac | Self::All)
    }

    /// Returns `true` if RoCE packets pass.
    pub const fn allow_roce(self) -> bool {
        matches!(self, Self::Roce | Self::All)
    }
}

/// Reason why a frame of the network function is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Violation {
    /// Its source is not the device's MAC address.
    Forged,
    /// Its tag, or the lack of one, would put it into another VLAN.
    Vlan,
    /// It is RoCE, or may be.
    Roce,
    /// It is ARP, RARP or neighbour discovery that cannot be parsed, or that claims an address that the device cannot
    /// have, or an Ethernet address other than its own.
    Address,
    /// It is an IP packet whose source address is not listed for the device.
    Source,
    /// It is from a router or a DHCP server, which the device is not.
    Server,
    /// It controls the Ethernet link, which the device shares with others.
    Control,
    /// It has a checksum or segmentation offload, but is not a complete TCP segment or UDP datagram.
    Offload,
}

impl VlanMode {
    /// Returns the VLAN of all traffic of the port, if it is an access port.
    pub(crate) const fn access(self) -> Option<u16> {
        match self {
            Self::Access(vlan) => Some(vlan),
            Self::Untagged | Self::Trunk => None,
        }
    }

    /// Returns the VLAN of a GID that the guest binds in `asked`.
    ///
    /// # Errors
    /// The guest asks for a VLAN on a network without VLANs.
    pub(crate) const fn of_gid(self, asked: Option<u16>) -> Result<Option<u16>, VerbsError> {
        match (self, asked) {
            (Self::Access(vlan), _) => Ok(Some(vlan)),
            (Self::Untagged, Some(_)) => Err(VerbsError::Unsupported("a VLAN on a network without VLANs")),
            (Self::Untagged, None) => Ok(None),
            (Self::Trunk, _) => Ok(asked),
        }
    }
}
