//! A VM of QEMU that moves to another QEMU by the commands of the document: its guest gives both functions up before,
//! and finds those of the other host after it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::kernel_log;
use super::pingpong::pingpong;
use super::recipe::recipe;
use crate::endpoints::Endpoints;
use crate::guest_with_daemon::{GuestWithDaemon, HostOptions, IPV4, MAC, cable, datagrams};
use crate::image::GuestImage;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::Vm;

/// Document and marker of the commands before the migration.
pub(super) const BEFORE: (&str, &str) = ("docs/migration.md", "qemu-migrate: before");
/// Those after it.
pub(super) const AFTER: (&str, &str) = ("docs/migration.md", "qemu-migrate: after");
/// Names of the two hosts.
const NAMES: [&str; 2] = ["source", "destination"];
/// Address of the guest.
const ADDRESS: IpAddr = IpAddr::V4(IPV4[0]);
const MTU: u32 = 1500;
/// Maximum time for a migration between emulated machines.
const PATIENCE: Duration = Duration::from_secs(180);

const WHEN: &str = "takes a minute; runs when asked for: --only slow/qemu-migrate";

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/qemu-migrate", migrate).slow(WHEN)]
}

fn migrate(image: &GuestImage) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let [there, here] = cable(directory.path());
    let socket = directory.path().join("migration");
    let start = |end: usize, incoming: Option<PathBuf>| {
        let (own, other) = if end == 0 { (&here, &there) } else { (&there, &here) };
        let options = HostOptions { incoming, ..HostOptions::new(format!("uplink={}", datagrams(own, other))) };
        GuestWithDaemon::start(image, &directory.path().join(NAMES[end]), NAMES[end], MAC[0], &options)
    };
    let source = start(0, None)?;
    source.bring_up(&[ADDRESS], MTU)?;
    exchange(source.vm()).context("at the source")?;
    let before = source.vm().run("cat /proc/sys/kernel/random/boot_id")?;
    let destination = start(1, Some(socket.clone()))?;
    let moved = || {
        source.vm().run(&recipe(BEFORE.0, BEFORE.1)?)?;
        source.vm().migrate(&socket, PATIENCE)?;
        let state = source.vm().run_state()?;
        ensure!(state == "postmigrate", "the source is {state}");
        destination.vm().run(&recipe(AFTER.0, AFTER.1)?)?;
        destination.bring_up_again(&[ADDRESS], MTU)?;
        exchange(destination.vm()).context("at the destination")?;
        let after = destination.vm().run("cat /proc/sys/kernel/random/boot_id")?;
        ensure!(after == before, "the guest has booted again");
        kernel_log::check(destination.vm())
    };
    moved().with_context(|| [&source, &destination].map(GuestWithDaemon::diagnosis).join("\n"))?;
    Ok("the guest uses RDMA before and after it".to_owned())
}

/// Sends messages from the RDMA device to itself.
fn exchange(vm: &Vm) -> Result<String> {
    let endpoints = Endpoints::new([vm; 2], PVRDMA_DEVICE, [IPV4[0]; 2], PATIENCE).with_gids([ADDRESS; 2])?;
    pingpong(&endpoints, 1, "ibv_rc_pingpong", "-n 50")
}
