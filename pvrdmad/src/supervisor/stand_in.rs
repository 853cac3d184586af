//! Who guards doorbell pages, so that the end of a worker is not that of its VMMs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;

use crate::config::SandboxMode;
use crate::doorbells::{entrust, tell_end};
use crate::logging;

/// How long it may take to take a file.
const PATIENCE: Duration = Duration::from_secs(1);

/// The processes that guard the doorbell pages of a network: one for each of its workers. They outlive this one, if
/// VMMs do.
#[derive(Debug)]
pub(super) struct StandIns {
    /// What they run, or why there are none.
    program: Result<PathBuf, String>,
    /// Their arguments.
    arguments: [String; 3],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The one for the worker that serves, once there is something to guard.
    now: Option<UnixStream>,
    /// Those whose end was not seen yet.
    children: Vec<Child>,
}

impl StandIns {
    pub(super) fn new(program: Result<PathBuf, String>, sandbox: SandboxMode, network: &str) -> Self {
        let arguments = ["stand-in", sandbox.word(), network].map(str::to_owned);
        Self { program, arguments, state: Mutex::default() }
    }

    /// The worker has ended, or was killed and is left behind. In the latter case its end of the pipe may stay open.
    pub(super) fn worker_ended(&self) {
        let mut state = self.state.lock();
        if let Some(told) = state.now.take().map(|stand_in| tell_end(&stand_in))
            && let Err(error) = told
        {
            // It has ended, as it has nothing to guard or was killed.
            log::debug!("a stand-in is not told of the end of its worker: {error}");
        }
        state.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// Has a connection of a file with so many pages guarded. Returns what tells that whoever serves it has ended: that
    /// one has it, and nobody else.
    ///
    /// # Errors
    /// There is nobody who could.
    pub(super) fn guard(&self, pages: u32, device: &OwnedFd) -> io::Result<OwnedFd> {
        let program = self.program.as_ref().map_err(|reason| io::Error::other(reason.clone()))?;
        let (life, alive) = io::pipe()?;
        let mut state = self.state.lock();
        if state.now.is_none() {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_write_timeout(Some(PATIENCE))?;
            let mut command = Command::new(program);
            command
                .args(&self.arguments)
                .envs(logging::environment())
                .stdin(OwnedFd::from(theirs))
                .stdout(Stdio::null());
            // Signals of a terminal are for the supervisor.
            state.children.push(command.process_group(0).spawn()?);
            state.now = Some(ours);
        }
        let sent = state.now.as_ref().map_or(Ok(()), |to| entrust(to, pages, device.as_fd(), life.as_fd()));
        if sent.is_err() {
            state.now = None;
        }
        sent.map(|()| alive.into())
    }
}
