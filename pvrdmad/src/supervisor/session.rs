//! One life of a worker's process, from its start to the cause of its end.

use std::env;
use std::fs::File;
use std::io::{self, Stderr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;

use super::connection::{CallError, Connection, Violation};
use super::services::Services;
use super::timing::Timing;
use super::upcalls::{UpcallError, Upcalls};
use super::worker_log::{self, WorkerLog};
use crate::logging;
use crate::protocol::{FrameError, FrameReader, Received, Reply, Request};

/// Why a worker is no more.
#[derive(Debug, Error)]
pub(super) enum End {
    /// It ended by itself, or somebody ended it.
    #[error("ended: {0}")]
    Exited(ExitStatus),
    /// It closed its socket and stayed.
    #[error("closed its socket")]
    HungUp,
    /// It did what no worker does.
    #[error("is not to be trusted: {0}")]
    Violation(#[from] Violation),
    /// It sent what is no frame of replies.
    #[error("is not to be trusted: a reply: {0}")]
    Frame(#[from] FrameError),
    /// It asked for what no worker asks for.
    #[error("is not to be trusted: a request: {0}")]
    Upcall(#[from] UpcallError),
    /// It owes a reply for too long.
    #[error("has not replied for {} s", .0.as_secs())]
    Hung(Duration),
    /// It does not do what it is for.
    #[error("cannot serve: {0}")]
    Refused(String),
    /// It is told to end.
    #[error("was stopped")]
    Stopped,
    /// The system does not let it be watched.
    #[error("cannot be watched: {0}")]
    System(#[from] io::Error),
}

/// Arenas that glibc's allocator has in a worker, unless the operator says otherwise. By default it makes eight for
/// each processor, and each keeps holes that no other uses: over a long life they add up (docs/proof.md).
const ARENAS: (&str, &str) = ("MALLOC_ARENA_MAX", "2");

/// A running worker, as the thread that watches it sees it. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct Session {
    child: Child,
    pid: u32,
    /// Readable when the process has ended.
    pidfd: OwnedFd,
    connection: Arc<Connection>,
    replies: FrameReader,
    upcalls: Upcalls,
    /// Its standard error, until it closes that.
    log: Option<WorkerLog<File, Stderr>>,
    reaped: bool,
}

impl Session {
    /// Starts a process. Gives the worker's end of the socket of upcalls as well, for the first request.
    ///
    /// # Errors
    /// The system has no room for it.
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
        let mut child = Command::new(program)
            .args(arguments)
            .envs(logging::environment())
            .envs(env::var_os(ARENAS.0).is_none().then_some(ARENAS))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(their_log)
            // Signals of a terminal are for the supervisor.
            .process_group(0)
            .spawn()?;
        let watched = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(io::Error::from);
        let made = watched.and_then(|pidfd| {
            let upcalls = Upcalls::new(upcalls, Arc::clone(services), timing.upcalls)?;
            Ok((pidfd, Arc::new(Connection::new(ours)?), upcalls))
        });
        match made {
            Ok((pidfd, connection, upcalls)) => {
                let (pid, replies) = (child.id(), FrameReader::new());
                let log = Some(WorkerLog::new(log, io::stderr(), network, timing.log));
                let session = Self { child, pid, pidfd, connection, replies, upcalls, log, reaped: false };
                Ok((session, their_upcalls.into()))
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
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

    /// Asks on the thread that watches, before anybody else can.
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

    /// Serves the worker's sockets until it ends.
    pub(super) fn run(&mut self, stop: &OwnedFd, patience: Duration) -> End {
        match self.pump_until(None, stop, patience) {
            Ok(_) => End::Stopped,
            Err(end) => end,
        }
    }

    /// Serves the worker's sockets until a reply is there, or without end. `None`: it is time to stop.
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

    /// Waits for one thing to happen and takes it. `false`: it is time to stop.
    fn pump(&mut self, stop: &OwnedFd, patience: Duration) -> Result<bool, End> {
        let now = Instant::now();
        // Not what was asked since: whoever asks does not wake us, and waits for less than this by itself.
        let hung =
            self.connection.oldest().map_or(patience, |oldest| (oldest + patience).saturating_duration_since(now));
        let (upcalls_wanted, refilled) = self.upcalls.interest(now);
        let timeout = refilled.map_or(hung, |refilled| refilled.min(hung));
        // Not even its end is to wake us when it has asked enough for now, or has closed it.
        let upcalls = upcalls_wanted.then(|| self.upcalls.stream().as_fd());
        let log = self.log.as_ref().map(AsFd::as_fd);
        let always = [stop.as_fd(), self.pidfd.as_fd(), self.connection.stream().as_fd()];
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
                // A process that has ended says more by how it did.
                Received::Closed if ended => return Ok(()),
                Received::Closed => return Err(self.gone()),
            }
        }
    }

    /// Why the socket has ended: because the process has, most likely.
    fn gone(&mut self) -> End {
        const MOMENT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
        let mut poll = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match rustix::event::poll(&mut poll, Some(&MOMENT)) {
            Ok(1) => self.reap().map_or_else(End::System, End::Exited),
            _ => End::HungUp,
        }
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait();
        self.reaped = true;
        status
    }

    /// Ends the process: closes its socket, gives it `patience` to leave, and kills it then. What it had said before is
    /// taken.
    pub(super) fn end(self, patience: Duration) {
        self.connection.end();
        let _ = self.connection.stream().shutdown(std::net::Shutdown::Both);
        if !self.reaped && !patience.is_zero() {
            let mut poll = [PollFd::new(&self.pidfd, PollFlags::IN)];
            let _ = rustix::event::poll(&mut poll, Timespec::try_from(patience).ok().as_ref());
        }
        // Dropping it does the rest.
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.end();
        if !self.reaped {
            // Stopped or stuck makes no difference to this one.
            let _ = self.child.kill();
            let _ = self.reap();
        }
        self.upcalls.drain();
    }
}
