//! The host's own adapter as a backend: a guest acts as the host, with `rdma_rxe` as its adapter, and runs this
//! program.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::Case;
use crate::daemon;
use crate::endpoints::{gid_index, listens, network_script};
use crate::image::Disk;
use crate::image::GuestImage;
use crate::vm::{Job, Nic, NicModel, SHORT, Vm, VmBuilder};

/// Address of the machine.
pub(crate) const IP: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 80, 1));
/// Name of the adapter.
pub(crate) const DEVICE: &str = "rxe0";
/// Mount point of the machine's disk.
pub(crate) const TOOLS: &str = "/run/tools";
/// Command of this program in the machine.
pub(crate) const PROGRAM: &str = "RUST_BACKTRACE=1 /run/guest-tests hca";

/// Returns the cases, which share one machine.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("hca/rdma_rxe", on_rxe)]
}

fn on_rxe(image: &GuestImage) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let disk = Disk::new(directory.path())?;
    disk.add(&daemon::program()?, "pvrdmad")?;
    let vm = PlayedHost { disk: Some(disk.build()?), ..PlayedHost::default() }.boot(image, directory.path())?;
    let run = || -> Result<String> {
        let conformance = checked(&vm, "conformance", Duration::from_secs(240))?;
        let passed = conformance.lines().find_map(|line| line.strip_suffix(" passed")).context("no cases ran")?;
        nothing_left(&vm)?;
        pingpong(&vm)?;
        checked(&vm, "devices", Duration::from_secs(120))?;
        checked(&vm, "limits", SHORT)?;
        checked(&vm, "port-events", SHORT)?;
        nothing_left(&vm)?;
        process(&vm)?;
        connections_by_host(&vm)?;
        mapped_doorbells(&vm)?;
        addresses(&vm)?;
        Ok(format!(
            "{passed} conformance cases, ibv_rc_pingpong, devices, limits, changes, pvrdmad, mapped doorbells, addresses: \
             nothing left in the kernel"
        ))
    };
    run().with_context(|| vm.diagnosis())
}

/// A machine with an adapter, for cases and benchmarks.
#[derive(Debug)]
pub(crate) struct PlayedHost {
    /// Size of its memory.
    pub(crate) memory_mib: u32,
    /// A disk that is mounted at [`TOOLS`].
    pub(crate) disk: Option<PathBuf>,
}

impl Default for PlayedHost {
    fn default() -> Self {
        Self { memory_mib: 1024, disk: None }
    }
}

impl PlayedHost {
    /// Boots it and waits for the adapter.
    pub(crate) fn boot(self, image: &GuestImage, directory: &Path) -> Result<Vm> {
        let mut builder = VmBuilder::new(image, directory).name("host").cpus(2).memory_mib(self.memory_mib).nic(Nic {
            model: NicModel::Virtio,
            mac: "52:54:00:00:03:01".to_owned(),
            local: directory.join("host.net"),
            remote: directory.join("no-peer.net"),
        });
        if let Some(disk) = &self.disk {
            builder = builder.disk(disk);
        }
        let vm = builder.boot()?;
        if self.disk.is_some() {
            vm.run(&format!("mkdir {TOOLS} && mount -o ro /dev/vdb {TOOLS}"))?;
        }
        vm.run(&network_script("virtio_net", &[IP], 1500))?;
        vm.run(
            "modprobe ib_uverbs && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)",
        )?;
        gid_index(&vm, DEVICE, IP)?;
        Ok(vm)
    }
}

fn checked(vm: &Vm, what: &str, timeout: Duration) -> Result<String> {
    vm.spawn(&format!("{PROGRAM} {what} --device {DEVICE}"))?.wait_success(timeout)
}

/// Runs against a program of the host. The guest's address is added to the host's interface first.
fn pingpong(vm: &Vm) -> Result<()> {
    const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    vm.run(&format!("ip address add {GUEST}/24 dev $(cat /run/nic-virtio_net)"))?;
    gid_index(vm, DEVICE, GUEST)?;
    let index = gid_index(vm, DEVICE, IP)?;
    let server = vm.spawn(&format!("ibv_rc_pingpong -d {DEVICE} -g {index} -s 3000 -n 200"))?;
    vm.wait_until(&listens(18515), SHORT)?;
    let client = checked(vm, "pingpong", SHORT);
    let server = server.wait(SHORT)?;
    client.with_context(|| server.text.clone())?;
    if server.code != 0 {
        bail!("ibv_rc_pingpong: {}", server.text);
    }
    Ok(())
}

/// The daemon as a process, which the same driver reaches over its sockets. No resource remains, whichever of the
/// processes ends, and however it ends.
fn process(vm: &Vm) -> Result<()> {
    let daemon = serve(vm, "given", "")?;
    let client = vm.spawn(&format!("{PROGRAM} {SOCKETS}"))?;
    client.wait_success(Duration::from_secs(120)).context("two devices over sockets")?;
    gone(vm, OBJECTS).context("guests that have ended")?;
    let guests = traffic(vm)?;
    kill(&guests)?;
    gone(vm, OBJECTS).context("guests that were killed")?;
    let guests = traffic(vm)?;
    stop(vm, &daemon)?;
    kill(&guests)?;
    let daemon = serve(vm, "given", "")?;
    let guests = traffic(vm)?;
    kill(&daemon)?;
    nothing_left(vm).context("the daemon was killed")?;
    kill(&guests)
}

/// The host's connection manager is reached from the sandbox, too.
fn connections_by_host(vm: &Vm) -> Result<()> {
    vm.run("modprobe rdma_ucm")?;
    let daemon = serve(vm, "given,cm=host", ",cm-listen=7174")?;
    let client = vm.spawn(&format!("{PROGRAM} {SOCKETS}"))?;
    client.wait_success(Duration::from_secs(120)).context("two devices whose host connects them")?;
    let output = daemon.output();
    ensure!(output.contains("the host's connection manager connects the guests"), "{output}");
    ensure!(!output.contains("the host cannot"), "{output}");
    stop(vm, &daemon)?;
    vm.run("rmmod rdma_ucm rdma_cm ib_cm")?;
    Ok(())
}

/// The same operations of guests whose doorbells are mapped: no post and no poll is a message, and completions still
/// arrive.
fn mapped_doorbells(vm: &Vm) -> Result<()> {
    vm.run("modprobe fuse")?;
    let daemon = serve(vm, "given", ",doorbells=mapped")?;
    let client = vm.spawn(&format!("{PROGRAM} {SOCKETS} --mapped"))?;
    client.wait_success(Duration::from_secs(120)).context("two devices with mapped doorbells")?;
    let status = status(vm)?;
    for index in 0..2 {
        let device = &status["devices"][index];
        let counts = ["doorbells_of_processes", "doorbells_mapped"].map(|name| device["counters"][name].as_u64());
        ensure!(device["doorbells"]["mode"] == "mapped", "{device:#}");
        ensure!(counts[0] == Some(0) && counts[1] > Some(0), "{device:#}");
    }
    stop(vm, &daemon)
}

/// Guests' addresses come to the adapter's interface with the guests. They go with the guests, and with the daemon
/// however it ends. The first guest's address was set by the administrator, and stays.
fn addresses(vm: &Vm) -> Result<()> {
    let check = |when: &str, added: bool| -> Result<()> {
        let has = |address: &str, test: &str| {
            let list = format!("ip -o address show dev $(cat /run/nic-virtio_net) to {address}");
            vm.wait_until(&format!("[ {test} \"$({list})\" ]"), Duration::from_secs(10))
        };
        has("10.0.0.1", "-n").with_context(|| format!("{when}: the administrator's address"))?;
        has("10.0.0.2", if added { "-n" } else { "-z" }).with_context(|| format!("{when}: the guest's address"))
    };
    let daemon = serve(vm, NETWORK, "")?;
    check("no guests yet", false)?;
    let guests = traffic(vm)?;
    check("guests", true)?;
    kill(&guests)?;
    gone(vm, OBJECTS)?;
    check("guests that were killed", false)?;
    let guests = traffic(vm)?;
    kill(&daemon)?;
    kill(&guests)?;
    check("a daemon that was killed", true)?;
    let daemon = serve(vm, NETWORK, "")?;
    check("the next daemon", false)?;
    let guests = traffic(vm)?;
    check("its guests", true)?;
    stop(vm, &daemon)?;
    kill(&guests)?;
    check("no daemon", false)
}

/// Tells the daemon to end.
fn stop(vm: &Vm, daemon: &Job) -> Result<()> {
    vm.run("pkill -TERM -x pvrdmad")?;
    let ended = daemon.wait(SHORT)?;
    ensure!(ended.code == 0, "the daemon, asked to end: exit code {}\n{}", ended.code, ended.text);
    nothing_left(vm).context("the daemon has ended")
}

/// Network of the guests.
const NETWORK: &str = "10.0.0.0/24";
/// Two devices over the daemon's sockets.
const SOCKETS: &str = "sockets /run/vm1 /run/vm2";

/// Returns the status report of the daemon.
fn status(vm: &Vm) -> Result<serde_json::Value> {
    let text = vm.run(&format!("{TOOLS}/pvrdmad status --json --control /run/control"))?;
    serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
}

/// Starts the daemon with two devices and waits for them. `addresses` is the backend's option, `options` the devices'.
fn serve(vm: &Vm, addresses: &str, options: &str) -> Result<Job> {
    let device = |number: u32| {
        format!(
            "--device name=vm{number},socket=/run/vm{number},mac=52:54:00:00:00:0{number},pin=off,address=own,address=10.0.0.{number}{options}"
        )
    };
    let daemon = vm.spawn(&format!(
        "exec {TOOLS}/pvrdmad --backend ibverbs,device={DEVICE},port=1,gid-index=auto,addresses={addresses} --control /run/control {} {}",
        device(1),
        device(2)
    ))?;
    daemon.wait_for_output("vm2: ready", SHORT)?;
    let status = status(vm)?;
    ensure!(status["backend"] == format!("ibverbs ({DEVICE} port 1)"), "{status:#}");
    for index in 0..2 {
        ensure!(status["devices"][index]["port"] == "active", "{status:#}");
    }
    Ok(daemon)
}

/// Starts guests with traffic, and waits until it has begun.
fn traffic(vm: &Vm) -> Result<Job> {
    let guests = vm.spawn(&format!("{PROGRAM} {SOCKETS} --hold"))?;
    guests.wait_for_output("traffic", SHORT)?;
    ensure!(!resources(vm, "qp")?.is_empty(), "guests with traffic show no resources, so this test shows nothing");
    Ok(guests)
}

/// `kill -9`.
fn kill(job: &Job) -> Result<()> {
    job.kill()?;
    job.wait(SHORT).map(drop)
}

/// Kinds of objects of guests. The context (`ctx`) is not listed, because a device of the daemon has one even without a
/// guest.
const OBJECTS: &str = "qp cq mr pd srq";

/// Lists queue pairs, regions and so on of processes. Those of the kernel are left out.
fn resources(vm: &Vm, kinds: &str) -> Result<String> {
    vm.run(&format!(
        "for kind in {kinds}; do rdma resource show $kind | grep ' pid ' | sed \"s/^/$kind /\"; done; true"
    ))
}

/// Waits until no process has any object.
pub(crate) fn nothing_left(vm: &Vm) -> Result<()> {
    gone(vm, &format!("{OBJECTS} ctx"))
}

fn gone(vm: &Vm, kinds: &str) -> Result<()> {
    // The kernel releases the objects of a dead process when its files close.
    vm.wait_until(
        &format!("[ -z \"$(for kind in {kinds}; do rdma resource show $kind | grep ' pid '; done)\" ]"),
        Duration::from_secs(30),
    )
    .with_context(|| resources(vm, kinds).unwrap_or_default())
}
