//! Networks and devices as the command line and the file spell them.

use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_dev::Limits;
use pvrdma_ether_link::{link_spec::LinkSpec, vxlan::TunnelAddress};
use pvrdma_packet::MacAddr;
use pvrdma_rxe::{ForgedTransmits, HeldRequests};
use pvrdma_verbs::Prefix;

use super::access::{GroupId, Mode, UserId};
use super::address::AddressWord;
use super::fault::FaultSpec;
use super::keys::{Key, Keys, deserialize_from_str, keys, word};
use super::pairs::{Syntax, from_pairs};
use super::place::SocketPlace;
use super::ports::Ports;
use super::rate::BitRate;
use super::tunnel::Learn;
use super::vlan::VlanWord;
use super::words::{DoorbellMode, Icrc, MemoryFiles, Pcp, Pin, Roce, Switch};

/// The network of devices that name none.
pub const DEFAULT_NETWORK: &str = "default";

/// Longest name of a device or a network, in bytes.
pub(crate) const NAME_LENGTH: usize = 32;

/// Rule that [`is_name`] checks.
pub(super) const NAME_RULE: &str = "a name has 1 to 32 letters, digits, '-', '_' or '.'";

/// Returns `true` if a device or a network can have this name.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=NAME_LENGTH).contains(&name.len()) && name.chars().all(plain)
}

keys! {
    /// A network as the file or the command line describes it, possibly incompletely.
    pub struct NetworkSpec {
        /// Name in `status`, logs and the devices' `network`.
        ///
        /// 1 to 32 letters, digits, `-`, `_` or `.`. An entry with the name of a network of the file changes that
        /// network. Devices without the key `network` are in the network `default`.
        ["name", "NAME", "required"]
        name: String,
        /// Link to other hosts.
        ///
        /// Without an uplink, the devices of the network reach only each other.
        ["uplink", "LINK", ""]
        #[serde(default, deserialize_with = "word")]
        uplink: Option<LinkSpec>,
        /// Other end of a `vxlan` uplink; repeatable.
        ///
        /// A list in the file. The default port is 4789. An IPv6 address with a port is written in brackets.
        ["remote", "ADDRESS[:PORT]", ""]
        #[serde(default)]
        remotes: Vec<TunnelAddress>,
        /// VXLAN network identifier (VNI) of the uplink.
        ["vni", "0..16777215", "0"]
        vni: Option<u32>,
        /// Accepted sources of a `vxlan` uplink.
        ///
        /// `stations`: the configured remotes. `remotes`: any source, which is added to the remotes.
        ["learn", "stations|remotes", "stations"]
        learn: Option<Learn>,
        /// File with the certificate of a `tls` uplink.
        ///
        /// All TLS files are in PEM format and are read once, at the start. Intermediate certificates follow the
        /// certificate in the same file.
        ["tls-certificate", "FILE", ""]
        tls_certificate: Option<PathBuf>,
        /// File with the private key of the certificate.
        ["tls-key", "FILE", ""]
        tls_key: Option<PathBuf>,
        /// File with certificates of authorities.
        ///
        /// The peer needs a certificate that one of them has signed. Any holder of such a certificate may connect, so
        /// use an authority that signs nothing else.
        ["tls-authority", "FILE", ""]
        tls_authority: Option<PathBuf>,
        /// Name or address that the peer's certificate must contain.
        ///
        /// By default, the connecting end requires the address in `uplink`, and the listening end accepts any name.
        ["tls-peer", "NAME", ""]
        tls_peer: Option<String>,
        /// VLAN of the devices and their network functions.
        ///
        /// A number makes access ports: the guests' frames are untagged, and frames on the uplink have this tag.
        /// `trunk` passes the guests' tags. By default, only untagged frames pass, in both directions.
        ["vlan", "1..4094|trunk", ""]
        vlan: Option<VlanWord>,
        /// Maximum IP packet size, 576 to 65535 bytes.
        ///
        /// The default is 1450 for tunnels over IPv4, 1430 for tunnels over IPv6, and 9000 without an uplink. The path
        /// MTU of the RDMA ports follows from it.
        ["mtu", "BYTES", "1500"]
        mtu: Option<u32>,
        /// Capacity of the uplink, in bits/s.
        ///
        /// Units `k`, `M`, `G` and `T`; a string in the file. It is not measured. The sum of the `min-rate` values of
        /// all devices must not exceed it.
        ["link-rate", "RATE", ""]
        link_rate: Option<BitRate>,
        /// Leave segmentation of packet runs to the uplink.
        ///
        /// Long frames pass the uplink unsegmented; on `af_packet` the kernel or the adapter segments them, which the
        /// daemon tests at the start. Use `off` for an adapter that does not increment the IPv4 identification of the
        /// segments.
        ["offload", "on|off", "on"]
        offload: Option<Switch>,
        /// Links of devices follow the uplink's interface.
        ///
        /// Applies to an `af_packet` or `tap` uplink whose interface is down, absent or without carrier. With `off`,
        /// devices of the network continue to reach each other.
        ["follow-carrier", "on|off", "on"]
        follow_carrier: Option<Switch>,
        /// ICRC of RDMA packets on the uplink.
        ///
        /// `always`: each packet has an ICRC, which the receiver verifies. `agreed`: connections leave it out if the
        /// network of the peer has `agreed`, too. Use it only if the link detects damage itself, or if the path between
        /// both ends is trusted to deliver frames undamaged. The default is `agreed` on `tls` and `tls-connect`
        /// uplinks, and `always` otherwise. Excludes `fault=corrupt`.
        ["icrc", "always|agreed", ""]
        icrc: Option<Icrc>,
        /// Faults to inject on the uplink, for tests.
        ["fault", "FAULT:RATE/...", ""]
        #[serde(default, deserialize_with = "word")]
        fault: Option<FaultSpec>,
        /// Addresses that its devices may communicate with; repeatable.
        ///
        /// `ADDRESS` or `ADDRESS/BITS`; a list in the file. The default is all addresses. The rule covers RDMA between
        /// devices of the daemon, over the uplink in both directions, and connection requests. The `peers` of a device
        /// must allow an address as well.
        ["peers", "CIDR", ""]
        #[serde(default)]
        peers: Vec<Prefix>,
        /// Deliver directly between devices of the network.
        ///
        /// The default is `on`. With `off`, traffic between devices leaves through the uplink and must be sent back by
        /// its other end, so that the filters of that network apply. A device still reaches itself.
        ["local", "on|off", ""]
        local: Option<Switch>,
        /// Number of receiving threads of each device.
        ///
        /// With more than one, additional threads help when frames arrive from the uplink faster than one thread
        /// processes them. The packets of a queue pair stay in order. For hosts with idle processors.
        ["port-threads", "1..16", "1"]
        port_threads: Option<usize>,
    }
}

impl FromStr for NetworkSpec {
    type Err = String;

    /// Parses `key=value,key=value`.
    fn from_str(text: &str) -> Result<Self, String> {
        from_pairs(text, Syntax { separator: ',', assign: '=', of: "a network" })
    }
}

keys! {
    /// A device as the file or the command line describes it, possibly incompletely.
    pub struct DeviceSpec {
        /// Name in logs, in `status` and for captures.
        ///
        /// 1 to 32 letters, digits, `-`, `_` or `.`. An entry with the name of a device of the file changes that
        /// device.
        ["name", "NAME", "required"]
        name: String,
        /// Socket to which the VMM connects.
        ///
        /// The daemon replaces a socket that a terminated process has left, and refuses any other existing file.
        /// `fd:NUMBER` or `fd:NAME` is a listening socket that the daemon inherited (`LISTEN_FDS`, `LISTEN_FDNAMES`);
        /// `owner`, `group` and `mode` do not apply to it.
        ["socket", "PATH|fd:NAME", "required"]
        #[serde(default, deserialize_with = "word")]
        socket: Option<SocketPlace>,
        /// MAC address of the guest's network function.
        ///
        /// Six hexadecimal bytes with colons or dashes. The guest driver requires a vmxnet3 with this address in the
        /// same slot.
        ["mac", "MAC", "required"]
        mac: Option<Mac>,
        /// User that owns the socket, by name or number.
        ["owner", "USER", ""]
        owner: Option<UserId>,
        /// Group that owns the socket, by name or number.
        ///
        /// Its members may connect.
        ["group", "GROUP", ""]
        group: Option<GroupId>,
        /// Permissions of the socket, in octal.
        ///
        /// A string in the file. The default is 600, or 660 with `group`.
        ["mode", "OCTAL", ""]
        mode: Option<Mode>,
        /// Encapsulation of RDMA packets.
        ///
        /// `v1`: Ethernet frames. `v2`: UDP, which routers forward. Interface versions below 18 support and default to
        /// `v1`.
        ["roce", "v1|v2", "v2"]
        roce: Option<Roce>,
        /// Guest memory to lock in RAM.
        ///
        /// `registered`: memory regions while they are registered. `all`: all memory from the time the VMM maps it; a
        /// page that the guest has not used yet is locked at its first use. `off`: none. Locked memory counts against
        /// `RLIMIT_MEMLOCK`.
        ["pin", "all|registered|off", "registered"]
        pin: Option<Pin>,
        /// Files that may back guest memory.
        ///
        /// `any`: files of memfd, tmpfs or hugetlbfs, on which access cannot block. `sealed`: only those that cannot
        /// shrink (`F_SEAL_SHRINK`), as created by QEMU's `memory-backend-memfd`.
        ["memory", "any|sealed", "any"]
        memory: Option<MemoryFiles>,
        /// Maximum amount of mapped guest memory.
        ///
        /// Mappings beyond it are refused. The default is 1 TiB.
        ["max-memory", "BYTES", "1099511627776"]
        max_memory: Option<u64>,
        /// Maximum amount of locked guest memory.
        ///
        /// Includes pages that the VMM has not used yet; they are not populated. The default is seven eighths of the
        /// host's memory.
        ["max-locked", "BYTES", ""]
        max_locked: Option<u64>,
        /// Delivery of user-space doorbells.
        ///
        /// `trapped`: each one exits the VM and is a message of the VMM. `mapped`: none exits; the daemon watches the
        /// rings, for which it needs `/dev/fuse` and the privilege to mount. `auto`: `mapped` if the host has enough
        /// processors; otherwise `status` shows the reason.
        ["doorbells", "auto|trapped|mapped", "trapped"]
        doorbells: Option<DoorbellMode>,
        /// Version of the PVRDMA interface.
        ["version", "17..20", "20"]
        version: Option<u32>,
        /// Offer a legacy interrupt in addition to MSI-X.
        ["intx", "on|off", "off"]
        intx: Option<Switch>,
        /// Network of the device.
        ///
        /// A device reaches only devices of its own network.
        ["network", "NAME", "default"]
        network: Option<String>,
        /// Link to a network function of the VMM with the same MAC.
        ///
        /// Its other end is a `-netdev` of QEMU. Frames other than RDMA pass between this link and the uplink.
        ["nic", "LINK", ""]
        #[serde(default, deserialize_with = "word")]
        nic: Option<LinkSpec>,
        /// Socket of a network function that the daemon serves.
        ///
        /// A vmxnet3 for function 0 of the slot, on the same network; replaces `nic`. `owner`, `group` and `mode` apply
        /// to both sockets.
        ["nic-socket", "PATH|fd:NAME", ""]
        #[serde(default, deserialize_with = "word")]
        nic_socket: Option<SocketPlace>,
        /// Packets that carry an 802.1p priority.
        ///
        /// `tagged`: packets with a VLAN tag. `always`: all packets; those without a VLAN get a priority tag (VLAN 0).
        ["pcp", "tagged|always", "tagged"]
        pcp: Option<Pcp>,
        /// Forged frames that the guest may send.
        ///
        /// `off`: none. `mac`: frames from other MACs, as needed by a bridge in the guest. `roce`: RoCE packets, which
        /// receivers cannot tell from those of queue pairs. `all`: both.
        ["forged-transmits", "off|mac|roce|all", "off"]
        forged: Option<ForgedTransmits>,
        /// IP addresses that the guest may use; repeatable.
        ///
        /// A list in the file. Addresses alone: these and the link-local address of the MAC. `own`: in addition, any
        /// address that no other device of the network had in the last minute and that no host beyond the uplink
        /// answers for. `any`: as `own`, without regard to hosts beyond the uplink. No device gets an address that is
        /// listed for another device, or the link-local address of its MAC.
        ["address", "own|any|ADDRESS", "own"]
        #[serde(default)]
        addresses: Vec<AddressWord>,
        /// Drop IP packets from other sources than the addresses.
        ///
        /// Allowed sources are the addresses of `address`, the link-local address of the MAC, and the unspecified
        /// address. Available, and on by default, only if `address` lists all addresses.
        ["source-guard", "on|off", ""]
        source_guard: Option<Switch>,
        /// Drop router advertisements of the network function.
        ///
        /// On by default if `address` lists all addresses.
        ["ra-guard", "on|off", ""]
        ra_guard: Option<Switch>,
        /// Drop packets that the network function sends as a DHCP server.
        ///
        /// These have UDP source port 67 (IPv4) or 547 (IPv6), as do those of relays, or the destination port of
        /// clients, 68 or 546. On by default if `address` lists all addresses.
        ["dhcp-guard", "on|off", ""]
        dhcp_guard: Option<Switch>,
        /// Addresses that the device may communicate with; repeatable.
        ///
        /// As `peers` of the network; both must allow an address.
        ["peers", "CIDR", ""]
        #[serde(default)]
        peers: Vec<Prefix>,
        /// Ports on which peers reach the guest's rdma_cm through the host.
        ///
        /// A list separated by `+`: `4420+20049`. For the backend `ibverbs` with `cm=host`.
        ["cm-listen", "PORTS", ""]
        cm_listen: Option<Ports>,
        /// Seed of QP numbers and keys, for tests.
        ///
        /// The same seed gives the same numbers, which makes them predictable. By default they start at random.
        ["seed", "NUMBER", ""]
        seed: Option<u64>,
        /// Congestion control (DCQCN, RoCE v2 only).
        ///
        /// The table `[congestion]` of the file has its parameters.
        ["congestion", "on|off", "on"]
        congestion: Option<Switch>,
        /// Negotiate selective acknowledgements.
        ///
        /// The first requests of a connection set reserved bits, which other implementations ignore. If both ends
        /// support it, the connection recovers from losses by selective acknowledgements.
        ["negotiate", "on|off", "on"]
        negotiate: Option<Switch>,
        /// Use other paths for congested or dead connections.
        ///
        /// A connection with selective acknowledgements changes its UDP source port, within the range of RoCE v2, from
        /// packet to packet if several paths are congested. With `off`, it keeps one port, for firewalls that track
        /// connections.
        ["multipath", "on|off", "on"]
        multipath: Option<Switch>,
        /// Requests held off while the device is paused.
        ///
        /// In a migration, a peer on another host gets an RNR NAK, and repeats the request later without spending a
        /// retry for lost packets. `sends`: SENDs. `all`: RDMA WRITEs and READs and atomics, too, which `rdma_rxe`
        /// accepts. A peer with fewer than 7 RNR retries spends one each 41 ms.
        ["hold", "off|sends|all", "sends"]
        held: Option<HeldRequests>,
        /// Share relative to other devices of the network.
        ///
        /// While several devices are busy, each gets worker time, and uplink capacity while the uplink is full, in
        /// proportion to its weight. A device that is busy alone is not limited.
        ["weight", "1..1000", "100"]
        weight: Option<u32>,
        /// Maximum throughput of the device, in bits/s.
        ///
        /// Units `k`, `M`, `G` and `T`, for example `2.5G`; a string in the file. Counts the payload between devices of
        /// the network and complete frames on the uplink, including READs by peers.
        ["max-rate", "RATE", ""]
        max_rate: Option<BitRate>,
        /// Number of bytes that may exceed `max-rate` after an idle time.
        ///
        /// The default is the throughput of 10 ms, at least 64 KiB.
        ["burst", "BYTES", ""]
        burst: Option<u64>,
        /// Maximum throughput of each queue pair's requests, in bits/s.
        ["qp-max-rate", "RATE", ""]
        qp_max_rate: Option<BitRate>,
        /// Guaranteed throughput, in bits/s.
        ///
        /// Takes precedence over devices without a guarantee or above theirs. Requires `link-rate` of the network; the
        /// guarantees of all its devices must not exceed it.
        ["min-rate", "RATE", ""]
        min_rate: Option<BitRate>,
        /// Upper limits of the device, a table.
        ["limits", "TABLE", "", file]
        limits: Option<Limits>,
    }
}

impl DeviceSpec {
    /// Returns the name of its network.
    pub(super) fn network(&self) -> &str {
        self.network.as_deref().unwrap_or(DEFAULT_NETWORK)
    }
}

/// Returns `true` if networks have this key and devices do not.
pub(super) fn is_of_networks(key: &str) -> bool {
    let has = |keys: &[Key]| keys.iter().any(|known| known.name == key);
    has(NetworkSpec::KEYS) && !has(DeviceSpec::KEYS)
}

impl FromStr for DeviceSpec {
    type Err = String;

    /// Parses `key=value,key=value`.
    fn from_str(text: &str) -> Result<Self, String> {
        let keys = text.split(',').filter_map(|pair| pair.split_once('='));
        if let Some((key, value)) = keys.into_iter().find(|(key, _)| is_of_networks(key)) {
            return Err(format!(
                "'{key}' is a key of a network: write --network name=NAME,{key}={value} and, at the device, network=NAME"
            ));
        }
        from_pairs(text, Syntax { separator: ',', assign: '=', of: "a device" })
    }
}

/// A MAC address that a device can have.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mac(pub MacAddr);

impl FromStr for Mac {
    type Err = String;

    /// Parses six hexadecimal bytes with colons or with dashes.
    fn from_str(text: &str) -> Result<Self, String> {
        let address: MacAddr = if text.contains(':') { text.parse() } else { text.replace('-', ":").parse() }?;
        if address.0 == [0; 6] { Err(format!("'{text}' is no address of a device")) } else { Ok(Self(address)) }
    }
}

deserialize_from_str!(Mac);
