//! A network whose worker has a process of its own: a thread that starts it, watches it, and starts the next one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use log::{error, info, warn};
use parking_lot::Mutex;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::connection::{CallError, Connection};
use super::plan::{Plan, Program};
use super::session::{End, Session};
use super::timing::BackOff;
use crate::protocol::{Reply, Request};

/// A worker in a process of its own. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Process {
    life: Arc<Mutex<Life>>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    devices: usize,
}

/// What is known of the workers so far.
#[derive(Debug, Default, Clone)]
pub(super) struct Life {
    /// The one that serves now, with its process.
    pub(super) running: Option<(u32, Arc<Connection>)>,
    /// Workers that ended and were to be replaced.
    pub(super) restarts: u64,
    /// How the last one of them ended.
    pub(super) last_end: Option<String>,
}

impl Process {
    /// Starts the worker and waits until it serves.
    ///
    /// # Errors
    /// It does not come so far.
    pub(super) fn start(plan: Arc<Plan>, program: Program) -> Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let life = Arc::<Mutex<Life>>::default();
        let (started, first) = sync_channel(1);
        let devices = plan.devices.len();
        let name = format!("net {}", plan.name());
        let keeper = Keeper { plan, program, stop: stop.try_clone()?, life: Arc::clone(&life), first: Some(started) };
        let thread = threads::spawn(ThreadKind::Supervisor, name, move || keeper.run()).context("a thread")?;
        // From here on dropping it ends the thread.
        let process = Self { life, stop, thread: Some(thread), devices };
        match first.recv() {
            Ok(Ok(())) => Ok(process),
            Ok(Err(end)) => Err(anyhow!(end)),
            Err(_) => Err(anyhow!("the thread that starts its worker ended")),
        }
    }

    pub(super) fn life(&self) -> Life {
        self.life.lock().clone()
    }

    /// Asks the worker.
    ///
    /// # Errors
    /// There is none, or it takes no request.
    pub(super) fn ask(&self, request: Request, fds: &[OwnedFd]) -> Result<Receiver<Reply>, CallError> {
        let running = self.life.lock().running.clone();
        let (_, connection) = running.ok_or(CallError::Gone)?;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        connection.ask(request, &fds, self.devices)
    }

    /// Has it end, without waiting for that.
    pub(super) fn begin_stop(&self) {
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            error!("cannot stop a worker: {error}");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.begin_stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the thread of a worker panicked");
        }
    }
}

/// The thread that keeps a worker running. The kernel ends the process with this thread, however that happens.
struct Keeper {
    plan: Arc<Plan>,
    program: Program,
    stop: OwnedFd,
    life: Arc<Mutex<Life>>,
    /// Is told of the first start.
    first: Option<SyncSender<Result<(), String>>>,
}

impl Keeper {
    fn run(mut self) {
        let timing = self.plan.timing;
        let mut pauses = BackOff::new(&timing);
        loop {
            let born = Instant::now();
            let (pid, end) = self.live();
            let lost = self.plan.services.worker_ended();
            if matches!(end, End::Stopped) {
                return;
            }
            if let Some(first) = self.first.take() {
                let _ = first.send(Err(match end {
                    End::Refused(problem) => problem,
                    end => format!("its worker {end}"),
                }));
                return;
            }
            let pause = pauses.pause(born.elapsed(), &timing);
            self.report(pid, &end, &lost, pause);
            if !self.wait(pause) {
                return;
            }
        }
    }

    /// One worker, from its start to its end.
    fn live(&mut self) -> (Option<u32>, End) {
        let mut arguments = self.program.arguments.clone();
        arguments.push(self.plan.name().to_owned());
        let started = Session::start(&self.program.path, &arguments, &self.plan.services, &self.plan.timing);
        let (mut session, upcalls) = match started {
            Ok(started) => started,
            Err(error) => return (None, End::System(error)),
        };
        let pid = session.pid();
        let end = match self.set_up(&mut session, upcalls) {
            Err(end) => end,
            Ok(()) => {
                self.life.lock().running = Some((pid, Arc::clone(session.connection())));
                if let Some(first) = self.first.take() {
                    let _ = first.send(Ok(()));
                } else {
                    info!("network {}: a new worker serves (process {pid})", self.plan.name());
                }
                let end = session.run(&self.stop, self.plan.timing.hung);
                self.life.lock().running = None;
                end
            }
        };
        session.end(if matches!(end, End::Stopped) { self.plan.timing.stop } else { Duration::ZERO });
        (Some(pid), end)
    }

    /// Tells a new worker what it is for.
    fn set_up(&self, session: &mut Session, upcalls: OwnedFd) -> Result<(), End> {
        let patience = self.plan.timing.start;
        let fds: Vec<_> = [upcalls].into_iter().chain(self.plan.uplink()?).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        session.call(self.plan.hello(), &fds, &self.stop, patience)?;
        for addition in self.plan.additions() {
            let (name, request, fds) = addition?;
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            session.call(request, &fds, &self.stop, patience).map_err(|end| match end {
                End::Refused(problem) => End::Refused(format!("device {name}: {problem}")),
                end => end,
            })?;
        }
        Ok(())
    }

    /// Says that a worker has ended, and what that means for whom.
    fn report(&self, pid: Option<u32>, end: &End, lost: &[String], pause: Duration) {
        let network = self.plan.name();
        let process = pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
        error!("network {network}: its worker{process} {end}; the next one starts in {} ms", pause.as_millis());
        if !lost.is_empty() {
            warn!("network {network}: {} lost the device until the VM restarts", lost.join(", "));
        }
        let mut life = self.life.lock();
        life.restarts = life.restarts.saturating_add(1);
        life.last_end = Some(end.to_string());
    }

    /// Lets a time pass. `false`: it is time to stop.
    fn wait(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut poll = [PollFd::new(&self.stop, PollFlags::IN)];
            match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
                Err(Errno::INTR) => {}
                Ok(0) => return true,
                Ok(_) => return false,
                Err(errno) => {
                    error!("network {}: {}", self.plan.name(), io::Error::from(errno));
                    return false;
                }
            }
        }
    }
}
