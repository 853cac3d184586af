//! Interoperability: guest a has a PVRDMA device, guest b the kernel's `rdma_rxe`, and the daemon connects a's vNIC and
//! b's.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::case::{Case, WAYS};
use super::exchange::{Programs, Ready};
use super::perftest;
use super::programs::{self, ALL_SIZES, CONNECTED, DATAGRAMS, LOSSY, MANAGED, Program};
use super::shared::{Machines, Shared};
use crate::endpoints::{Endpoints, network_script};
use crate::guest_with_daemon::{
    GuestWithDaemon, HostOptions, IPV4, IPV6, LINK_LOCAL, MAC, MEMORY_MIB, addresses, cable, datagrams,
};
use crate::image::GuestImage;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::{Nic, NicModel, Vm, VmBuilder};

/// MTU that is large enough for packets with 4096 bytes of payload.
const MTU: u32 = 4200;

/// Returns all cases with the kernel's implementation.
pub(crate) fn cases() -> Vec<Case> {
    let pair = Shared::new(|image| RxePair::boot(image, ""));
    let group = |name: &str, programs: &[Program], ip: [IpAddr; 2], mtu| {
        programs::cases(name, programs, &pair, move |pair, program, server| {
            pair.run(program, server, ip, mtu).map(|(note, repairs)| format!("{note}{repairs}"))
        })
    };
    let (ipv4, ipv6, link_local) = (IPV4.map(Into::into), IPV6.map(Into::into), LINK_LOCAL.map(Into::into));
    let mut cases: Vec<Case> = [
        group("interop/ipv4-1024", &CONNECTED, ipv4, 1024),
        group("interop/ipv4-1024", &DATAGRAMS, ipv4, 1024),
        group("interop/ipv6-4096", &CONNECTED, ipv6, 4096),
        group("interop/link-local-4096", &DATAGRAMS, link_local, 4096),
        group("interop/link-local-2048", &CONNECTED[..1], link_local, 2048),
        group("interop/ipv4-4096", &ALL_SIZES, ipv4, 4096),
    ]
    .into_iter()
    .flatten()
    .collect();
    cases.extend(programs::cases("interop/ethernet-1500", &MANAGED, &pair, move |pair, program, server| {
        pair.with_ethernet_mtu(1500, || pair.run(program, server, ipv4, 1024)).map(|(note, repairs)| note + &repairs)
    }));
    // This case runs before the cases that cause drops.
    cases.push(pair.case("interop/nothing-dropped", nothing_dropped));
    for (server, way) in WAYS {
        for program in ["ib_write_bw", "ib_read_bw"] {
            cases.push(pair.case(format!("interop/beyond-region/{program}/{way}"), move |pair| {
                beyond_region(pair, server, program)
            }));
        }
    }
    cases.push(pair.case("interop/receives-run-out/a-to-b", receives_run_out));
    cases.push(pair.case("interop/group/a-to-b", group_of_theirs));
    cases.push(pair.case("interop/group/no-member", no_member_of_ours));
    cases.extend(lossy());
    cases
}

/// Counters that increase on packet loss, with descriptions.
const REPAIRS: [(&str, &str); 6] = [
    ("wire_resent", "sent again"),
    ("wire_sequence_naks", "gaps reported"),
    ("wire_lost_answers", "answers missed"),
    ("wire_timeouts", "timeouts"),
    ("wire_duplicates", "came again"),
    ("wire_out_of_sequence", "came too early"),
];

/// The same programs on a cable that loses one frame in a hundred in each direction.
fn lossy() -> Vec<Case> {
    let pair = Shared::new(|image| RxePair::boot(image, ",fault=loss:0.01/seed:7"));
    programs::cases("interop/one-percent-lost", &LOSSY, &pair, |pair: &RxePair, program, server| {
        let (note, repairs) = pair.run(program, server, IPV4.map(Into::into), 1024)?;
        if repairs.is_empty() {
            bail!("nothing was lost");
        }
        Ok(format!("{note}{repairs}"))
    })
}

/// The server's region is shorter than the client's request. The client must get the reason of the failure.
fn beyond_region(pair: &RxePair, server: usize, program: &str) -> Result<String> {
    let refused = pair.ours.counter("refused_requests")?;
    let endpoints = pair.endpoints(IPV4.map(Into::into), 1024)?;
    let programs = perftest::programs(&endpoints, server, program, ["-n 5 -s 2", "-n 5 -s 65536"]);
    let (_server, client) = programs.start()?;
    let output = client.wait(programs.timeout)?;
    // IBV_WC_REM_ACCESS_ERR
    if output.code == 0 || !output.text.contains("Failed status 10") {
        bail!("the client ended with {}, but not for a remote access error:\n{}", output.code, output.text);
    }
    let counted = pair.ours.counter("refused_requests")? > refused;
    if counted != (server == 0) {
        bail!("the daemon counted {}", if counted { "a refusal that was not its own" } else { "no refusal" });
    }
    Ok("remote access error".to_owned())
}

/// Posts more sends at a time than the peer has receives.
fn receives_run_out(pair: &RxePair) -> Result<String> {
    let before = pair.ours.counter("wire_rnr_naks")?;
    let endpoints = pair.endpoints(IPV4.map(Into::into), 1024)?;
    let programs = perftest::programs(&endpoints, 1, "ib_send_bw", ["-n 500 -s 64 -r 4 -t 64"; 2]);
    programs.run()?;
    let naks = pair.ours.counter("wire_rnr_naks")?.saturating_sub(before);
    if naks == 0 {
        bail!("the peer never ran out of receives");
    }
    Ok(format!("waited for receives {naks} times"))
}

/// An IPv6 multicast group on the link: rxe only listens at Ethernet addresses of IPv6 groups.
const GROUP: &str = "ff12::5:1860";

/// The queue pair of rxe is a member; the PVRDMA device sends.
fn group_of_theirs(pair: &RxePair) -> Result<String> {
    let ends = pair.endpoints(IPV6.map(Into::into), 1024)?;
    let command =
        |role: &str, end: usize| format!("multicast {role} {} {} {GROUP}", ends.device[end], ends.gid_index[end]);
    let exchange = Programs {
        server_vm: &pair.theirs,
        server: format!("{} eth0", command("member", 1)),
        ready: Ready::Tcp(18602),
        client_vm: pair.ours.vm(),
        client: format!("{} {}", command("sender", 0), IPV4[1]),
        timeout: Duration::from_secs(60),
    }
    .run()?;
    Ok(exchange.server.trim().to_owned())
}

/// A queue pair of the PVRDMA device cannot become a member: `pvrdma_dev_ops` in the driver's `pvrdma_main.c` has no
/// `attach_mcast`, so the kernel refuses before the device is involved.
fn no_member_of_ours(pair: &RxePair) -> Result<String> {
    let said = pair.ours.vm().run(&format!("multicast attach {PVRDMA_DEVICE} 0 {GROUP}"))?;
    match said.trim() {
        said @ "attach_mcast: EOPNOTSUPP" => Ok(said.to_owned()),
        other => bail!("attaching to a group ended with {other}"),
    }
}

/// The cases above have not increased any of the counters of discarded frames.
fn nothing_dropped(pair: &RxePair) -> Result<String> {
    for counter in ["too_long", "no_room", "malformed", "damaged", "address", "vlan", "refused", "deferred"] {
        let counter = format!("wire_dropped_{counter}");
        match pair.ours.counter(&counter)? {
            0 => {}
            count => bail!("{counter} is {count}"),
        }
    }
    Ok(format!(
        "{} frames sent, {} received",
        pair.ours.counter("wire_frames_sent")?,
        pair.ours.counter("wire_frames_received")?
    ))
}

/// A guest with a PVRDMA device, and one with the kernel's.
#[derive(Debug)]
struct RxePair {
    // Declared in the order in which they must be dropped.
    ours: GuestWithDaemon,
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
    /// Boots both. `more` are additional keys of the network of the PVRDMA device.
    pub(super) fn boot(image: &GuestImage, more: &str) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let [a, b] = cable(directory.path());
        let options = HostOptions::new(format!("uplink={},mtu={MTU}{more}", datagrams(&a, &b)));
        let ours = GuestWithDaemon::start(image, &directory.path().join("a"), "a", MAC[0], &options)?;
        let nic = Nic { model: NicModel::Virtio, mac: MAC[1].to_owned(), local: b, remote: a };
        let theirs = VmBuilder::new(image, directory.path()).name("b").memory_mib(MEMORY_MIB).nic(nic).start()?;
        ours.bring_up(&addresses(0), MTU)?;
        theirs.wait_boot()?;
        theirs.run(&network_script("virtio_net", &addresses(1), MTU))?;
        theirs.run("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
        theirs.run("modprobe rdma_ucm")?;
        Ok(Self { ours, theirs, _directory: directory })
    }

    /// Runs a program; returns its note, and a description of the loss that was repaired.
    fn run(&self, program: &Program, server: usize, ip: [IpAddr; 2], path_mtu: u32) -> Result<(String, String)> {
        let before = self.repairs()?;
        let note = program.run(&self.endpoints(ip, path_mtu)?, server)?;
        let mut words = String::new();
        for ((_, word), (before, after)) in REPAIRS.iter().zip(before.into_iter().zip(self.repairs()?)) {
            if after > before {
                let comma = if note.is_empty() && words.is_empty() { "" } else { ", " };
                words.push_str(&format!("{comma}{} {word}", after - before));
            }
        }
        Ok((note, words))
    }

    /// Runs an action while the guests' interfaces have another MTU, from which the connection manager derives that of
    /// its paths.
    fn with_ethernet_mtu<T>(&self, mtu: u32, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let set = |mtu: u32| -> Result<()> {
            self.vms().into_iter().try_for_each(|vm| vm.run(&format!("ip link set eth0 mtu {mtu}")).map(drop))
        };
        set(mtu)?;
        let result = run();
        set(MTU)?;
        result
    }

    /// Returns the counts of detected and repaired loss on the PVRDMA side.
    fn repairs(&self) -> Result<Vec<u64>> {
        let adapter = self.ours.counters()?;
        Ok(REPAIRS.iter().map(|(name, _)| adapter[name].as_u64().unwrap_or(0)).collect())
    }

    fn endpoints(&self, ip: [IpAddr; 2], path_mtu: u32) -> Result<Endpoints<'_>> {
        let endpoints = Endpoints {
            vms: self.vms(),
            device: [PVRDMA_DEVICE, "rxe0"],
            gid_index: [0; 2],
            ip,
            interface: ["eth0"; 2],
            tcp: IPV4,
            path_mtu: Some(path_mtu),
            patience: Duration::from_secs(60),
        };
        endpoints.with_gids(ip)
    }
}
