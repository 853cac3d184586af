//! The keepers of a network: a process for each device whose client is there, which receives that client's descriptors.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::program::Program;
use super::timing::{Budget, Rate};
use super::wedged::{Wedged, WorkerProcess};
use crate::config::SandboxMode;
use crate::events::Events;

/// While so many keepers of a device do not end that were killed, no other is started: when the one that is there is
/// gone as well, the device takes no client.
const MOST_WEDGED: usize = 3;

/// How often a keeper is started for a device. A client can wedge one every few seconds, and a worker that was taken
/// over asks as often as it likes.
const STARTS: Rate = Rate { burst: 8, each: Duration::from_secs(1) };

/// How long a keeper may take to end that was killed, before it is said not to. The kernel takes a while for the
/// asynchronous operations by which eventfds are examined.
const DEATH: Duration = Duration::from_secs(1);

/// The keepers of a network. They end with its worker.
#[derive(Debug)]
pub(super) struct Keepers {
    /// What they run. None: the network has no processes.
    program: Option<Program>,
    sandbox: SandboxMode,
    network: String,
    devices: Mutex<HashMap<String, Kept>>,
    killed: Mutex<Vec<Killed>>,
    wedged: Arc<Wedged>,
    events: Arc<Events>,
}

/// The keepers of a device.
#[derive(Debug)]
struct Kept {
    now: Option<WorkerProcess>,
    starts: Budget,
}

/// One that was killed a moment ago.
#[derive(Debug)]
struct Killed {
    keeper: WorkerProcess,
    device: String,
    since: Instant,
}

impl Keepers {
    pub(super) fn new(
        program: Option<Program>,
        sandbox: SandboxMode,
        network: &str,
        wedged: Arc<Wedged>,
        events: Arc<Events>,
    ) -> Self {
        let (devices, killed, network) = (Mutex::default(), Mutex::default(), network.to_owned());
        Self { program, sandbox, network, devices, killed, wedged, events }
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
        let none = || Kept { now: None, starts: Budget::new(STARTS, Instant::now()) };
        let kept = devices.entry(device.to_owned()).or_insert_with(none);
        if let Some(keeper) = kept.now.take() {
            self.kill(device, keeper);
        }
        self.look();
        self.wedged.look(&self.events);
        let left = self.wedged.keepers_of(&self.network, device);
        if left.len() >= MOST_WEDGED {
            let (count, processes) = (left.len(), left.iter().map(u32::to_string).collect::<Vec<_>>().join(", "));
            return Err(io::Error::other(format!(
                "{count} processes that received its clients' descriptors were killed and do not end ({processes})"
            )));
        }
        if !kept.starts.take(Instant::now()) {
            return Err(io::Error::other("too many processes were started for it just now"));
        }
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = Command::new(&program.path)
            .args(&program.keeper)
            .args([self.sandbox.word(), device])
            .stdin(theirs)
            .stdout(Stdio::null())
            // Signals of a terminal are for the supervisor.
            .process_group(0)
            .spawn()?;
        kept.now = Some(WorkerProcess::new(child)?);
        Ok(ours)
    }

    /// Ends the keeper of a device, and waits a moment for that.
    pub(super) fn end(&self, device: &str) {
        let kept = self.devices.lock().remove(device);
        if let Some(keeper) = kept.and_then(|kept| kept.now) {
            self.kill(device, keeper);
            self.wait(DEATH);
        }
    }

    /// Ends all.
    pub(super) fn end_all(&self) {
        for (device, kept) in &mut *self.devices.lock() {
            if let Some(keeper) = kept.now.take() {
                self.kill(device, keeper);
            }
        }
    }

    /// Looks which have ended of those that were killed. Those that do not end go to the list of such processes.
    pub(super) fn look(&self) {
        self.wait(Duration::ZERO);
    }

    fn kill(&self, device: &str, mut keeper: WorkerProcess) {
        keeper.kill();
        self.killed.lock().push(Killed { keeper, device: device.to_owned(), since: Instant::now() });
    }

    /// Waits for so long for those that were killed.
    fn wait(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        // Not locked meanwhile.
        let killed = std::mem::take(&mut *self.killed.lock());
        for Killed { mut keeper, device, since } in killed {
            match keeper.end_within(deadline.saturating_duration_since(Instant::now())) {
                Ok(None) if since.elapsed() < DEATH => self.killed.lock().push(Killed { keeper, device, since }),
                Ok(None) => self.wedged.keep(keeper, &self.network, Some(&device), &self.events),
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }
}

impl Drop for Keepers {
    fn drop(&mut self) {
        self.end_all();
        self.wait(DEATH);
    }
}
