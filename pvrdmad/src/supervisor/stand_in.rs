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
    /// Socket of the fallback server of a worker that another supervisor has not given to this one yet.
    arriving: Option<UnixStream>,
    /// Sockets of fallback servers that accept nothing more. They stay open until the worker ends, because a fallback
    /// server takes over when its socket closes.
    full: Vec<UnixStream>,
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
        let State { now, full, .. } = &mut *state;
        for stand_in in now.take().into_iter().chain(full.drain(..)) {
            if let Err(error) = tell_end(&stand_in) {
                // The server has exited, because it had nothing to guard or was killed.
                log::debug!("a fallback server is not told of the end of its worker: {error}");
            }
        }
        state.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// Leaves the fallback server to the supervisor that has taken the worker's devices.
    pub(super) fn given(&self) {
        self.state.lock().now = None;
    }

    /// Returns a duplicate of the socket of the current fallback server for another supervisor, if there is one.
    ///
    /// # Errors
    /// No descriptors are available, or there are several servers. Those that accept nothing more would take over when
    /// this process ends, although the worker still serves their pages.
    pub(super) fn duplicate(&self) -> io::Result<Option<OwnedFd>> {
        let state = self.state.lock();
        if !state.full.is_empty() {
            return Err(io::Error::other("the worker has more doorbell files than one fallback server guards"));
        }
        state.now.as_ref().map(|now| now.as_fd().try_clone_to_owned()).transpose()
    }

    /// Keeps the socket of another supervisor's fallback server for [`Self::adopted`].
    ///
    /// # Errors
    /// It is no socket.
    pub(super) fn expect(&self, socket: OwnedFd) -> io::Result<()> {
        let socket = UnixStream::from(socket);
        socket.set_write_timeout(Some(PATIENCE))?;
        self.state.lock().arriving = Some(socket);
        Ok(())
    }

    /// Uses the fallback server of the other supervisor from now on, because its worker has given its devices to a
    /// worker of this one.
    pub(super) fn adopted(&self) {
        let mut state = self.state.lock();
        state.now = state.arriving.take();
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
        // A server that takes no more files keeps those that it has. The next file gets a new server.
        if sent.is_err() {
            let full = state.now.take();
            state.full.extend(full);
        }
        sent.map(|()| alive.into())
    }
}
