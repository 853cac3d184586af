//! Keepers of a network: for each device with a client, a process that receives that client's descriptors, and holds
//! the client while the network has no worker.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::keeper_places::{KeeperPlaces, LeftKeeper, Listening, connect, listen};
use super::program::Program;
use super::timing::{Budget, Rate};
use super::wedged::{Wedged, WorkerProcess};
use crate::config::SandboxMode;
use crate::events::Events;

/// Maximum number of wedged keepers of a device. While it is reached, no other keeper starts: once the current one is
/// gone as well, the device accepts no client.
const MOST_WEDGED: usize = 3;

/// Maximum rate of keeper starts for a device. A client can wedge a keeper every few seconds, and a compromised worker
/// may request one at any rate.
const STARTS: Rate = Rate { burst: 8, each: Duration::from_secs(1) };

/// Time that a killed keeper has to end before it counts as wedged. The kernel needs some time to release the
/// asynchronous operations that examine eventfds.
const DEATH: Duration = Duration::from_secs(1);

/// Keepers of a network. They outlive a worker that crashes, and end with the network.
#[derive(Debug)]
pub(super) struct Keepers {
    /// Program to run. `None`: networks have no processes of their own.
    program: Option<Program>,
    /// Directory in which the next daemon finds the keepers. `None`: they end with this daemon.
    places: Option<Arc<KeeperPlaces>>,
    sandbox: SandboxMode,
    network: String,
    /// Rate of crashes that a client survives.
    crashes: Rate,
    devices: Mutex<Devices>,
    killed: Mutex<Vec<Killed>>,
    wedged: Arc<Wedged>,
    events: Arc<Events>,
}

/// Devices with keepers, by name.
#[derive(Debug, Default)]
struct Devices {
    kept: HashMap<String, Kept>,
    /// The network stops: no other keeper starts.
    closed: bool,
    /// The worker hands its devices over: keepers that start now are those of its successor.
    handing_over: bool,
}

/// Keepers of a device.
#[derive(Debug)]
struct Kept {
    now: Option<Running>,
    /// Keeper of the worker that takes the device over.
    next: Option<Running>,
    /// The worker has ended, and the next one has not been given the current keeper yet.
    left: bool,
    starts: Budget,
    crashes: Budget,
}

/// A keeper and its socket.
#[derive(Debug)]
struct Running {
    process: WorkerProcess,
    listening: Listening,
}

/// Keeper that was killed a moment ago.
#[derive(Debug)]
struct Killed {
    keeper: WorkerProcess,
    device: String,
    since: Instant,
}

impl Keepers {
    pub(super) fn new(
        program: Option<Program>,
        places: Option<Arc<KeeperPlaces>>,
        sandbox: SandboxMode,
        network: &str,
        crashes: Rate,
        wedged: Arc<Wedged>,
        events: Arc<Events>,
    ) -> Self {
        let (devices, killed, network) = (Mutex::default(), Mutex::default(), network.to_owned());
        Self { program, places, sandbox, network, crashes, devices, killed, wedged, events }
    }

    /// Returns `true` if devices have keepers.
    pub(super) const fn are_used(&self) -> bool {
        self.program.is_some()
    }

    /// Starts a keeper for a device, and kills the current one. Returns the socket to the new one.
    ///
    /// # Errors
    /// The system cannot start another process, or too many keepers of this device are wedged.
    pub(super) fn start(&self, device: &str) -> io::Result<OwnedFd> {
        let program = self.program.as_ref().ok_or_else(|| io::Error::other("networks have no processes"))?;
        let mut devices = self.devices.lock();
        if devices.closed {
            return Err(io::Error::other("the network stops"));
        }
        let budget = |rate| Budget::new(rate, Instant::now());
        let none =
            || Kept { now: None, next: None, left: false, starts: budget(STARTS), crashes: budget(self.crashes) };
        let Devices { kept, handing_over, .. } = &mut *devices;
        let kept = kept.entry(device.to_owned()).or_insert_with(none);
        kept.left = false;
        // The worker that gives the device keeps its keeper until the worker that takes it serves the client.
        let current = if *handing_over { &mut kept.next } else { &mut kept.now };
        if let Some(keeper) = current.take() {
            self.kill(device, keeper.process);
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
        let (listener, listening) = listen(self.places.as_deref(), device)?;
        let connection = connect(listening.address())?;
        let child = Command::new(&program.path)
            .args(&program.keeper)
            .args([self.sandbox.word(), device])
            .stdin(listener)
            .stdout(Stdio::null())
            // A process group of its own: signals from a terminal must reach only the supervisor.
            .process_group(0)
            .spawn()?;
        *current = Some(Running { process: WorkerProcess::new(child)?, listening });
        Ok(connection)
    }

    /// Starts keepers for the worker that takes the devices over, from now on. Those of the giver stay.
    pub(super) fn begin_hand_over(&self) {
        self.devices.lock().handing_over = true;
    }

    /// Ends a hand-over. The keepers of the giver end if the devices were `given`, otherwise those of the taker.
    pub(super) fn end_hand_over(&self, given: bool) {
        let mut devices = self.devices.lock();
        devices.handing_over = false;
        for (device, kept) in &mut devices.kept {
            let Some(next) = kept.next.take() else { continue };
            let ended = if given { kept.now.replace(next) } else { Some(next) };
            if let Some(keeper) = ended {
                self.kill(device, keeper.process);
            }
        }
    }

    /// Prepares the keepers for the next worker: those whose clients have survived too many crashes are killed, which
    /// disconnects the clients. Returns the devices of the others.
    pub(super) fn worker_ended(&self) -> BTreeSet<String> {
        let mut devices = self.devices.lock();
        let mut left = BTreeSet::new();
        for (device, kept) in &mut devices.kept {
            let Some(mut keeper) = kept.now.take() else { continue };
            if !matches!(keeper.process.end_within(Duration::ZERO), Ok(None)) {
                continue;
            }
            if kept.crashes.take(Instant::now()) {
                kept.left = true;
                kept.now = Some(keeper);
                left.insert(device.clone());
            } else {
                // Log: the pause before the next worker bounds how often.
                log::error!(
                    "network {}: its process has crashed too often: the client of {device} is disconnected",
                    self.network
                );
                self.kill(device, keeper.process);
            }
        }
        left
    }

    /// Takes a keeper that an earlier daemon has left, for the first worker.
    pub(super) fn adopt(&self, keeper: LeftKeeper) {
        let LeftKeeper { device, process, place, has_client: _ } = keeper;
        let budget = |rate| Budget::new(rate, Instant::now());
        let (now, mut crashes) = (Some(Running { process, listening: Listening::Place(place) }), budget(self.crashes));
        // The end of the daemon counts: the client may have caused it.
        let _ = crashes.take(Instant::now());
        let kept = Kept { now, next: None, left: true, starts: budget(STARTS), crashes };
        self.devices.lock().kept.insert(device, kept);
    }

    /// Leaves to the next daemon the keepers that no worker was given, because this daemon does not start.
    pub(super) fn leave_adopted(&self) {
        for kept in self.devices.lock().kept.values_mut().filter(|kept| kept.left) {
            if let Some(Running { process: _, listening }) = kept.now.take() {
                listening.leave();
            }
        }
    }

    /// Returns a connection for the next worker to the keeper that an earlier worker has left, if there is one.
    pub(super) fn resume(&self, device: &str) -> Option<OwnedFd> {
        let mut devices = self.devices.lock();
        let kept = devices.kept.get_mut(device).filter(|kept| kept.left)?;
        kept.left = false;
        connect(kept.now.as_ref()?.listening.address()).ok()
    }

    /// Kills the keeper that an earlier worker has left, if there is one: its clients cannot be recovered.
    pub(super) fn abandon(&self, device: &str) {
        let mut devices = self.devices.lock();
        if let Some(kept) = devices.kept.get_mut(device).filter(|kept| kept.left)
            && let Some(keeper) = kept.now.take()
        {
            kept.left = false;
            self.kill(device, keeper.process);
        }
    }

    /// Renews the start budgets of all devices: the next worker starts keepers of its own, which neither a client nor
    /// the present worker has caused.
    pub(super) fn renew_budgets(&self) {
        for kept in self.devices.lock().kept.values_mut() {
            kept.starts = Budget::new(STARTS, Instant::now());
        }
    }

    /// Kills the keeper of a device, and waits a moment for its end.
    pub(super) fn end(&self, device: &str) {
        let Some(kept) = self.devices.lock().kept.remove(device) else { return };
        let keepers = [kept.now, kept.next];
        if keepers.iter().any(Option::is_some) {
            keepers.into_iter().flatten().for_each(|keeper| self.kill(device, keeper.process));
            self.wait(DEATH);
        }
    }

    /// Kills all keepers, and starts no others. Called before the worker is stopped, so that the deadline of wedged
    /// keepers passes while the worker ends, and not after it.
    pub(super) fn close(&self) {
        self.devices.lock().closed = true;
        self.end_all();
    }

    /// Kills all keepers.
    pub(super) fn end_all(&self) {
        for (device, kept) in &mut self.devices.lock().kept {
            for keeper in [kept.now.take(), kept.next.take()].into_iter().flatten() {
                self.kill(device, keeper.process);
            }
        }
    }

    /// Checks which of the killed keepers have ended. Those that miss their deadline are added to the wedged processes.
    pub(super) fn look(&self) {
        self.wait(Duration::ZERO);
    }

    fn kill(&self, device: &str, mut keeper: WorkerProcess) {
        keeper.kill();
        self.killed.lock().push(Killed { keeper, device: device.to_owned(), since: Instant::now() });
    }

    /// Waits up to `patience` for the killed keepers, and for none of them beyond its own deadline ([`DEATH`]).
    fn wait(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        // The list is taken out, so that its lock is not held during the wait.
        let killed = std::mem::take(&mut *self.killed.lock());
        for Killed { mut keeper, device, since } in killed {
            let deadline = deadline.min(since + DEATH);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn keepers() -> Keepers {
        let program = Program {
            path: "/bin/sh".into(),
            keeper: ["-c", "exec sleep 60"].map(str::to_owned).to_vec(),
            installed: None,
            arguments: Vec::new(),
        };
        let (crashes, wedged, events) =
            (Rate { burst: 9, each: Duration::from_secs(9) }, Arc::default(), Arc::default());
        Keepers::new(Some(program), None, SandboxMode::Off, "net", crashes, wedged, events)
    }

    /// Returns the process that holds the client of a device.
    fn holder(keepers: &Keepers) -> u32 {
        keepers.devices.lock().kept["vm"].now.as_ref().unwrap().process.id()
    }

    /// After a hand-over that was refused, the client would not survive a crash if its keeper had ended.
    #[test]
    fn the_keeper_of_the_giver_stays_until_its_devices_are_given() {
        let keepers = keepers();
        let _giver = keepers.start("vm").unwrap();
        let before = holder(&keepers);
        for given in [false, true] {
            keepers.begin_hand_over();
            let _taker = keepers.start("vm").unwrap();
            assert_eq!(holder(&keepers), before);
            keepers.end_hand_over(given);
            assert_eq!(holder(&keepers) == before, !given);
            assert_eq!(keepers.worker_ended(), BTreeSet::from(["vm".to_owned()]));
        }
    }
}
