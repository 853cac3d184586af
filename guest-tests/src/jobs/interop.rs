//! Another implementation at the other end: guest a has our device, guest b the kernel's `rdma_rxe`, and the daemon stands
//! between a's network card and b's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::case::Case;
use super::programs::{self, ALL_SIZES, CONNECTED, DATAGRAMS, Program};
use super::shared::{Machines, Shared};
use crate::bed::Bed;
use crate::ends::{Ends, network_script};
use crate::host::{Host, MEMORY_MIB, cable, datagrams};
use crate::pair::PVRDMA_DEVICE;
use crate::vm::{Nic, NicModel, Vm};

const MAC: [&str; 2] = ["52:54:00:00:02:01", "52:54:00:00:02:02"];
const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 79, 1), Ipv4Addr::new(192, 168, 79, 2)];
const IPV6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 2)];
/// What the guests make of their Ethernet addresses.
const LINK_LOCAL: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe00, 0x201),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe00, 0x202),
];
/// Enough for packets with 4096 octets.
const MTU: u32 = 4200;

/// One pair of machines for all of it.
pub(crate) fn cases() -> Vec<Case> {
    let pair = Shared::new(|bed| RxePair::boot(bed, ""));
    let group = |name: &str, programs: &[Program], ip: [IpAddr; 2], mtu| {
        programs::cases(name, programs, &pair, move |pair: &RxePair| pair.ends(ip, mtu))
    };
    let (ipv4, ipv6, link_local) = (IPV4.map(Into::into), IPV6.map(Into::into), LINK_LOCAL.map(Into::into));
    [
        group("interop/ipv4-1024", &CONNECTED, ipv4, 1024),
        group("interop/ipv4-1024", &DATAGRAMS, ipv4, 1024),
        group("interop/ipv6-4096", &CONNECTED, ipv6, 4096),
        group("interop/link-local-4096", &DATAGRAMS, link_local, 4096),
        group("interop/link-local-2048", &CONNECTED[..1], link_local, 2048),
        group("interop/ipv4-4096", &ALL_SIZES, ipv4, 4096),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Our device and the kernel's.
#[derive(Debug)]
struct RxePair {
    // Declared in the order in which they must be dropped.
    ours: Host,
    theirs: Vm,
    _directory: TempDir,
}

impl Machines for RxePair {
    fn vms(&self) -> [&Vm; 2] {
        [self.ours.vm(), &self.theirs]
    }

    fn diagnosis(&self) -> String {
        self.ours.diagnosis()
    }
}

impl RxePair {
    /// Boots both. `options` are more of our device's.
    pub(super) fn boot(bed: &Bed, options: &str) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let [a, b] = cable(directory.path());
        let options = format!("uplink={},mtu={MTU}{options}", datagrams(&a, &b));
        let ours = Host::start(bed, &directory.path().join("a"), "a", MAC[0], &options)?;
        let nic = Nic { model: NicModel::Virtio, mac: MAC[1].to_owned(), local: b, remote: a };
        let theirs = Vm::builder(bed, directory.path()).name("b").memory_mib(MEMORY_MIB).nic(nic).start()?;
        let addresses = |index: usize| [IpAddr::from(IPV4[index]), IpAddr::from(IPV6[index])];
        ours.bring_up(&addresses(0), MTU)?;
        theirs.wait_boot()?;
        theirs.run(&network_script("virtio_net", &addresses(1), MTU))?;
        theirs.run("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
        theirs.run("modprobe rdma_ucm")?;
        Ok(Self { ours, theirs, _directory: directory })
    }

    fn ends(&self, ip: [IpAddr; 2], path_mtu: u32) -> Result<Ends<'_>> {
        let ends = Ends {
            vms: self.vms(),
            device: [PVRDMA_DEVICE, "rxe0"],
            gid_index: [0; 2],
            ip,
            interface: ["eth0"; 2],
            tcp: IPV4,
            path_mtu: Some(path_mtu),
            patience: Duration::from_secs(60),
        };
        ends.with_gids(ip)
    }
}
