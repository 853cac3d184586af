//! Networks and devices in the words of the command line and of the file.

use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_dev::Limits;
use pvrdma_verbs::MacAddr;

use super::access::{GroupId, Mode, UserId};
use super::fault::FaultSpec;
use super::keys::{deserialize_from_str, keys, word};
use super::link::LinkSpec;
use super::pairs::{Syntax, from_pairs};
use super::tunnel::{Learn, TunnelAddress};
use super::vlan::VlanWord;
use super::words::{Forged, MemoryFiles, Pcp, Pin, Roce, Switch};

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
        /// VLAN of the devices and their network cards.
        ///
        /// Not given: untagged frames only, in both directions. A number: access ports, guests see no tags and the
        /// uplink sees one. `trunk`: tags are the guests' affair.
        ["vlan", "1..4094|trunk", ""]
        vlan: Option<VlanWord>,
        /// Longest IP packet, 576 to 65535 bytes.
        ///
        /// In a tunnel the default is 1450 over IPv4 and 1430 over IPv6. The path MTU of the RDMA ports follows from
        /// it.
        ["mtu", "BYTES", "1500"]
        mtu: Option<u32>,
        /// Faults injected on the uplink, for tests.
        ["fault", "FAULT:RATE/...", ""]
        #[serde(default, deserialize_with = "word")]
        fault: Option<FaultSpec>,
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
        /// A socket of a process that is gone is replaced; anything else at this path is left alone.
        ["socket", "PATH", "required"]
        socket: Option<PathBuf>,
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
        /// `all`: all of it, from the moment the VMM maps it. `registered`: memory regions, for as long as they are
        /// registered. `off`: nothing. What is resident counts against `RLIMIT_MEMLOCK`.
        ["pin", "all|registered|off", "all"]
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
        /// Memory that a VMM has not used yet is populated by being locked, on the daemon's account. The default is
        /// seven eighths of the host's memory; with VMMs that are not trusted, give it the size of the guest.
        ["max-locked", "BYTES", ""]
        max_locked: Option<u64>,
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
        ["nic-socket", "PATH", ""]
        nic_socket: Option<PathBuf>,
        /// Which packets carry an 802.1p priority.
        ///
        /// `tagged`: those with a tag for their VLAN. `always`: all; packets of no VLAN get a tag with VLAN 0.
        ["pcp", "tagged|always", "tagged"]
        pcp: Option<Pcp>,
        /// Frames of the network card from other MACs.
        ///
        /// `refuse`: they are dropped. `allow`: they pass, as a bridge inside the guest needs it.
        ["forged", "refuse|allow", "refuse"]
        forged: Option<Forged>,
        /// Congestion control (DCQCN, RoCE v2 only).
        ///
        /// Its parameters are in the table `[congestion]` of the file.
        ["congestion", "on|off", "on"]
        congestion: Option<Switch>,
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
            fault: self.fault,
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
