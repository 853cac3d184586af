//! Connection managers on the host's adapter: two machines act as hosts, with `rdma_rxe` as the adapter of each. On the
//! first, and for one case on both, guests have a PVRDMA device; the second runs the real `rping`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::host_adapter::{DEVICE, PROGRAM, nothing_left};
use crate::endpoints::{gid_index, network_script};
use crate::image::GuestImage;
use crate::vm::{Nic, NicModel, SHORT, Vm, VmBuilder};

/// Addresses of the hosts.
const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 101), Ipv4Addr::new(10, 0, 0, 102)];
/// Addresses of guests 1 and 2, which the hosts have as well.
const GUESTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
const MACS: [&str; 2] = ["52:54:00:00:03:11", "52:54:00:00:03:12"];

/// Prefix that runs a command as an unprivileged user without capabilities, but with memory that can be locked.
const UNPRIVILEGED: &str =
    "ulimit -l unlimited; exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all env";

/// Two machines for all of it.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("hca/connection-manager", connections)]
}

fn connections(image: &GuestImage) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let hosts = Hosts::boot(image, directory.path())?;
    let [ours, theirs] = &hosts.0;
    let run = || -> Result<()> {
        between_guests(&hosts).context("between guests of two hosts")?;
        theirs.run("modprobe rdma_ucm")?;
        rping_client(&hosts).context("rping asks our guest")?;
        rping_server(&hosts).context("our guest asks rping")?;
        ours.spawn(&format!("{PROGRAM} rping --device {DEVICE} --guest 3 refused {}", HOSTS[1]))?
            .wait_success(SHORT)?;
        nothing_left(ours)?;
        nothing_left(theirs)?;
        taken(ours)?;
        lost(ours).context("the adapter goes away")
    };
    run().with_context(|| hosts.0.iter().map(Vm::diagnosis).collect::<Vec<_>>().join("\n"))?;
    Ok("guests of two hosts, rping both ways, others with QP 1, loss of the adapter".to_owned())
}

struct Hosts([Vm; 2]);

impl Hosts {
    fn boot(image: &GuestImage, directory: &Path) -> Result<Self> {
        let socket = |end: usize| directory.join(format!("{end}.net"));
        let start = |end: usize| {
            let (model, mac) = (NicModel::Virtio, MACS[end].to_owned());
            let nic = Nic { model, mac, local: socket(end), remote: socket(1 - end) };
            VmBuilder::new(image, directory).name(["ours", "theirs"][end]).nic(nic).start()
        };
        let hosts = Self([start(0)?, start(1)?]);
        for (end, vm) in hosts.0.iter().enumerate() {
            vm.wait_boot()?;
            let addresses = [HOSTS[end], GUESTS[end]].map(IpAddr::V4);
            vm.run(&network_script("virtio_net", &addresses, 1500))?;
            vm.run("modprobe ib_umad && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
            for address in addresses {
                gid_index(vm, DEVICE, address)?;
            }
        }
        Ok(hosts)
    }
}

/// Runs both ends of `rping` by guests on different hosts.
fn between_guests(hosts: &Hosts) -> Result<()> {
    let [ours, theirs] = &hosts.0;
    let server = theirs.spawn(&format!("{PROGRAM} rping --device {DEVICE} --guest 2 serve"))?;
    server.wait_for_output("listening", SHORT)?;
    let client = format!("{UNPRIVILEGED} {PROGRAM} rping --device {DEVICE} --guest 1 ask {}", GUESTS[1]);
    let closed = ours.exec(&client, SHORT)?;
    if closed.code == 0 || !closed.text.contains("cannot open /dev/infiniband/umad0: Permission denied") {
        bail!("without access to umad0: {}", closed.text);
    }
    ours.run("chmod o+rw /dev/infiniband/umad0")?;
    ours.spawn(&client)?.wait_success(SHORT).with_context(|| server.output())?;
    server.wait_success(SHORT).map(drop)
}

fn rping_client(hosts: &Hosts) -> Result<()> {
    let [ours, theirs] = &hosts.0;
    let server = ours.spawn(&format!("{PROGRAM} rping --device {DEVICE} --guest 1 serve"))?;
    server.wait_for_output("listening", SHORT)?;
    // QP 1 has only one owner.
    let second = ours.exec(&format!("{PROGRAM} daemon --device {DEVICE} --cm umad"), SHORT)?;
    if second.code == 0 || !second.text.contains("another process has the connection manager") {
        bail!("a second owner: {}", second.text);
    }
    let client = theirs.spawn(&format!("rping -c -a {} -C 10 -V -v -S 4096", GUESTS[0]))?;
    let output = client.wait_success(SHORT).with_context(|| server.output())?;
    server.wait_success(SHORT)?;
    let pings = output.lines().filter(|line| line.contains("ping data")).count();
    if pings != 10 {
        bail!("{pings} of 10 pings came back:\n{output}");
    }
    Ok(())
}

fn rping_server(hosts: &Hosts) -> Result<()> {
    let [ours, theirs] = &hosts.0;
    let server = theirs.spawn(&format!("rping -s -a {} -C 10 -v -S 4096", HOSTS[1]))?;
    theirs.wait_until("rdma resource show cm_id | grep -q LISTEN", SHORT)?;
    let client = ours.spawn(&format!("{PROGRAM} rping --device {DEVICE} --guest 1 ask {}", HOSTS[1]))?;
    client.wait_success(SHORT).with_context(|| server.output())?;
    let output = server.wait_success(SHORT)?;
    let pings = output.lines().filter(|line| line.contains("ping data: rdma-ping-")).count();
    if pings != 10 {
        bail!("the server saw {pings} of 10 pings:\n{output}");
    }
    Ok(())
}

/// If the kernel's own connection manager owns QP 1, the daemon reports this and, if its configuration permits,
/// continues without one.
fn taken(vm: &Vm) -> Result<()> {
    vm.run("modprobe ib_cm")?;
    let asked = vm.exec(&format!("{PROGRAM} daemon --device {DEVICE} --cm umad"), SHORT)?;
    if asked.code == 0 || !asked.text.contains("the host's kernel has its own connection manager on QP 1") {
        bail!("asked for QP 1 that the kernel has: {}", asked.text);
    }
    let automatic = vm.exec(&format!("{PROGRAM} daemon --device {DEVICE} --cm auto"), SHORT)?;
    if automatic.code != 0 || !automatic.text.contains("between guests of this process only") {
        bail!("without QP 1: {}", automatic.text);
    }
    // This makes the kernel's manager release QP 1; without ib_umad there is still no access to it.
    vm.run("rmmod ib_cm")?;
    vm.spawn(&format!("{PROGRAM} daemon --device {DEVICE} --cm umad"))?.wait_success(SHORT)?;
    vm.run("rmmod ib_umad")?;
    let without = vm.exec(&format!("{PROGRAM} daemon --device {DEVICE} --cm umad"), SHORT)?;
    if without.code == 0 || !without.text.contains("is the kernel's ib_umad loaded?") {
        bail!("without ib_umad: {}", without.text);
    }
    nothing_left(vm)
}

/// The adapter disappears. The threads of the connection manager report this and end.
fn lost(vm: &Vm) -> Result<()> {
    vm.run("modprobe ib_umad")?;
    let server = vm.spawn(&format!("{PROGRAM} rping --device {DEVICE} --guest 1 serve"))?;
    server.wait_for_output("listening", SHORT)?;
    // The removal may take until the process has closed its files.
    let removal = vm.spawn("rdma link delete rxe0")?;
    server.wait_for_output("the connection manager receives nothing any more", SHORT)?;
    server.wait_for_output("the connection manager sends nothing any more", SHORT)?;
    server.kill()?;
    server.wait(SHORT)?;
    removal.wait_success(SHORT)?;
    nothing_left(vm)
}
