// Long: the life of a network's workers, from one to the next.
//! Worker of a network in its own process: a thread starts it, watches it, and starts the next one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use log::{error, info, warn};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::connection::{CallError, Connection};
use super::hand_over_order::{Arrival, FirstStart, Gift, HandOverError, HandOverResult, Wanted};
use super::joining::Joinable;
use super::plan::{Plan, Planned, Settings};
use super::program::Program;
use super::services::LeftClients;
use super::session::{End, LOOK, Session};
use super::timing::{BackOff, Timing};
use crate::config::FaultWord;
use crate::doorbells::DoorbellSetup;
use crate::events::Event;
use crate::protocol::{Reply, Request};

/// Worker of a network in its own process. Dropping it ends the worker.
#[derive(Debug)]
pub(super) struct Process {
    plan: Arc<Plan>,
    lives: Arc<Lives>,
    /// Wakes the thread that watches the worker, to stop it or to replace it by another one.
    stop: OwnedFd,
    thread: Option<Joinable>,
}

/// Worker that takes devices from the worker of another supervisor.
#[derive(Debug)]
pub(super) struct Adopting {
    /// Takes the socket to the other worker. Dropped before the process, whose thread may wait for it.
    pub(super) from: SyncSender<OwnedFd>,
    /// Receives the result of the preparation.
    pub(super) prepared: Receiver<FirstStart>,
    pub(super) process: Process,
    /// Receives the result of the hand-over.
    pub(super) first: Receiver<FirstStart>,
}

/// State of the workers, shared between callers and the thread that keeps them running.
#[derive(Debug, Default)]
struct Lives {
    life: Mutex<Life>,
    /// Notified when a worker begins to serve, or when there will be none any more.
    changed: Condvar,
    /// The network ends.
    stopping: AtomicBool,
    /// A hand-over is wanted.
    wanted: Mutex<Option<Wanted>>,
}

/// State of the workers so far.
#[derive(Debug, Default, Clone)]
pub(super) struct Life {
    /// PID of the serving worker, and the connection to it.
    pub(super) running: Option<(u32, Arc<Connection>)>,
    /// Number of workers that ended and were to be replaced.
    pub(super) restarts: u64,
    /// End of the last one of them.
    pub(super) last_end: Option<String>,
    /// A hand-over is in progress. The worker that will serve may have been set up from an earlier plan.
    handing_over: bool,
    /// No other worker will start.
    over: bool,
}

impl Process {
    /// Starts the worker and waits until it serves.
    ///
    /// # Errors
    /// The worker cannot start or refuses its configuration.
    pub(super) fn start(plan: Arc<Plan>, program: Program) -> Result<Self> {
        let (process, first) = Self::spawn(plan, program, None)?;
        match first.recv() {
            Ok(Ok(())) => Ok(process),
            Ok(Err(end)) => Err(anyhow!(end)),
            Err(_) => Err(anyhow!("the thread that starts its worker ended")),
        }
    }

    /// Starts a worker that takes the devices from the worker of another supervisor.
    ///
    /// # Errors
    /// The system cannot start another thread.
    pub(super) fn adopt(plan: Arc<Plan>, program: Program) -> Result<Adopting> {
        let ((prepared, is_prepared), (arrives, from)) = (sync_channel(1), sync_channel(1));
        let (process, first) = Self::spawn(plan, program, Some(Arrival { prepared, from }))?;
        Ok(Adopting { process, prepared: is_prepared, from: arrives, first })
    }

    /// Starts the thread. Also returns the receiver of the first start's result.
    fn spawn(plan: Arc<Plan>, program: Program, arrival: Option<Arrival>) -> Result<(Self, Receiver<FirstStart>)> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let lives = Arc::<Lives>::default();
        let (started, first) = sync_channel(1);
        let name = format!("net {}", plan.name());
        let (stopped, shared, first_start) = (stop.try_clone()?, Arc::clone(&lives), Some(started));
        let keeper =
            Keeper { plan: Arc::clone(&plan), program, stop: stopped, lives: shared, first: first_start, arrival };
        let thread = Joinable::spawn(name, move || keeper.run()).context("a thread")?;
        // From here on dropping `process` ends the thread.
        Ok((Self { plan, lives, stop, thread: Some(thread) }, first))
    }

    pub(super) fn life(&self) -> Life {
        self.lives.life.lock().clone()
    }

    /// Returns the connection to the serving worker, if there is one.
    pub(super) fn serving(&self) -> Option<Arc<Connection>> {
        self.lives.life.lock().running.as_ref().map(|(_, connection)| Arc::clone(connection))
    }

    /// Returns the connection to the serving worker, or to the next one if it serves before the deadline. The worker of
    /// `lost` has ended, although the watching thread may not have noticed it yet.
    ///
    /// # Errors
    /// No worker serves before the deadline.
    pub(super) fn wait_serving(
        &self,
        lost: Option<&Arc<Connection>>,
        deadline: Instant,
    ) -> Result<Arc<Connection>, CallError> {
        let mut life = self.lives.life.lock();
        loop {
            let running = life.running.as_ref().map(|(_, connection)| connection);
            if let Some(connection) = running.filter(|running| !lost.is_some_and(|lost| Arc::ptr_eq(lost, running))) {
                return Ok(Arc::clone(connection));
            }
            if life.over || self.lives.changed.wait_until(&mut life, deadline).timed_out() {
                return Err(CallError::Gone);
            }
        }
    }

    /// Waits for the end of a hand-over. Returns `false` if there is one at the deadline.
    pub(super) fn wait_handed_over(&self, deadline: Instant) -> bool {
        let mut life = self.lives.life.lock();
        let is_open = |life: &mut Life| life.handing_over && !life.over;
        !self.lives.changed.wait_while_until(&mut life, is_open, deadline).timed_out()
    }

    /// Applies a change that holds for all later workers. Returns `false`, without applying it, if `connection` does
    /// not lead to the serving worker any more: the next worker may then start without the change.
    pub(super) fn while_serving(&self, connection: &Arc<Connection>, change: impl FnOnce()) -> bool {
        let life = self.lives.life.lock();
        let serves = life.running.as_ref().is_some_and(|(_, serving)| Arc::ptr_eq(serving, connection));
        if serves {
            change();
        }
        serves
    }

    /// Sends a request to the serving worker.
    ///
    /// # Errors
    /// There is no worker, or it takes no more requests.
    pub(super) fn ask(&self, request: Request, fds: &[OwnedFd]) -> Result<Receiver<Reply>, CallError> {
        let connection = self.serving().ok_or(CallError::Gone)?;
        self.ask_one(&connection, request, fds)
    }

    /// Sends a request to this worker.
    ///
    /// # Errors
    /// The worker takes no more requests.
    pub(super) fn ask_one(
        &self,
        connection: &Connection,
        request: Request,
        fds: &[OwnedFd],
    ) -> Result<Receiver<Reply>, CallError> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // One more than planned: the worker may have a device that is not yet in the plan.
        connection.ask(request, &fds, self.plan.count().saturating_add(1))
    }

    /// Replaces the worker by a new one that takes its devices with their clients.
    ///
    /// # Errors
    /// The devices stay with the worker, or with the next one if this one has ended meanwhile.
    pub(super) fn hand_over(&self, deadline: Instant) -> HandOverResult {
        let (done, result) = sync_channel(1);
        self.want(Wanted::Renew(done))?;
        match result.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err("it takes too long, and goes on".to_owned()),
            Err(RecvTimeoutError::Disconnected) => Err("the network ends".to_owned()),
        }
    }

    /// Gives the devices to the worker of another supervisor. Returns the receiver of the result.
    ///
    /// # Errors
    /// Another hand-over is in progress.
    pub(super) fn give(&self, gift: Gift) -> Result<Receiver<HandOverResult>, String> {
        let (done, result) = sync_channel(1);
        self.want(Wanted::Give(gift, done))?;
        Ok(result)
    }

    fn want(&self, wanted: Wanted) -> Result<(), String> {
        let mut waiting = self.lives.wanted.lock();
        if waiting.is_some() {
            return Err("another hand-over is in progress".to_owned());
        }
        *waiting = Some(wanted);
        drop(waiting);
        self.wake();
        Ok(())
    }

    /// Requests the worker's end, without waiting for it.
    pub(super) fn begin_stop(&self) {
        self.lives.stopping.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            // Log: once for a network.
            error!("cannot wake the thread that watches a worker: {error}");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.begin_stop();
        if let Some(thread) = self.thread.take() {
            // The time for ending a worker, and a second for everything else.
            let Timing { stop, kill, .. } = self.plan.timing;
            thread.join_within(stop + kill + Duration::from_secs(1));
        }
    }
}

/// Thread that keeps a worker running. The kernel kills the worker when this thread ends for any reason, because the
/// parent-death signal follows the thread that started the process.
pub(super) struct Keeper {
    pub(super) plan: Arc<Plan>,
    pub(super) program: Program,
    pub(super) stop: OwnedFd,
    lives: Arc<Lives>,
    /// Receives the result of the first start.
    first: Option<SyncSender<FirstStart>>,
    /// The first worker takes the devices from the worker of another supervisor.
    pub(super) arrival: Option<Arrival>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.lives.life.lock().over = true;
        self.lives.changed.notify_all();
    }
}

impl Keeper {
    fn run(mut self) {
        let timing = self.plan.timing;
        let mut pauses = BackOff::new(&timing);
        loop {
            let born = Instant::now();
            let (pid, end) = self.live();
            let left = self.plan.services.worker_ended();
            if matches!(end, End::Stopped | End::Given) {
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
            self.report(pid, &end, left, pause);
            if !self.wait(pause) || !self.wait_for_room() {
                return;
            }
        }
    }

    /// Starts a process. Also returns the worker's end of the upcall socket.
    pub(super) fn start(&self, program: &Path) -> io::Result<(Session, OwnedFd)> {
        let mut arguments = self.program.arguments.clone();
        arguments.extend(self.plan.confinement().map(str::to_owned));
        arguments.push(self.plan.name().to_owned());
        Session::start(program, &arguments, self.plan.name(), &self.plan.services, &self.plan.timing)
    }

    /// Runs one worker, and those to which it hands its devices over, from its start to the end of the last one.
    fn live(&mut self) -> (Option<u32>, End) {
        let (mut session, begun) = match self.begin() {
            Ok(begun) => begun,
            Err(end) => return (None, end),
        };
        let mut pid = session.pid();
        let end = match begun {
            Err(end) => end,
            Ok(()) => {
                let lost = self.plan.services.end_recovery();
                if !lost.is_empty() {
                    // Log: the pause before each start bounds how often.
                    warn!("network {}: {} lost the device until the VM restarts", self.plan.name(), lost.join(", "));
                }
                if let Some(first) = self.first.take() {
                    let _ = first.send(Ok(()));
                } else {
                    // Log: the pause before each start bounds how often.
                    info!("network {}: a new worker serves (process {pid})", self.plan.name());
                }
                loop {
                    let end = session.run(&self.stop, self.plan.timing.hung);
                    // During a possible hand-over, requests wait as they do for the next worker.
                    let mut life = self.lives.life.lock();
                    (life.running, life.handing_over) = (None, true);
                    drop(life);
                    if !matches!(end, End::Stopped) || self.is_stopping() {
                        break end;
                    }
                    if let Err(end) = self.hand_over_if_wanted(&mut session) {
                        break end;
                    }
                    pid = session.pid();
                }
            }
        };
        // The next worker starts from the plan.
        self.lives.life.lock().handing_over = false;
        self.lives.changed.notify_all();
        let Timing { stop, kill, .. } = self.plan.timing;
        match end {
            End::Stopped | End::Given => {
                self.plan.services.close_keepers();
                session.end(stop, kill / 2);
            }
            _ => session.end(Duration::ZERO, kill),
        }
        match end {
            End::Given => self.plan.stand_ins.given(),
            _ => self.plan.stand_ins.worker_ended(),
        }
        (Some(pid), end)
    }

    /// Returns `true` if the network ends. Otherwise the thread was woken for another reason, and can be woken again.
    fn is_stopping(&self) -> bool {
        // Cleared first: a stop that is requested afterwards wakes the thread again.
        let _ = rustix::io::read(&self.stop, &mut [0; 8]);
        self.lives.stopping.load(Ordering::Acquire)
    }

    /// Hands the devices over if that is wanted. Afterwards `session` is that of the new worker, or still that of the
    /// present one after a refusal.
    fn hand_over_if_wanted(&self, session: &mut Session) -> Result<(), End> {
        let wanted = self.lives.wanted.lock().take();
        if let Some(wanted) = wanted {
            let (done, tried) = match wanted {
                Wanted::Renew(done) => (done, self.hand_over(session).map(|taken| (taken, Ok(())))),
                Wanted::Give(gift, done) => (done, self.give_to(session, &gift).map(|given| (given, Err(End::Given)))),
            };
            let (result, end) = match tried {
                Ok((handed_over, end)) => (Ok(handed_over), end),
                Err(HandOverError::Refused(problem)) => (Err(problem), Ok(())),
                Err(HandOverError::Ended(end)) => (Err(format!("its worker {end}")), Err(end)),
            };
            let _ = done.try_send(result);
            end?;
        }
        self.serves_again(session)
    }

    /// Lets other threads send requests again: to the worker that has taken the devices, or to the one that has kept
    /// them. The carrier may have changed meanwhile; all other changes wait for the end of a hand-over.
    fn serves_again(&self, session: &mut Session) -> Result<(), End> {
        let mut told = None;
        loop {
            // It is compared under the lock, as in `set_up`.
            let life = self.lives.life.lock();
            let settings = self.plan.settings();
            if settings.interface == told {
                self.serves_locked(life, session);
                return Ok(());
            }
            drop(life);
            self.call(session, Request::Carrier { carrier: settings.carrier() }, &[])?;
            told = settings.interface;
        }
    }

    /// Configures a new worker. On success, its state equals the plan and it accepts requests.
    pub(super) fn set_up(&self, session: &mut Session, upcalls: OwnedFd) -> Result<(), End> {
        let (mut given, mut set) = (Vec::new(), self.greet(session, upcalls)?);
        loop {
            // Settings come first, because devices begin with the current carrier.
            self.give_settings(session, &mut set)?;
            self.give(session, &mut given)?;
            // The plan may have changed meanwhile. It is compared under the lock: a later change finds the worker in
            // `running` and is sent to it.
            let mut life = self.lives.life.lock();
            if self.plan.is(&given) && self.plan.settings() == set {
                life.running = Some((session.pid(), Arc::clone(session.connection())));
                self.lives.changed.notify_all();
                return Ok(());
            }
        }
    }

    /// Sends a new worker its configuration without devices. Returns its settings.
    pub(super) fn greet(&self, session: &mut Session, upcalls: OwnedFd) -> Result<Settings, End> {
        let fds: Vec<_> = [upcalls].into_iter().chain(self.plan.uplink()?).collect();
        self.call(session, self.plan.hello(), &fds)?;
        Ok(self.plan.first_settings())
    }

    /// Updates the devices of a worker from `given` to the current plan.
    fn give(&self, session: &mut Session, given: &mut Vec<Arc<Planned>>) -> Result<(), End> {
        let planned = self.plan.devices();
        let lacks = |list: &[Arc<Planned>], one: &Arc<Planned>| !list.iter().any(|other| Arc::ptr_eq(other, one));
        for gone in given.iter().filter(|one| lacks(&planned, one)) {
            self.call(session, Request::RemoveDevice { device: gone.name().to_owned() }, &[])?;
        }
        given.retain(|one| !lacks(&planned, one));
        for new in planned {
            if !lacks(given, &new) {
                continue;
            }
            // Removed meanwhile: the next look at the plan shows it.
            let Some((mut request, mut fds)) = new.request(&self.plan.stand_ins)? else { continue };
            self.add_left_clients(new.name(), &mut request, &mut fds);
            self.give_device(session, new.name(), request, &fds)?;
            given.push(new);
        }
        Ok(())
    }

    /// Gives a device to a worker.
    pub(super) fn give_device(
        &self,
        session: &mut Session,
        name: &str,
        request: Request,
        fds: &[OwnedFd],
    ) -> Result<(), End> {
        self.call(session, request, fds).map_err(|end| match end {
            End::Refused(problem) => End::Refused(format!("device {name}: {problem}")),
            end => end,
        })
    }

    /// Adds to a request the clients that a crashed worker has left at the keeper of a device.
    fn add_left_clients(&self, device: &str, request: &mut Request, fds: &mut Vec<OwnedFd>) {
        let keepers = &self.plan.services.keepers;
        match request {
            Request::Serve { kept, doorbells: DoorbellSetup::Trapped { .. }, .. } => {
                if let Some(keeper) = keepers.resume(device) {
                    *kept = true;
                    // Behind the listening socket.
                    fds.insert(1, keeper);
                }
            }
            // The next worker does not see the client's stores to mapped doorbell pages.
            _ => keepers.abandon(device),
        }
    }

    /// Lets other threads send requests to this worker.
    pub(super) fn serves(&self, session: &Session) {
        self.serves_locked(self.lives.life.lock(), session);
    }

    fn serves_locked(&self, mut life: MutexGuard<'_, Life>, session: &Session) {
        life.running = Some((session.pid(), Arc::clone(session.connection())));
        life.handing_over = false;
        self.lives.changed.notify_all();
    }

    /// Updates the settings of a worker from `set` to the current ones.
    pub(super) fn give_settings(&self, session: &mut Session, set: &mut Settings) -> Result<(), End> {
        let now = self.plan.settings();
        if now.carrier() != set.carrier() {
            self.call(session, Request::Carrier { carrier: now.carrier() }, &[])?;
        }
        if now.fault != set.fault {
            let (network, fault) = (self.plan.name().to_owned(), FaultWord(now.fault));
            self.call(session, Request::Fault { network, fault }, &[])?;
        }
        if let Some(level) = now.log.clone().filter(|_| now.log != set.log) {
            self.call(session, Request::LogLevel { level }, &[])?;
        }
        *set = now;
        Ok(())
    }

    pub(super) fn call(&self, session: &mut Session, request: Request, fds: &[OwnedFd]) -> Result<(), End> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        session.call(request, &fds, &self.stop, self.plan.timing.start)
    }

    /// Logs that a worker has ended, and lists its VMs.
    fn report(&self, pid: Option<u32>, end: &End, left: LeftClients, pause: Duration) {
        let LeftClients { kept, lost } = left;
        let network = self.plan.name();
        let process = pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
        // Log: at most one line per pause before a start.
        error!("network {network}: its worker{process} {end}; the next one starts in {} ms", pause.as_millis());
        if !lost.is_empty() {
            // Log: likewise.
            warn!("network {network}: {} lost the device until the VM restarts", lost.join(", "));
        }
        if !kept.is_empty() {
            // Log: likewise.
            warn!("network {network}: {} keep their VMs, and the next process serves them", kept.join(", "));
        }
        let mut life = self.lives.life.lock();
        life.restarts = life.restarts.saturating_add(1);
        life.last_end = Some(end.to_string());
        drop(life);
        let (network, how, lost_vms) = (network.to_owned(), end.to_string(), lost);
        self.plan.services.events.tell(&Event::NetworkEnded { network, how, lost_vms });
    }

    /// Waits while the network has its maximum number of wedged processes. Returns `false` if it is time to stop.
    fn wait_for_room(&self) -> bool {
        if self.plan.services.has_left_most() {
            // Log: once for each process that is left behind.
            error!("network {}: no other process starts until one of these ends", self.plan.name());
        }
        while self.plan.services.has_left_most() {
            if !self.wait(LOOK) {
                return false;
            }
            self.plan.services.look_for_wedged();
        }
        true
    }

    /// Waits for a time. Returns `false` if it is time to stop.
    fn wait(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut poll = [PollFd::new(&self.stop, PollFlags::IN)];
            match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
                Err(Errno::INTR) => {}
                Ok(0) => return true,
                Ok(_) if self.is_stopping() => return false,
                Ok(_) => {
                    if let Some(wanted) = self.lives.wanted.lock().take() {
                        wanted.refuse("no worker serves the network now");
                    }
                }
                Err(errno) => {
                    // Log: the last of this thread.
                    error!("network {}: {}", self.plan.name(), io::Error::from(errno));
                    return false;
                }
            }
        }
    }
}
