//! The supervisor's view of a network, independent of whether its worker runs in a process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use anyhow::{Result, anyhow};
use parking_lot::Mutex;

use super::carrier::Follower;
use super::connection::{CallError, reply_by};
use super::plan::Plan;
use super::process::Process;
use super::program::Program;
use super::runs::Runs;
use super::services::Services;
use crate::protocol::{Reply, Request};
use crate::status::{DeviceReport, NetworkState, NetworkStatus, WorkerStatus};
use crate::worker::{Host, Worker};

/// A network.
#[derive(Debug)]
pub(super) struct Network {
    // Fields are dropped in this order: the follower stops before the worker that it tells, and the files of the
    // sockets go last.
    _follower: Option<Follower>,
    pub(super) runs: Arc<Runs>,
    pub(super) plan: Arc<Plan>,
    /// Held during a request for objects or failures. The reply may be long, so the supervisor holds at most one per
    /// network.
    showing: Mutex<()>,
    /// Serializes changes of devices.
    pub(super) changing: Mutex<()>,
    /// The network was created for a device added at run time, and ends with its last device.
    pub(super) temporary: bool,
}

/// A status that has been requested.
pub(super) enum AskedStatus {
    Known(Box<WorkerStatus>),
    Owed(Receiver<Reply>),
    None(CallError),
}

impl Drop for Network {
    fn drop(&mut self) {
        // No caller waits for the replies any more.
        self.begin_stop();
    }
}

impl Network {
    /// Starts the worker, in a process if there is a program for it.
    ///
    /// # Errors
    /// The network cannot be served.
    pub(super) fn start(plan: Arc<Plan>, program: Option<Program>, temporary: bool) -> Result<Self> {
        let runs = match program {
            Some(program) => Runs::Process(Process::start(Arc::clone(&plan), program)?),
            None => {
                let host: Arc<dyn Host> = Arc::<Services>::clone(&plan.services);
                let worker = Worker::start(plan.setup.clone(), plan.uplink()?, host)?;
                worker.handle(Request::Carrier { carrier: plan.settings().carrier() }, Vec::new());
                for planned in plan.devices() {
                    let Some((request, fds)) = planned.request(&plan.stand_ins)? else { continue };
                    if let Reply::Error(problem) = worker.handle(request, fds) {
                        return Err(anyhow!("device {}: {problem}", planned.name()));
                    }
                }
                Runs::Here(Box::new(worker))
            }
        };
        Self::assemble(plan, runs, temporary)
    }

    /// Uses a worker that has taken the devices already.
    ///
    /// # Errors
    /// The interface of the uplink cannot be followed.
    pub(super) fn adopt(plan: Arc<Plan>, process: Process, temporary: bool) -> Result<Self> {
        Self::assemble(plan, Runs::Process(process), temporary)
    }

    fn assemble(plan: Arc<Plan>, runs: Runs, temporary: bool) -> Result<Self> {
        let runs = Arc::new(runs);
        // A change since the state was read is a pending hint on the watch, so none is lost.
        let follower = plan.watch().map(|watch| Follower::start(watch, &plan, &runs)).transpose()?;
        Ok(Self { _follower: follower, runs, plan, showing: Mutex::default(), changing: Mutex::default(), temporary })
    }

    /// Returns `true` if the network has a device of this name.
    pub(super) fn has(&self, device: &str) -> bool {
        self.plan.has(device)
    }

    /// Returns the names of its devices.
    pub(super) fn devices(&self) -> Vec<String> {
        self.plan.devices().iter().map(|planned| planned.name().to_owned()).collect()
    }

    pub(super) fn name(&self) -> &str {
        self.plan.name()
    }

    /// Tells the worker to end, without waiting for it. Open requests get no reply.
    pub(super) fn begin_stop(&self) {
        if let Runs::Process(process) = &*self.runs {
            process.begin_stop();
        }
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// There is no worker, or no reply in time.
    pub(super) fn call(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, CallError> {
        let deadline = Instant::now() + self.plan.timing.call;
        let turn = matches!(request, Request::Show { .. } | Request::Failures { .. })
            .then(|| self.showing.try_lock_until(deadline));
        let _turn = match turn {
            Some(None) => return Err(CallError::Unresponsive),
            Some(turn) => turn,
            None => None,
        };
        match &*self.runs {
            Runs::Here(worker) => Ok(worker.handle(request, fds)),
            Runs::Process(process) => process.ask(request, &fds).and_then(|receiver| reply_by(&receiver, deadline)),
        }
    }

    /// Requests the status, without waiting for it.
    pub(super) fn ask_status(&self, describe: bool) -> AskedStatus {
        match &*self.runs {
            Runs::Here(worker) => AskedStatus::Known(Box::new(worker.status(describe))),
            Runs::Process(process) => {
                process.ask(Request::Status { describe }, &[]).map_or_else(AskedStatus::None, AskedStatus::Owed)
            }
        }
    }

    /// Returns the state of the network, and its worker's status if that arrives before `deadline`.
    pub(super) fn status(&self, asked: AskedStatus, deadline: Instant) -> (NetworkStatus, Option<WorkerStatus>) {
        let said = match asked {
            AskedStatus::Known(status) => Ok(*status),
            AskedStatus::None(error) => Err(error),
            AskedStatus::Owed(receiver) => reply_by(&receiver, deadline).and_then(|reply| match reply {
                Reply::Ok(status) => Ok(*status),
                _ => Err(CallError::Unresponsive),
            }),
        };
        let state = match said {
            Ok(_) => NetworkState::Running,
            Err(CallError::Unresponsive) => NetworkState::Unresponsive,
            Err(CallError::Gone | CallError::Ended) => NetworkState::Restarting,
        };
        let said = said.ok().map(|status| self.of_this_network(status));
        let (pid, restarts, last_end) = match &*self.runs {
            Runs::Here(_) => (Some(std::process::id()), 0, None),
            Runs::Process(process) => {
                let life = process.life();
                (life.running.map(|(pid, _)| pid), life.restarts, life.last_end)
            }
        };
        let status = NetworkStatus {
            name: self.name().to_owned(),
            state,
            pid,
            restarts,
            last_end,
            lost_vms: self.plan.services.lost(),
            stuck_clients: said.as_ref().map(|said| said.stuck_clients.clone()).unwrap_or_default(),
            lost_sockets: self.plan.lost_sockets(),
            interface: self.plan.interface(),
            uplink: said.as_ref().and_then(|said| said.uplink.clone()),
            keepers: self.plan.setup.keepers,
            sandbox: said.as_ref().and_then(|said| said.sandbox.clone()),
            fault: self.plan.settings().fault.map(|fault| fault.to_string()),
            devices: self.devices(),
        };
        (status, said)
    }

    /// Drops reports about devices that are not in this network: a worker must not speak for other networks.
    fn of_this_network(&self, status: WorkerStatus) -> WorkerStatus {
        let mut left = self.devices();
        let mut take = |report: &DeviceReport| {
            let at = left.iter().position(|name| name == report.name());
            at.map(|at| left.swap_remove(at)).is_some()
        };
        let devices: Vec<_> = status.devices.into_iter().filter(|report| take(report)).collect();
        WorkerStatus { devices, ..status }
    }
}
