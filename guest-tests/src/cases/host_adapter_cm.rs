//! Connection managers on the host's adapter: two machines act as hosts, with `rdma_rxe` as the adapter of each. On the
//! first, and for one case on both, guests have a PVRDMA device; the second runs the real `rping`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::host_adapter::{DEVICE, PROGRAM, nothing_left};
use super::kernel_log;
use crate::endpoints::{gid_index, network_script};
use crate::image::{GuestImage, SiwModule};
use crate::vm::{Job, Nic, NicModel, SHORT, Vm, VmBuilder};

/// Addresses of the hosts.
const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 101), Ipv4Addr::new(10, 0, 0, 102)];
/// Addresses of guests 1 and 2, which the hosts have as well.
const GUESTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
const MACS: [&str; 2] = ["52:54:00:00:03:11", "52:54:00:00:03:12"];

/// Prefix that runs a command as an unprivileged user without capabilities, but with memory that can be locked.
const UNPRIVILEGED: &str =
    "ulimit -l unlimited; exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all env";

/// Two machines for each case.
pub(crate) fn cases() -> Vec<Case> {
    const WHY: &str = "compiles siw, and takes minutes; runs when asked for: --only iwarp/host-connections";
    let on_siw = Case::alone("iwarp/host-connections", by_host_on_siw).slow(WHY);
    vec![Case::alone("hca/connection-manager", connections), Case::alone("hca/host-connections", by_host), on_siw]
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

/// The hosts' own connection managers make the connections of guests, and those of the hosts' programs meanwhile.
fn by_host(image: &GuestImage) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let hosts = Hosts::boot(image, directory.path())?;
    let run = || -> Result<()> {
        for vm in &hosts.0 {
            vm.run("modprobe rdma_ucm")?;
        }
        by_host_on(&hosts, DEVICE)?;
        // This guest has no address on its host, whose own address stands for it.
        let [ours, theirs] = &hosts.0;
        let server = rping_of_host(theirs, HOSTS[1])?;
        guest(ours, DEVICE, 3, &format!("ask {}", HOSTS[1]))?.wait_success(SHORT).with_context(|| server.output())?;
        pinged(&server)?;
        hosts.0.iter().try_for_each(kernel_log::check)
    };
    run().with_context(|| hosts.0.iter().map(Vm::diagnosis).collect::<Vec<_>>().join("\n"))?;
    Ok("rping both ways, between guests of two hosts, rejected, killed, beside programs of the host".to_owned())
}

/// The same with `siw`, iWARP in software, as the adapter of both hosts.
fn by_host_on_siw(image: &GuestImage) -> Result<String> {
    let module = SiwModule::build(image)?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let hosts = Hosts::boot_with(image, directory.path(), |vm, _| module.start(vm, "$(cat /run/nic-virtio_net)"))?;
    let run = || -> Result<()> {
        let other = hosts.0[0].exec(&format!("{PROGRAM} daemon --device {SIW} --cm umad"), SHORT)?;
        if other.code == 0 || !other.text.contains("the adapter speaks iWARP") {
            bail!("with another connection manager: {}", other.text);
        }
        by_host_on(&hosts, SIW)?;
        hosts.0.iter().try_for_each(kernel_log::check)
    };
    run().with_context(|| hosts.0.iter().map(Vm::diagnosis).collect::<Vec<_>>().join("\n"))?;
    Ok("rping both ways, between guests of two hosts, rejected, killed, beside programs of the host".to_owned())
}

/// Name of the adapter of iWARP.
const SIW: &str = "siw0";

/// Runs a guest whose host makes its connections. `siw` registers memory at the addresses of the process only.
fn guest(vm: &Vm, device: &str, number: u8, role: &str) -> Result<Job> {
    let place = if device == SIW { "--in-place" } else { "" };
    vm.spawn(&format!("{PROGRAM} rping --device {device} --by-host {place} --guest {number} {role}"))
}

/// Starts the real `rping` as a server.
fn rping_of_host(vm: &Vm, address: Ipv4Addr) -> Result<Job> {
    let server = vm.spawn(&format!("rping -s -a {address} -C 10 -v -S 4096"))?;
    vm.wait_until("rdma resource show cm_id | grep -q LISTEN", SHORT)?;
    Ok(server)
}

/// Checks that the real `rping` has seen all messages.
fn pinged(server: &Job) -> Result<()> {
    let output = server.wait_success(SHORT)?;
    let pings = output.lines().filter(|line| line.contains("ping data: rdma-ping-")).count();
    if pings != 10 {
        bail!("the server saw {pings} of 10 pings:\n{output}");
    }
    Ok(())
}

/// Runs on any adapter.
fn by_host_on(hosts: &Hosts, device: &str) -> Result<()> {
    let [ours, theirs] = &hosts.0;
    let ping = |address, count| format!("rping -c -a {address} -C {count} -V -S 4096");
    let serving = |vm: &Vm, number: u8| -> Result<Job> {
        let server = guest(vm, device, number, "serve")?;
        server.wait_for_output("listening", SHORT)?;
        Ok(server)
    };

    let server = serving(ours, 1)?;
    // The host's programs use the adapter at the same time.
    let native = rping_of_host(ours, HOSTS[0])?;
    theirs.spawn(&ping(HOSTS[0], 10))?.wait_success(SHORT).context("between programs of the hosts")?;
    pinged(&native)?;
    theirs.spawn(&ping(GUESTS[0], 10))?.wait_success(SHORT).with_context(|| server.output())?;
    server.wait_success(SHORT).context("rping asks our guest")?;

    let server = rping_of_host(theirs, HOSTS[1])?;
    let client = guest(ours, device, 1, &format!("ask {}", HOSTS[1]))?;
    client.wait_success(SHORT).with_context(|| server.output()).context("our guest asks rping")?;
    pinged(&server)?;

    guest(ours, device, 1, &format!("rejected {}", HOSTS[1]))?.wait_success(SHORT).context("no listener")?;

    let server = serving(theirs, 2)?;
    let client = guest(ours, device, 1, &format!("ask {}", GUESTS[1]))?;
    client.wait_success(SHORT).with_context(|| server.output()).context("between guests of two hosts")?;
    server.wait_success(SHORT)?;

    let server = serving(ours, 1)?;
    let client = theirs.spawn(&ping(GUESTS[0], 1_000_000))?;
    ours.wait_until("rdma resource show cm_id | grep -q CONNECT", SHORT)?;
    server.kill()?;
    server.wait(SHORT)?;
    // The program ends when the peer disconnects, with any exit code.
    client.wait(SHORT).context("the client of a killed guest does not end")?;
    for vm in &hosts.0 {
        nothing_left(vm)?;
        vm.wait_until("! rdma resource show cm_id | grep -q ' pid '", SHORT).context("identifiers are left")?;
    }
    Ok(())
}

struct Hosts([Vm; 2]);

impl Hosts {
    /// Boots both, with `rdma_rxe`.
    fn boot(image: &GuestImage, directory: &Path) -> Result<Self> {
        Self::boot_with(image, directory, |vm, addresses| {
            vm.run("modprobe ib_umad && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
            for address in addresses {
                gid_index(vm, DEVICE, address)?;
            }
            Ok(())
        })
    }

    /// Boots both, and starts their adapters.
    fn boot_with(
        image: &GuestImage,
        directory: &Path,
        adapter: impl Fn(&Vm, [IpAddr; 2]) -> Result<()>,
    ) -> Result<Self> {
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
            adapter(vm, addresses)?;
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
