//! The host's own adapter as a backend: a guest plays the host, `rdma_rxe` its adapter, and this program runs there.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::case::Case;
use crate::bed::Bed;
use crate::ends::{gid_index, network_script};
use crate::vm::{Nic, NicModel, SHORT, Vm};

const IP: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 80, 1));
/// The adapter.
pub(crate) const DEVICE: &str = "rxe0";
/// This program in the machine.
pub(crate) const PROGRAM: &str = "RUST_BACKTRACE=1 /run/guest-tests hca";

/// One machine for all of it.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("hca/rdma_rxe", on_rxe)]
}

fn on_rxe(bed: &Bed) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let vm = host(bed, directory.path())?;
    let run = || -> Result<String> {
        let conformance = checked(&vm, "conformance", Duration::from_secs(240))?;
        let passed = conformance.lines().find_map(|line| line.strip_suffix(" passed")).context("no cases ran")?;
        nothing_left(&vm)?;
        checked(&vm, "daemon", SHORT)?;
        pingpong(&vm)?;
        nothing_left(&vm)?;
        killed(&vm)?;
        checked(&vm, "devices", Duration::from_secs(120))?;
        checked(&vm, "limits", SHORT)?;
        checked(&vm, "changes", SHORT)?;
        nothing_left(&vm)?;
        Ok(format!(
            "{passed} conformance cases, daemon, ibv_rc_pingpong, kill -9, devices, limits, changes: nothing left in the kernel"
        ))
    };
    run().with_context(|| vm.diagnosis())
}

/// A machine with an adapter: what cases and benchmarks run on.
pub(crate) fn host(bed: &Bed, directory: &std::path::Path) -> Result<Vm> {
    let vm = Vm::builder(bed, directory)
        .name("host")
        .cpus(2)
        .nic(Nic {
            model: NicModel::Virtio,
            mac: "52:54:00:00:03:01".to_owned(),
            local: directory.join("host.net"),
            remote: directory.join("nobody.net"),
        })
        .boot()?;
    vm.run(&network_script("virtio_net", &[IP], 1500))?;
    vm.run("modprobe ib_uverbs && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
    gid_index(&vm, DEVICE, IP)?;
    Ok(vm)
}

fn checked(vm: &Vm, what: &str, timeout: Duration) -> Result<String> {
    vm.spawn(&format!("{PROGRAM} {what} --device {DEVICE}"))?.wait_success(timeout)
}

/// A program of the host at the other end. The guest's address is put on the host's interface first.
fn pingpong(vm: &Vm) -> Result<()> {
    const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    vm.run(&format!("ip address add {GUEST}/24 dev $(cat /run/nic-virtio_net)"))?;
    gid_index(vm, DEVICE, GUEST)?;
    let index = gid_index(vm, DEVICE, IP)?;
    let server = vm.spawn(&format!("ibv_rc_pingpong -d {DEVICE} -g {index} -s 3000 -n 200"))?;
    vm.wait_until("grep -qs ':4853 [0-9A-F]*:0000 0A ' /proc/net/tcp /proc/net/tcp6", SHORT)?;
    let client = checked(vm, "pingpong", SHORT);
    let server = server.wait(SHORT)?;
    client.with_context(|| server.text.clone())?;
    if server.code != 0 {
        bail!("ibv_rc_pingpong: {}", server.text);
    }
    Ok(())
}

/// Killed in the middle of traffic, the process takes everything with it.
fn killed(vm: &Vm) -> Result<()> {
    let job = vm.spawn(&format!("{PROGRAM} hold --device {DEVICE}"))?;
    job.wait_for_output("traffic", Duration::from_secs(60))?;
    if resources(vm)?.is_empty() {
        bail!("a process with devices shows no resources, so this test shows nothing");
    }
    job.kill()?;
    job.wait(Duration::from_secs(30))?;
    nothing_left(vm)
}

/// Queue pairs, regions and so on of processes. The kernel's own stay.
fn resources(vm: &Vm) -> Result<String> {
    vm.run(
        "for kind in qp cq mr pd ctx srq; do rdma resource show $kind | grep ' pid ' | sed \"s/^/$kind /\"; done; true",
    )
}

fn nothing_left(vm: &Vm) -> Result<()> {
    // The kernel takes back what a dead process had when its files close.
    vm.wait_until(
        "[ -z \"$(for kind in qp cq mr pd ctx srq; do rdma resource show $kind | grep ' pid '; done)\" ]",
        Duration::from_secs(30),
    )
    .with_context(|| resources(vm).unwrap_or_default())
}
