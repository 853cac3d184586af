//! Lifetime of one worker process, from its start to the cause of its end.

use std::env;
use std::fs::File;
use std::io::{self, Stderr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use thiserror::Error;

use super::connection::{CallError, Connection, Violation};
use super::services::Services;
use super::timing::Timing;
use super::upcalls::{UpcallError, Upcalls};
use super::wedged::WorkerProcess;
use super::worker_log::{self, WorkerLog};
use crate::logging;
use crate::protocol::{FrameError, FrameReader, Received, Reply, Request};

/// Reason why a worker has ended.
#[derive(Debug, Error)]
pub(super) enum End {
    /// The process exited or was killed.
    #[error("ended: {0}")]
    Exited(ExitStatus),
    /// The process closed its socket but did not exit.
    #[error("closed its socket")]
    HungUp,
    /// The worker violated the protocol.
    #[error("is not to be trusted: {0}")]
    Violation(#[from] Violation),
    /// The worker sent data that is no frame of replies.
    #[error("is not to be trusted: a reply: {0}")]
    Frame(#[from] FrameError),
    /// The worker sent an invalid request.
    #[error("is not to be trusted: a request: {0}")]
    Upcall(#[from] UpcallError),
    /// The worker has not replied for too long.
    #[error("has not replied for {} s", .0.as_secs())]
    Hung(Duration),
    /// The process was killed, and one of its threads does not return from a system call.
    #[error("was killed, and a thread of it does not end")]
    Wedged,
    /// The worker refused its configuration.
    #[error("cannot serve: {0}")]
    Refused(String),
    /// The supervisor stopped the worker.
    #[error("was stopped")]
    Stopped,
    /// The worker gave its devices to the worker of another supervisor.
    #[error("gave its devices away")]
    Given,
    /// A system call needed to watch the worker failed.
    #[error("cannot be watched: {0}")]
    System(#[from] io::Error),
}

/// Number of malloc arenas of a worker, unless the operator sets it. By default glibc creates up to eight for each
/// processor, and the free memory in one is not used by the others: over a long life that adds up (docs/dev/proof.md).
const ARENAS: (&str, &str) = ("MALLOC_ARENA_MAX", "2");

/// Interval of checks for processes that have ended without a sign of it: killed, with one thread stuck in the kernel
/// that keeps all descriptors open.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// The same while no request is open: an idle daemon should sleep, and the end of a process that owes no reply may be
/// noticed a little later.
const IDLE_LOOK: Duration = Duration::from_secs(5);
/// Time for a process to exit after it has closed its socket, most likely because it exits.
const MOMENT: Duration = Duration::from_secs(1);

/// Running worker, owned by the thread that watches it. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct Session {
    /// `None` once its end was seen.
    process: Option<WorkerProcess>,
    pid: u32,
    services: Arc<Services>,
    /// Time for the process to end after it was killed.
    kill: Duration,
    next_look: Instant,
    connection: Arc<Connection>,
    replies: FrameReader,
    upcalls: Upcalls,
    /// Standard error of the process; `None` once it is closed.
    log: Option<WorkerLog<File, Stderr>>,
}

impl Session {
    /// Starts a process. Also returns the worker's end of the upcall socket, to be sent with the first request.
    ///
    /// # Errors
    /// The system cannot start another process.
    pub(super) fn start(
        program: &Path,
        arguments: &[String],
        network: &str,
        services: &Arc<Services>,
        timing: &Timing,
    ) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (upcalls, their_upcalls) = UnixStream::pair()?;
        let (log, their_log) = worker_log::pipe()?;
        let child = Command::new(program)
            .args(arguments)
            .envs(logging::environment())
            .envs(env::var_os(ARENAS.0).is_none().then_some(ARENAS))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(their_log)
            // A process group of its own: signals from a terminal must reach only the supervisor.
            .process_group(0)
            .spawn()?;
        let mut process = WorkerProcess::new(child)?;
        let made = Upcalls::new(upcalls, Arc::clone(services), timing.upcalls)
            .and_then(|upcalls| Ok((Arc::new(Connection::new(ours)?), upcalls)));
        match made {
            Ok((connection, upcalls)) => {
                let session = Self {
                    pid: process.id(),
                    process: Some(process),
                    services: Arc::clone(services),
                    kill: timing.kill,
                    next_look: Instant::now() + LOOK,
                    connection,
                    replies: FrameReader::new(),
                    upcalls,
                    log: Some(WorkerLog::new(log, io::stderr(), network, timing.log)),
                };
                Ok((session, their_upcalls.into()))
            }
            Err(error) => {
                // The worker has received no request yet, so nothing can block its end.
                process.kill();
                let _ = process.end_within(timing.kill);
                Err(error)
            }
        }
    }

    pub(super) const fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) const fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Sends a request from the watching thread, before other threads can, and waits for the reply.
    ///
    /// # Errors
    /// The worker ended, refused, or took too long.
    pub(super) fn call(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        stop: &OwnedFd,
        patience: Duration,
    ) -> Result<(), End> {
        let receiver = match self.connection.ask(request, fds, 0) {
            Ok(receiver) => receiver,
            Err(CallError::Unresponsive) => return Err(End::Hung(Duration::ZERO)),
            Err(CallError::Gone | CallError::Ended) => return Err(self.gone()),
        };
        match self.pump_until(Some(&receiver), stop, patience)? {
            Some(Reply::Error(problem)) => Err(End::Refused(problem)),
            Some(_) => Ok(()),
            None => Err(End::Stopped),
        }
    }

    /// Waits for the reply to a request that was sent before. Returns `None` if it is time to stop.
    ///
    /// # Errors
    /// The worker ended, or took too long.
    pub(super) fn wait(
        &mut self,
        reply: &Receiver<Reply>,
        stop: &OwnedFd,
        patience: Duration,
    ) -> Result<Option<Reply>, End> {
        self.pump_until(Some(reply), stop, patience)
    }

    /// Serves the worker's sockets until it ends.
    pub(super) fn run(&mut self, stop: &OwnedFd, patience: Duration) -> End {
        match self.pump_until(None, stop, patience) {
            Ok(_) => End::Stopped,
            Err(end) => end,
        }
    }

    /// Serves the worker's sockets until a reply arrives or, without `reply`, until the worker ends. Returns `None` if
    /// it is time to stop.
    fn pump_until(
        &mut self,
        reply: Option<&Receiver<Reply>>,
        stop: &OwnedFd,
        patience: Duration,
    ) -> Result<Option<Reply>, End> {
        loop {
            match reply.map(Receiver::try_recv) {
                Some(Ok(reply)) => return Ok(Some(reply)),
                Some(Err(TryRecvError::Disconnected)) => return Err(self.gone()),
                Some(Err(TryRecvError::Empty)) | None => {}
            }
            if !self.pump(stop, patience)? {
                return Ok(None);
            }
        }
    }

    /// Waits for events once and handles them. Returns `false` if it is time to stop.
    fn pump(&mut self, stop: &OwnedFd, patience: Duration) -> Result<bool, End> {
        let now = Instant::now();
        self.look(now)?;
        // Requests that are sent during this wait do not wake the thread; their callers time out earlier themselves.
        let hung =
            self.connection.oldest().map_or(patience, |oldest| (oldest + patience).saturating_duration_since(now));
        let (upcalls_wanted, refilled) = self.upcalls.interest(now);
        let timeout = refilled.map_or(hung, |refilled| refilled.min(hung));
        let timeout = timeout.min(self.next_look.saturating_duration_since(now));
        let Some(process) = &self.process else { return Err(End::HungUp) };
        // The upcalls of a worker that has used up its rate must not wake the thread.
        let upcalls = upcalls_wanted.then(|| self.upcalls.stream().as_fd());
        let log = self.log.as_ref().map(AsFd::as_fd);
        let always = [stop.as_fd(), process.as_fd(), self.connection.stream().as_fd()];
        let polled = always.into_iter().chain(upcalls).chain(log);
        let mut poll: Vec<_> = polled.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match rustix::event::poll(&mut poll, Timespec::try_from(timeout).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(End::System(errno.into())),
        }
        let mut happened = poll.iter().map(|polled| !polled.revents().is_empty());
        let mut next = |watched: bool| watched && happened.next().unwrap_or(false);
        let [stopping, ended, replies] = [(); 3].map(|()| next(true));
        let (upcalls, said) = (next(upcalls.is_some()), next(log.is_some()));
        drop(poll);
        if stopping {
            return Ok(false);
        }
        if said && !self.log.as_mut().is_some_and(WorkerLog::take) {
            self.log = None;
        }
        if upcalls && !self.upcalls.take()? {
            return Err(self.gone());
        }
        if replies {
            self.take_replies(ended)?;
        }
        if ended {
            return Err(self.gone());
        }
        match self.connection.oldest() {
            Some(oldest) if oldest.elapsed() >= patience => Err(End::Hung(oldest.elapsed())),
            _ => Ok(true),
        }
    }

    fn take_replies(&mut self, ended: bool) -> Result<(), End> {
        loop {
            match self.replies.receive(self.connection.stream(), self.connection.longest())? {
                Received::Frame(frame) => self.connection.settle(&frame.body)?,
                Received::Pending => return Ok(()),
                // The exit status of a process that has ended tells more than its closed socket.
                Received::Closed if ended => return Ok(()),
                Received::Closed => return Err(self.gone()),
            }
        }
    }

    /// Checks periodically for the end of processes that give no sign of it: this one, and the wedged ones.
    fn look(&mut self, now: Instant) -> Result<(), End> {
        if now < self.next_look {
            return Ok(());
        }
        self.next_look = now + if self.connection.oldest().is_some() { LOOK } else { IDLE_LOOK };
        self.services.look_for_wedged();
        // The pidfd of a process that ends regularly provides its exit status shortly.
        if self.process.as_ref().is_some_and(WorkerProcess::is_over) { Err(self.gone()) } else { Ok(()) }
    }

    /// Returns the reason for a closed socket, most likely the end of the process.
    fn gone(&mut self) -> End {
        let Some(process) = &mut self.process else { return End::HungUp };
        match process.end_within(MOMENT) {
            Ok(Some(status)) => {
                self.process = None;
                End::Exited(status)
            }
            Ok(None) if process.is_over() => End::Wedged,
            Ok(None) => End::HungUp,
            Err(error) => End::System(error),
        }
    }

    /// Ends the process: closes its socket, gives it the time `stop` to exit, then kills it and waits for at most the
    /// time `kill`. Upcalls that it sent before are still processed.
    pub(super) fn end(mut self, stop: Duration, kill: Duration) {
        self.kill = kill;
        self.connection.end();
        // Only this half is closed: a worker that sees both halves closed takes that for the death of this process, and
        // leaves its clients to the next daemon.
        let _ = self.connection.stream().shutdown(std::net::Shutdown::Write);
        let deadline = Instant::now() + stop;
        while let Some(process) = &mut self.process
            && !process.is_over()
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            if matches!(process.end_within(left.min(LOOK)), Ok(Some(_))) {
                self.process = None;
            }
        }
        // Dropping the session kills the process and drains the upcalls.
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.end();
        if let Some(mut process) = self.process.take() {
            process.kill();
            if !matches!(process.end_within(self.kill), Ok(Some(_))) {
                self.services.leave_behind(process);
            }
        }
        self.upcalls.drain();
    }
}
