//! Fallback servers, which guard doorbell pages so that VMMs survive the end of a worker.

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

/// Time limit for handing over a file.
const PATIENCE: Duration = Duration::from_secs(1);

/// Fallback servers of a network: processes that guard its doorbell pages, one for each worker. They outlive the
/// supervisor as long as VMMs use the pages.
#[derive(Debug)]
pub(super) struct StandIns {
    /// Path of their program, or the reason why there is none.
    program: Result<PathBuf, String>,
    /// Their arguments.
    arguments: [String; 3],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Socket of the current worker's fallback server, once there are pages to guard.
    now: Option<UnixStream>,
    /// Processes that have not been reaped.
    children: Vec<Child>,
}

impl StandIns {
    pub(super) fn new(program: Result<PathBuf, String>, sandbox: SandboxMode, network: &str) -> Self {
        let arguments = ["stand-in", sandbox.word(), network].map(str::to_owned);
        Self { program, arguments, state: Mutex::default() }
    }

    /// Tells the fallback server that the worker has ended, or was killed and is left behind. In the latter case its
    /// end of the pipe may stay open, so the server cannot rely on the pipe.
    pub(super) fn worker_ended(&self) {
        let mut state = self.state.lock();
        if let Some(told) = state.now.take().map(|stand_in| tell_end(&stand_in))
            && let Err(error) = told
        {
            // The server has exited, because it had nothing to guard or was killed.
            log::debug!("a stand-in is not told of the end of its worker: {error}");
        }
        state.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// Registers the FUSE connection of a file with `pages` pages at the fallback server. Returns the end of a pipe
    /// that tells the server when the worker exits: the worker must hold the only copy.
    ///
    /// # Errors
    /// There is no fallback server.
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
            // A process group of its own keeps it from signals of the terminal, which the supervisor handles.
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
