//! Networks and devices in the words of the command line and of the file.

use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_dev::Limits;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::vxlan::TunnelAddress;
use pvrdma_rxe::ForgedTransmits;
use pvrdma_verbs::{MacAddr, Prefix};

use super::access::{GroupId, Mode, UserId};
use super::address::AddressWord;
use super::fault::FaultSpec;
use super::keys::{deserialize_from_str, keys, word};
use super::pairs::{Syntax, from_pairs};
use super::place::SocketPlace;
use super::rate::BitRate;
use super::tunnel::Learn;
use super::vlan::VlanWord;
use super::words::{DoorbellMode, MemoryFiles, Pcp, Pin, Roce, Switch};

/// The network of devices that name none.
pub const DEFAULT_NETWORK: &str = "default";

/// What [`is_name`] checks.
pub(super) const NAME_RULE: &str = "a name has 1 to 32 letters, digits, '-', '_' or '.'";

/// Returns `true` if a device or a network can have this name.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=32).contains(&name.len()) && name.chars().all(plain)
}

keys! {
    /// A network as the file or the command line describes it, possibly incompletely.
    pub struct NetworkSpec {
        /// Name in status, logs and `network` of devices.
        ///
        /// 1 to 32 letters, digits, `-`, `_` or `.`. A network of the same name in the file is changed, not added.
        /// Devices that name no network are in `default`.
        ["name", "NAME", "required"]
        name: String,
        /// Link to other hosts.
        ///
        /// Without one the network is that of its devices alone.
        ["uplink", "LINK", ""]
        #[serde(default, deserialize_with = "word")]
        uplink: Option<LinkSpec>,
        /// Other end of a vxlan uplink; repeatable.
        ///
        /// A list in the file. The port is 4789 unless it is given; an IPv6 address with a port stands in brackets.
        ["remote", "ADDRESS[:PORT]", ""]
        #[serde(default)]
        remotes: Vec<TunnelAddress>,
        /// VXLAN network identifier of the uplink.
        ["vni", "0..16777215", "0"]
        vni: Option<u32>,
        /// Whom a vxlan uplink listens to.
        ///
        /// `stations`: to its remotes only. `remotes`: to everybody, and senders become remotes.
        ["learn", "stations|remotes", "stations"]
        learn: Option<Learn>,
        /// File with the certificate of a tls uplink.
        ///
        /// In PEM format, as the others; certificates between it and the authority stand behind it. Files are read
        /// once, at the start.
        ["tls-certificate", "FILE", ""]
        tls_certificate: Option<PathBuf>,
        /// File with its private key.
        ["tls-key", "FILE", ""]
        tls_key: Option<PathBuf>,
        /// File with certificates of authorities.
        ///
        /// The other end needs a certificate of one of them. Who has one may connect: take an authority that signs for
        /// nothing else.
        ["tls-authority", "FILE", ""]
        tls_authority: Option<PathBuf>,
        /// Name or address in the other end's certificate.
        ///
        /// Without it the certificate of who is connected to has to be for the address in `uplink`, and that of who
        /// connects for anybody.
        ["tls-peer", "NAME", ""]
        tls_peer: Option<String>,
        /// VLAN of the devices and their network cards.
        ///
        /// Not given: untagged frames only, in both directions. A number: access ports, guests see no tags and the
        /// uplink sees one. `trunk`: tags are the guests' affair.
        ["vlan", "1..4094|trunk", ""]
        vlan: Option<VlanWord>,
        /// Longest IP packet, 576 to 65535 bytes.
        ///
        /// In a tunnel the default is 1450 over IPv4 and 1430 over IPv6. Without an uplink it is 9000, what network
        /// cards of ours carry. The path MTU of the RDMA ports follows from it.
        ["mtu", "BYTES", "1500"]
        mtu: Option<u32>,
        /// What the network carries, in bits per second.
        ///
        /// Units `k`, `M`, `G` and `T`; a string in the file. Nothing is measured: it is what the `min-rate` of all
        /// devices together may not exceed.
        ["link-rate", "RATE", ""]
        link_rate: Option<BitRate>,
        /// Runs of packets leave the uplink as one.
        ///
        /// On an `af_packet` uplink the kernel or the adapter cuts them; at the start it is tried out what the kernel
        /// makes of one. `off` is for an adapter that does not count up the identification of IPv4.
        ["offload", "on|off", "on"]
        offload: Option<Switch>,
        /// Links of devices are down while the interface is.
        ///
        /// An `af_packet` or `tap` uplink whose interface is down, carries nothing or is not there. With `off` devices
        /// of the network go on reaching each other.
        ["follow-carrier", "on|off", "on"]
        follow_carrier: Option<Switch>,
        /// Faults injected on the uplink, for tests.
        ["fault", "FAULT:RATE/...", ""]
        #[serde(default, deserialize_with = "word")]
        fault: Option<FaultSpec>,
        /// With whom its devices may talk; repeatable.
        ///
        /// An address or `ADDRESS/BITS`; a list in the file. Not given: everybody. It holds for RDMA between devices of
        /// the daemon, over the uplink in both directions, and for connection requests. A device's own `peers` must
        /// allow a peer as well.
        ["peers", "CIDR", ""]
        #[serde(default)]
        peers: Vec<Prefix>,
        /// Devices of the network reach each other directly.
        ///
        /// `on` unless it is given. `off`: all that one device sends to another leaves through the uplink, whose other
        /// end has to send it back, so that the filters of that network see it. A device still reaches itself.
        ["local", "on|off", ""]
        local: Option<Switch>,
        /// Threads of a device that take frames.
        ///
        /// With more than one, others help when frames come from the uplink faster than one takes them; a queue pair is
        /// with one of them at a time. It is for hosts with processors to spare.
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
        /// Name in logs, in status and for captures.
        ///
        /// 1 to 32 letters, digits, `-`, `_` or `.`. A device of the same name in the file is changed, not added.
        ["name", "NAME", "required"]
        name: String,
        /// Socket where the VMM connects.
        ///
        /// A socket of a process that is gone is replaced; anything else at this path is left alone. `fd:NUMBER` or
        /// `fd:NAME` is a socket that listens already and was passed on by whoever started the daemon (`LISTEN_FDS`,
        /// `LISTEN_FDNAMES`); `owner`, `group` and `mode` are not applied to it.
        ["socket", "PATH|fd:NAME", "required"]
        #[serde(default, deserialize_with = "word")]
        socket: Option<SocketPlace>,
        /// MAC address of the guest's network card.
        ///
        /// Six hexadecimal bytes with colons or dashes. The driver demands a vmxnet3 with this address in the same
        /// slot.
        ["mac", "MAC", "required"]
        mac: Option<Mac>,
        /// User that owns the socket, by name or number.
        ["owner", "USER", ""]
        owner: Option<UserId>,
        /// Group that owns the socket and may connect.
        ///
        /// By name or number.
        ["group", "GROUP", ""]
        group: Option<GroupId>,
        /// Permissions of the socket, in octal.
        ///
        /// A string in the file. 600 unless it is given; with `group` 660.
        ["mode", "OCTAL", ""]
        mode: Option<Mode>,
        /// Encapsulation of RDMA packets.
        ///
        /// `v1`: directly in Ethernet frames. `v2`: in UDP, so that routers pass them. Versions below 18 know `v1`
        /// only, which is their default.
        ["roce", "v1|v2", "v2"]
        roce: Option<Roce>,
        /// Guest memory that stays resident.
        ///
        /// `registered`: memory regions, for as long as they are registered. `all`: all of it, from the moment the VMM
        /// maps it; pages that the guest has not used yet from their first use on. `off`: nothing. What is locked
        /// counts against `RLIMIT_MEMLOCK`.
        ["pin", "all|registered|off", "registered"]
        pin: Option<Pin>,
        /// Files that guest memory may be in.
        ///
        /// `any`: those that cannot block, of memfd, tmpfs or hugetlbfs. `sealed`: those of them that cannot shrink
        /// any more (`F_SEAL_SHRINK`), as QEMU's `memory-backend-memfd` makes them.
        ["memory", "any|sealed", "any"]
        memory: Option<MemoryFiles>,
        /// Most guest memory mapped.
        ///
        /// What a VMM wants mapped beyond that is refused. The default is 1 TiB.
        ["max-memory", "BYTES", "1099511627776"]
        max_memory: Option<u64>,
        /// Most guest memory locked.
        ///
        /// Pages that a VMM has not used yet count as well, and are not populated. The default is seven eighths of the
        /// host's memory.
        ["max-locked", "BYTES", ""]
        max_locked: Option<u64>,
        /// What a doorbell of a process costs.
        ///
        /// `trapped`: an exit of the VM and a message of its VMM. `mapped`: nothing; the rings are watched, for which
        /// the daemon needs `/dev/fuse` and the right to mount. `auto`: `mapped` where there are processors for it;
        /// where there are not, status says why.
        ["doorbells", "auto|trapped|mapped", "trapped"]
        doorbells: Option<DoorbellMode>,
        /// Version of the PVRDMA interface.
        ["version", "17..20", "20"]
        version: Option<u32>,
        /// Offer a legacy interrupt beside MSI-X.
        ["intx", "on|off", "off"]
        intx: Option<Switch>,
        /// Name of the network that the device is in.
        ///
        /// Devices reach those of their own network only.
        ["network", "NAME", "default"]
        network: Option<String>,
        /// Link to the network card of the same MAC.
        ///
        /// The other end is QEMU's `-netdev`. Frames that are not RDMA pass between this link and the uplink.
        ["nic", "LINK", ""]
        #[serde(default, deserialize_with = "word")]
        nic: Option<LinkSpec>,
        /// Socket where the VMM connects to a network card of ours.
        ///
        /// A vmxnet3 for function 0 of the device's slot, on the same network; instead of `nic`. `owner`, `group` and
        /// `mode` are for both sockets.
        ["nic-socket", "PATH|fd:NAME", ""]
        #[serde(default, deserialize_with = "word")]
        nic_socket: Option<SocketPlace>,
        /// Which packets carry an 802.1p priority.
        ///
        /// `tagged`: those with a tag for their VLAN. `always`: all; packets of no VLAN get a tag with VLAN 0.
        ["pcp", "tagged|always", "tagged"]
        pcp: Option<Pcp>,
        /// What the card may forge.
        ///
        /// `off`: nothing. `mac`: frames from other MACs, as a bridge inside the guest needs it. `roce`: RoCE packets,
        /// which receivers take for those of queue pairs. `all`: both.
        ["forged-transmits", "off|mac|roce|all", "off"]
        forged: Option<ForgedTransmits>,
        /// Addresses that the guest may bind; repeatable.
        ///
        /// A list in the file. `own`: the link-local address of the MAC, addresses given beside it, and others that no
        /// device of the network had in the last minute, and no host beyond the uplink answers for. `any`: the same
        /// whatever hosts beyond the uplink have. IP addresses alone: these and the link-local one. No other device
        /// gets an address that is listed, nor a link-local one of another device's MAC.
        ["address", "own|any|ADDRESS", "own"]
        #[serde(default)]
        addresses: Vec<AddressWord>,
        /// Hold IP packets of the card to the listed addresses.
        ///
        /// Their source is an address of `address`, the link-local one of the MAC, or none. Only where `address` lists
        /// all addresses; there it is on.
        ["source-guard", "on|off", ""]
        source_guard: Option<Switch>,
        /// Drop router advertisements of the card.
        ///
        /// On where `address` lists all addresses, otherwise off.
        ["ra-guard", "on|off", ""]
        ra_guard: Option<Switch>,
        /// Drop what the card sends as a DHCP server.
        ///
        /// From UDP port 67 (IPv4) or 547 (IPv6), as relays do too. On where `address` lists all addresses, otherwise
        /// off.
        ["dhcp-guard", "on|off", ""]
        dhcp_guard: Option<Switch>,
        /// With whom the device may talk; repeatable.
        ///
        /// As the key of the network; both must allow a peer.
        ["peers", "CIDR", ""]
        #[serde(default)]
        peers: Vec<Prefix>,
        /// Where QP numbers and keys begin, for tests.
        ///
        /// The same number gives the same ones, which everybody can guess then. Without it they begin at random.
        ["seed", "NUMBER", ""]
        seed: Option<u64>,
        /// Congestion control (DCQCN, RoCE v2 only).
        ///
        /// Its parameters are in the table `[congestion]` of the file.
        ["congestion", "on|off", "on"]
        congestion: Option<Switch>,
        /// Selective acknowledgements, if both agree.
        ///
        /// The first requests of a connection set reserved bits, which other implementations ignore. Two devices of
        /// this daemon's kind that know them recover from losses with selective acknowledgements.
        ["negotiate", "on|off", "on"]
        negotiate: Option<Switch>,
        /// Other paths, where one is congested or dead.
        ///
        /// Connections that agreed on selective acknowledgements change their UDP source port, in the range that
        /// RoCE v2 has, when their path is congested or nothing is heard. Off: each connection keeps one, for firewalls
        /// that know connections by it.
        ["multipath", "on|off", "on"]
        multipath: Option<Switch>,
        /// Share of the device beside others of its network.
        ///
        /// While several are busy, each moves bytes in proportion to its weight: of the workers' time, and of the
        /// uplink while that is full. Who is alone has everything.
        ["weight", "1..1000", "100"]
        weight: Option<u32>,
        /// What the device moves at most, in bits per second.
        ///
        /// Units `k`, `M`, `G` and `T`, as `2.5G`; a string in the file. Payload counts between devices of the
        /// network, and whole frames on the uplink, what peers read from the device included.
        ["max-rate", "RATE", ""]
        max_rate: Option<BitRate>,
        /// What it may move at once after a pause, with `max-rate`.
        ///
        /// Without: what comes in 10 ms, at least 64 KiB.
        ["burst", "BYTES", ""]
        burst: Option<u64>,
        /// Bits per second that one queue pair's requests move at most.
        ["qp-max-rate", "RATE", ""]
        qp_max_rate: Option<BitRate>,
        /// Bits per second that the device moves before others.
        ///
        /// Before those that have theirs, or none. Needs `link-rate` of its network, which those of all its devices
        /// together do not exceed.
        ["min-rate", "RATE", ""]
        min_rate: Option<BitRate>,
        /// Link to other hosts, instead of `network`.
        ///
        /// This and the keys up to `fault` describe a network in place of `network`. Devices with equal uplinks and
        /// VLANs are in one network, and then the others of these keys are equal, too.
        ["uplink", "LINK", ""]
        #[serde(default, deserialize_with = "word")]
        uplink: Option<LinkSpec>,
        /// Other end of a vxlan uplink; repeatable.
        ["remote", "ADDRESS[:PORT]", ""]
        #[serde(default)]
        remotes: Vec<TunnelAddress>,
        /// VXLAN network identifier of the uplink.
        ["vni", "0..16777215", "0"]
        vni: Option<u32>,
        /// Whom a vxlan uplink listens to.
        ["learn", "stations|remotes", "stations"]
        learn: Option<Learn>,
        /// VLAN of the device and its network card.
        ["vlan", "1..4094|trunk", ""]
        vlan: Option<VlanWord>,
        /// Longest IP packet, 576 to 65535 bytes.
        ["mtu", "BYTES", "1500"]
        mtu: Option<u32>,
        /// What the uplink carries, in bits per second.
        ["link-rate", "RATE", ""]
        link_rate: Option<BitRate>,
        /// Threads of a device that take frames.
        ["port-threads", "1..16", "1"]
        port_threads: Option<usize>,
        /// Runs of packets leave the uplink as one.
        ["offload", "on|off", "on"]
        offload: Option<Switch>,
        /// Links of devices are down while the interface is.
        ["follow-carrier", "on|off", "on"]
        follow_carrier: Option<Switch>,
        /// Faults injected on the uplink, for tests.
        ["fault", "FAULT:RATE/...", ""]
        #[serde(default, deserialize_with = "word")]
        fault: Option<FaultSpec>,
        /// Upper limits, a table.
        ["limits", "TABLE", "", file]
        limits: Option<Limits>,
    }
}

impl DeviceSpec {
    /// The network that the device describes itself, if it does, without a name.
    pub(super) fn own_network(&self) -> Option<NetworkSpec> {
        let network = NetworkSpec {
            name: String::new(),
            uplink: self.uplink.clone(),
            remotes: self.remotes.clone(),
            vni: self.vni,
            learn: self.learn,
            vlan: self.vlan,
            mtu: self.mtu,
            link_rate: self.link_rate,
            port_threads: self.port_threads,
            offload: self.offload,
            follow_carrier: self.follow_carrier,
            fault: self.fault,
            ..NetworkSpec::default()
        };
        (network != NetworkSpec::default()).then_some(network)
    }
}

impl FromStr for DeviceSpec {
    type Err = String;

    /// Parses `key=value,key=value`.
    fn from_str(text: &str) -> Result<Self, String> {
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
