//! The daemon alone, without guests.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::{Case, skip};
use crate::daemon::{Daemon, DaemonDevice, Setup};
use crate::host_adapter;

/// Target of a build that needs no libraries of the host.
const STATIC: &str = "x86_64-unknown-linux-musl";

/// Maximum memory of an idle daemon with two devices.
const IDLE_KIB: u64 = 20 * 1024;

/// Idle cost, status, and a clean end.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("daemon/idle-status-end", |_| idle_status_end()), Case::alone("daemon/static", |_| static_build())]
}

/// Runs a musl build, which needs no library of the host, in its sandbox: two clients of one network, and two clients
/// of networks that a wire connects.
fn static_build() -> Result<String> {
    let program = static_program()?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    // Addresses that no other process uses.
    let number = std::process::id() << 1;
    let [near, far] = [number, number | 1].map(|number| Ipv4Addr::from_bits(0x7f00_0000 | number & 0xff_ffff));
    let networks = [
        "name=local".to_owned(),
        format!("name=near,uplink=vxlan:{near},remote={far},vni=7"),
        format!("name=far,uplink=vxlan:{far},remote={near},vni=7"),
    ];
    let devices = [(1, "local"), (2, "local"), (1, "near"), (2, "far")].map(|(number, network)| DaemonDevice {
        name: format!("{network}{number}"),
        socket: directory.path().join(format!("{network}{number}.socket")),
        mac: format!("52:54:00:00:00:{number:02x}"),
        options: format!(",network={network},pin=off"),
    });
    let setup = Setup { networks: &networks, program: Some(&program), ..Setup::default() };
    let mut daemon = Daemon::launch(&setup, directory.path(), &devices)?;
    let [a, b, near, far] = devices.map(|device| device.socket);
    host_adapter::check_at(&[a, b]).with_context(|| daemon.log_tail())?;
    host_adapter::compare_at(&[near, far]).with_context(|| daemon.log_tail())?;
    ensure!(daemon.terminate(), "the daemon did not end cleanly:\n{}", daemon.log_tail());
    Ok(String::new())
}

/// Returns the static program, if it was built.
fn static_program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let target = own.parent().and_then(Path::parent).context("this program lies in no target directory")?;
    let built = target.join(STATIC).join("debug/pvrdmad");
    if built.exists() {
        Ok(built)
    } else {
        Err(skip(format!("needs: CC_x86_64_unknown_linux_musl=gcc cargo build -p pvrdmad --target {STATIC}")))
    }
}

fn idle_status_end() -> Result<String> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let devices = [1, 2].map(|number| DaemonDevice {
        name: format!("vm{number}"),
        socket: directory.path().join(format!("{number}.socket")),
        mac: format!("52:54:00:00:00:{number:02x}"),
        options: String::new(),
    });
    let mut daemon = Daemon::start(directory.path(), &devices)?;
    let before = daemon.processor_ticks()?;
    // This is not a wait for an event: nothing may happen during this time.
    std::thread::sleep(Duration::from_secs(2));
    let used = daemon.processor_ticks()? - before;
    if used > 1 {
        bail!("the idle daemon used {used} clock ticks in two seconds");
    }
    let memory = daemon.memory_kib()?;
    if memory > IDLE_KIB {
        bail!("the idle daemon uses {memory} KiB, more than {IDLE_KIB}");
    }
    let status = daemon.status()?.to_string();
    for device in &devices {
        if !status.contains(&device.name) {
            bail!("{} is missing in the daemon's status: {status}", device.name);
        }
    }
    if !daemon.terminate() {
        bail!("the daemon did not end cleanly:\n{}", daemon.log_tail());
    }
    if let Some(device) = devices.iter().find(|device| device.socket.exists()) {
        bail!("the daemon left its socket {}", device.socket.display());
    }
    Ok(format!("{memory} KiB, {used} ticks in 2 s"))
}
