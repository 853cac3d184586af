//! The daemon by itself, without guests.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::case::Case;
use crate::daemon::{Daemon, DaemonDevice};

/// What an idle daemon with two devices may use.
const IDLE_KIB: u64 = 20 * 1024;

/// Idle cost, status, and a clean end.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("daemon/idle-status-end", |_| idle_status_end())]
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
    // Not a wait for an event: the time in which nothing must happen.
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
