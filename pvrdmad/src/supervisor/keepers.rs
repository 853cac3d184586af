//! The keepers of a network: a process for each device whose client is there, which receives that client's descriptors.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::plan::Program;
use super::timing::{Budget, Rate};
use crate::config::SandboxMode;
use crate::status::WedgedProcess;

/// Most keepers of a device that were killed and have not ended. Beyond that the device takes no client.
const MOST_WEDGED: usize = 4;

/// How often a keeper is started for a device. A client can wedge one every few seconds, and a worker that was taken
/// over asks as often as it likes.
const STARTS: Rate = Rate { burst: 8, each: Duration::from_secs(1) };

/// How long a process may take to end that was killed, before it is said to be wedged.
const DEATH: Duration = Duration::from_secs(1);

/// The keepers of a network. They end with its worker, or with this.
#[derive(Debug)]
pub(super) struct Keepers {
    /// What they run. None: the network has no processes.
    program: Option<Program>,
    sandbox: SandboxMode,
    devices: Mutex<HashMap<String, Kept>>,
}

/// The keepers of a device.
#[derive(Debug)]
struct Kept {
    now: Option<Child>,
    /// Those that were killed and have not ended.
    killed: Vec<Killed>,
    starts: Budget,
}

#[derive(Debug)]
struct Killed {
    child: Child,
    since: Instant,
}

impl Keepers {
    pub(super) fn new(program: Option<Program>, sandbox: SandboxMode) -> Self {
        Self { program, sandbox, devices: Mutex::default() }
    }

    /// Returns `true` if devices have keepers.
    pub(super) const fn are_used(&self) -> bool {
        self.program.is_some()
    }

    /// Starts a keeper for a device, and kills the one that there is. Returns the socket to it.
    ///
    /// # Errors
    /// There is no room for another process, or too many keepers of this device do not end.
    pub(super) fn start(&self, device: &str) -> io::Result<OwnedFd> {
        let program = self.program.as_ref().ok_or_else(|| io::Error::other("networks have no processes"))?;
        let mut devices = self.devices.lock();
        let kept = devices.entry(device.to_owned()).or_insert_with(Kept::new);
        kept.kill();
        kept.sweep();
        if kept.killed.len() >= MOST_WEDGED {
            let processes: Vec<_> = kept.killed.iter().map(|killed| killed.child.id().to_string()).collect();
            let (count, processes) = (processes.len(), processes.join(", "));
            return Err(io::Error::other(format!(
                "{count} processes that received descriptors for this device were killed and do not end ({processes}): \
                 {}",
                WedgedProcess::REMEDY
            )));
        }
        if !kept.starts.take(Instant::now()) {
            return Err(io::Error::other("too many processes were started for it just now"));
        }
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let child = Command::new(&program.path)
            .args(&program.keeper)
            .args([self.sandbox.word(), device])
            .stdin(theirs)
            .stdout(Stdio::null())
            // Signals of a terminal are for the supervisor.
            .process_group(0)
            .spawn()?;
        kept.now = Some(child);
        Ok(ours)
    }

    /// Ends the keeper of a device.
    pub(super) fn end(&self, device: &str) {
        if let Some(kept) = self.devices.lock().get_mut(device) {
            kept.kill();
        }
    }

    /// Ends all.
    pub(super) fn end_all(&self) {
        self.devices.lock().values_mut().for_each(Kept::kill);
    }

    /// Those that were killed and do not end.
    pub(super) fn wedged(&self) -> Vec<WedgedProcess> {
        let mut devices = self.devices.lock();
        let mut wedged = Vec::new();
        devices.retain(|device, kept| {
            kept.sweep();
            let stuck = kept.killed.iter().filter(|killed| killed.since.elapsed() >= DEATH);
            wedged.extend(stuck.map(|killed| WedgedProcess {
                pid: killed.child.id(),
                role: format!("the keeper of device {device}"),
                seconds: killed.since.elapsed().as_secs(),
            }));
            kept.now.is_some() || !kept.killed.is_empty()
        });
        wedged
    }
}

impl Kept {
    fn new() -> Self {
        Self { now: None, killed: Vec::new(), starts: Budget::new(STARTS, Instant::now()) }
    }

    /// Kills the one that there is, without waiting for that.
    fn kill(&mut self) {
        if let Some(mut child) = self.now.take() {
            // It has ended already, or the kernel ends it when it can.
            let _ = child.kill();
            self.killed.push(Killed { child, since: Instant::now() });
        }
        self.sweep();
    }

    /// Forgets those that have ended.
    fn sweep(&mut self) {
        self.killed.retain_mut(|killed| matches!(killed.child.try_wait(), Ok(None)));
    }
}
