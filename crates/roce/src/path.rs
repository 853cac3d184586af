//! Addressing of frames: all headers before the BTH, which are the same for all packets of a QP (IBA annex A17.4; for
//! RoCE v1 annex A16).

use pvrdma_packet::MacAddr;
use pvrdma_packet::{Ethernet, Vlan};
use pvrdma_verbs_types::{AddressVector, Gid, GidType, Mtu, Psn, Qpn, UdDestination};
use serde::Serialize;

use crate::dcqcn::Congestion;
use crate::wire::{
    Bth, BuildError, CrcError, Ecn, Extension, FrameWriter, Grh, Header, Ipv4, Ipv6, Network, Opcode, Packet, Udp,
    connected_flow_label, connected_source_port, datagram_source_port,
};

/// Hop limit if the consumer did not choose one.
const DEFAULT_HOP_LIMIT: u8 = 64;

/// ECN field of a sender that reacts to marks, ECT(0) (RFC 3168).
const ECT_0: u8 = 2;
/// Mask of the ECN field in a traffic class (RFC 3168, section 5).
const ECN_FIELD: u8 = 3;
/// Bits of a UDP source port, and of a flow label, that select among equal-cost paths: ports stay in 0xc000..=0xffff.
pub(crate) const ENTROPY: u16 = 0x3fff;
/// Returns the entropy of a packet with the source port `port`, of a connection whose own one is `own`.
pub(crate) const fn entropy_of(port: u16, own: u16) -> u16 {
    (port ^ own) & ENTROPY
}

/// Bytes behind the BTH of a congestion notification, all zero (IBA annex A17.9.3).
const NOTIFICATION_LEN: usize = 16;

/// Origin of frames: the local addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Local Ethernet address.
    pub mac: MacAddr,
    /// Local GID.
    pub gid: Gid,
    /// Encapsulation of the GID, RoCE v1 or v2.
    pub kind: GidType,
    /// VLAN of the GID.
    pub vlan: Option<u16>,
    /// Marking of outgoing packets.
    pub marks: EgressMarking,
    /// Use of the ICRC by connections.
    pub icrc: IcrcRule,
}

/// Use of the ICRC by the connections of a device. It is a decision of the administrator, which no peer can change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IcrcRule {
    /// Every packet has an ICRC, and packets with a wrong one are dropped.
    #[default]
    Always,
    /// Two ends with this rule leave the ICRC out ([`crate::wire::REQUEST_WITHOUT_ICRC`]). Permitted only if the link
    /// has an integrity check of its own, or is trusted.
    UnlessAgreed,
}

/// Information for switches in packets, besides the traffic class that the consumer chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EgressMarking {
    /// Packets without a VLAN carry their priority as well, in a tag with VLAN 0.
    pub priority_tags: bool,
    /// Connected QPs react to congestion, and announce that: ECT(0) replaces the consumer's ECN bits.
    pub ecn: bool,
}

/// Addresses and marks of the packets of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    ethernet: Ethernet,
    network: Network,
    icrc: IcrcRule,
}

/// Endpoints of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PathInspect {
    /// Local GID.
    pub source: Gid,
    /// GID of the peer.
    pub destination: Gid,
    /// Ethernet address of the peer, or of the router to it.
    pub destination_mac: MacAddr,
    /// IEEE 802.1Q VLAN, if frames carry a tag: 0 for a priority tag.
    pub vlan: Option<u16>,
    /// UDP source port, by which switches select among equal-cost paths. `null`: RoCE v1.
    pub source_port: Option<u16>,
}

impl Path {
    /// Exports the addresses.
    pub fn inspect(&self) -> PathInspect {
        PathInspect {
            source: self.network.source(),
            destination: self.network.destination(),
            destination_mac: self.ethernet.destination,
            vlan: self.ethernet.vlan.map(|vlan| vlan.vid),
            source_port: self.source_port(),
        }
    }

    /// Builds the path of a connected QP. `None` if one GID is IPv4 and the other is not.
    #[inline]
    pub fn connected(origin: &Origin, av: &AddressVector, local: Qpn, remote: Qpn) -> Option<Self> {
        let av = match origin.kind {
            GidType::RoceV2 if origin.marks.ecn => {
                AddressVector { traffic_class: av.traffic_class & !ECN_FIELD | ECT_0, ..*av }
            }
            _ => *av,
        };
        let port = connected_source_port(av.flow_label, local, remote);
        let av = match origin.kind {
            GidType::RoceV2 => AddressVector { flow_label: connected_flow_label(av.flow_label, local, remote), ..av },
            GidType::RoceV1 => av,
        };
        Self::new(origin, &av, port)
    }

    /// Builds the path of a datagram. `None` if one GID is IPv4 and the other is not.
    #[inline]
    pub fn datagram(origin: &Origin, to: &UdDestination, local: Qpn) -> Option<Self> {
        let av = AddressVector {
            dgid: to.dgid,
            sgid_index: to.sgid_index,
            flow_label: to.flow_label,
            hop_limit: to.hop_limit,
            traffic_class: datagram_traffic_class(origin.kind, to.traffic_class),
            service_level: to.service_level,
            dmac: to.dmac,
        };
        // The sender and the receiver of a datagram have agreed on nothing.
        let origin = Origin { icrc: IcrcRule::Always, ..*origin };
        Self::new(&origin, &av, datagram_source_port(local))
    }

    fn new(origin: &Origin, av: &AddressVector, source_port: u16) -> Option<Self> {
        let &AddressVector { dgid: destination, traffic_class, .. } = av;
        // With a hop limit of 0 a packet would reach no host, so the value selects the default.
        let hop_limit = if av.hop_limit == 0 { DEFAULT_HOP_LIMIT } else { av.hop_limit };
        let flow_label = av.flow_label & 0xf_ffff;
        let udp = Udp { source_port, checksum: 0 };
        let network = match (origin.kind, origin.gid.ipv4(), destination.ipv4()) {
            (GidType::RoceV1, ..) => {
                Network::V1(Grh { traffic_class, flow_label, hop_limit, source: origin.gid, destination })
            }
            (GidType::RoceV2, Some(source), Some(destination)) => {
                let dont_fragment = true;
                let ip = Ipv4 { traffic_class, identification: 0, dont_fragment, hop_limit, source, destination };
                Network::V2Ipv4(ip, udp)
            }
            (GidType::RoceV2, None, None) => {
                let ip = Ipv6 { traffic_class, flow_label, hop_limit, source: origin.gid, destination };
                Network::V2Ipv6(ip, udp)
            }
            (GidType::RoceV2, ..) => return None,
        };
        // The service level selects the traffic class of a lossless network for a tagged frame.
        let vid = origin.vlan.or(if origin.marks.priority_tags { Some(0) } else { None });
        let vlan = vid.map(|vid| Vlan { pcp: av.service_level & 7, dei: false, vid });
        let ethernet = Ethernet { destination: av.dmac, source: origin.mac, vlan };
        Some(Self { ethernet, network, icrc: origin.icrc })
    }

    /// Returns `true` if the ICRC may be left out on this path, in agreement with the peer.
    #[inline]
    pub const fn may_omit_icrc(&self) -> bool {
        matches!(self.icrc, IcrcRule::UnlessAgreed)
    }

    /// Verifies the checksums of a packet of the peer, by the rule of this path.
    ///
    /// # Errors
    /// The check that failed.
    #[inline]
    pub fn verify(&self, packet: &Packet<'_>) -> Result<(), CrcError> {
        match self.icrc {
            IcrcRule::Always => packet.verify(),
            IcrcRule::UnlessAgreed => packet.verify_unless_omitted(),
        }
    }

    /// Starts a frame with `payload_len` bytes of payload. `ident` is the last IPv4 identification of this sender.
    ///
    /// # Errors
    /// The extension headers do not match the opcode, or `out` is too small.
    #[inline]
    pub fn frame<'b>(
        &self,
        ident: &mut u16,
        bth: Bth,
        extension: Extension,
        payload_len: usize,
        out: &'b mut [u8],
    ) -> Result<FrameWriter<'b>, BuildError> {
        let mut network = self.network;
        if let Network::V2Ipv4(ip, _) = &mut network {
            // The identification must not be 0: a raw socket would replace it, but the ICRC covers it.
            *ident = ident.checked_add(1).unwrap_or(1);
            ip.identification = *ident;
        }
        FrameWriter::new(&Header { ethernet: self.ethernet, network, bth, extension }, payload_len, out)
    }

    /// Inverts these of the [`ENTROPY`] bits in the UDP source port and the flow label, so that switches that hash them
    /// select another of several equal-cost paths. RoCE v1 has no such bits.
    pub(super) fn turn(&mut self, bits: u16) {
        let bits = bits & ENTROPY;
        match &mut self.network {
            Network::V1(_) => {}
            Network::V2Ipv4(_, udp) => udp.source_port ^= bits,
            Network::V2Ipv6(ip, udp) => {
                udp.source_port ^= bits;
                ip.flow_label ^= u32::from(bits);
            }
        }
    }

    /// UDP source port. `None`: RoCE v1.
    pub(super) const fn source_port(&self) -> Option<u16> {
        self.network.source_port()
    }

    /// Writes a congestion notification (CNP) about the packets that the QP `remote` sends. Returns the length of the
    /// frame in bytes; `None` if `out` is too small.
    #[inline]
    pub fn notification(&self, remote: Qpn, config: &Congestion, out: &mut [u8]) -> Option<usize> {
        let mut path = *self;
        // ECT as adapters set it, so that a congested switch marks the notification instead of dropping it.
        let class = config.cnp_dscp << 2 | ECT_0;
        match &mut path.network {
            Network::V1(grh) => grh.traffic_class = class,
            Network::V2Ipv4(ip, _) => ip.traffic_class = class,
            Network::V2Ipv6(ip, _) => ip.traffic_class = class,
        }
        if let Some(vlan) = &mut path.ethernet.vlan {
            vlan.pcp = config.cnp_priority & 7;
        }
        let bth = Bth { becn: true, ..Bth::new(Opcode::CNP, remote, Psn::new(0)) };
        let mut frame = path.frame(&mut 0, bth, Extension::None, NOTIFICATION_LEN, out).ok()?;
        frame.payload().fill(0);
        Some(frame.finish())
    }

    /// Returns `true` if a packet came from exactly the address at the other end of this path.
    #[inline]
    pub fn leads_back(&self, packet: &Packet<'_>) -> bool {
        let theirs = &packet.header.network;
        theirs.kind() == self.network.kind()
            && theirs.source() == self.network.destination()
            && theirs.destination() == self.network.source()
            && packet.header.ethernet.vlan_id() == self.ethernet.vlan_id()
    }
}

/// Returns the traffic class of an outgoing datagram. Over IP, it never starts with a congestion mark, which would
/// claim that a switch on the path was congested (RFC 3168, section 5). Libraries that set all bits of a flow label may
/// set these bits as well.
pub const fn datagram_traffic_class(kind: GidType, asked: u8) -> u8 {
    match (kind, Ecn::of(asked)) {
        (GidType::RoceV2, Ecn::Congested) => asked & !ECN_FIELD,
        _ => asked,
    }
}

/// Number of packets of a message of `length` bytes: at least one (IBA 9.7.2).
#[inline]
pub(super) const fn packets(length: u32, mtu: Mtu) -> u32 {
    match length.div_ceil(mtu.bytes()) {
        0 => 1,
        count => count,
    }
}

/// Bytes of a path MTU.
#[inline]
pub(super) const fn mtu_bytes(mtu: Mtu) -> usize {
    mtu.bytes() as usize
}
