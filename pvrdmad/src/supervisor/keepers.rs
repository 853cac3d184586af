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

use super::plan::Program;
use super::timing::{Budget, Rate};
use super::wedged::{Wedged, WorkerProcess};
use crate::config::SandboxMode;
use crate::events::Events;

/// Most keepers of a device that were killed and have not ended. Beyond that the device takes no client.
const MOST_WEDGED: usize = 4;

/// How often a keeper is started for a device. A client can wedge one every few seconds, and a worker that was taken
/// over asks as often as it likes.
const STARTS: Rate = Rate { burst: 8, each: Duration::from_secs(1) };

/// How long a keeper may take to end that was killed. It has a few pages and no file to close, unless it is wedged.
const DEATH: Duration = Duration::from_millis(200);

/// The keepers of a network. They end with its worker.
#[derive(Debug)]
pub(super) struct Keepers {
    /// What they run. None: the network has no processes.
    program: Option<Program>,
    sandbox: SandboxMode,
    network: String,
    devices: Mutex<HashMap<String, Kept>>,
    wedged: Arc<Wedged>,
    events: Arc<Events>,
}

/// The keepers of a device.
#[derive(Debug)]
struct Kept {
    now: Option<WorkerProcess>,
    starts: Budget,
}

impl Keepers {
    pub(super) fn new(
        program: Option<Program>,
        sandbox: SandboxMode,
        network: &str,
        wedged: Arc<Wedged>,
        events: Arc<Events>,
    ) -> Self {
        Self { program, sandbox, network: network.to_owned(), devices: Mutex::default(), wedged, events }
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
        self.reap(kept.now.take().map(|keeper| (device, keeper)).into_iter().collect());
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

    /// Ends the keeper of a device.
    pub(super) fn end(&self, device: &str) {
        if let Some(Kept { now: Some(keeper), .. }) = self.devices.lock().remove(device) {
            self.reap(vec![(device, keeper)]);
        }
    }

    /// Ends all.
    pub(super) fn end_all(&self) {
        let mut devices = self.devices.lock();
        let keepers = devices.iter_mut().filter_map(|(device, kept)| Some((device.as_str(), kept.now.take()?)));
        self.reap(keepers.collect());
    }

    /// Kills keepers, and leaves those that do not end to the list of such processes.
    fn reap(&self, mut keepers: Vec<(&str, WorkerProcess)>) {
        keepers.iter_mut().for_each(|(_, keeper)| keeper.kill());
        let deadline = Instant::now() + DEATH;
        for (device, mut keeper) in keepers {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Ok(None) = keeper.end_within(left) {
                self.wedged.keep(keeper, &self.network, Some(device), &self.events);
            }
        }
    }
}
