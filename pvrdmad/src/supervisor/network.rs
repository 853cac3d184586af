//! A network as the supervisor sees it, whichever way its worker runs.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use anyhow::{Result, anyhow};
use parking_lot::Mutex;
use pvrdma_ether_link::vxlan::VxlanPorts;

use super::connection::{CallError, reply_by};
use super::plan::{Plan, Program};
use super::process::Process;
use super::services::Services;
use super::sockets::NetworkSockets;
use super::timing::Timing;
use crate::config::{Config, Network as Description};
use crate::protocol::{NetworkSetup, Reply, Request};
use crate::status::{DeviceReport, NetworkState, NetworkStatus, WorkerStatus};
use crate::worker::{Host, Worker};

/// A network.
#[derive(Debug)]
pub(super) struct Network {
    // Dropped in this order: the sockets' files go last.
    runs: Runs,
    plan: Arc<Plan>,
    /// Objects of a device may be many: the supervisor has those of one at a time.
    showing: Mutex<()>,
}

/// How its worker runs.
#[derive(Debug)]
enum Runs {
    Here(Box<Worker>),
    Process(Process),
}

/// A status that was asked for.
pub(super) enum AskedStatus {
    Known(Box<WorkerStatus>),
    Owed(Receiver<Reply>),
    None(CallError),
}

impl Plan {
    /// Opens the sockets of a network.
    ///
    /// # Errors
    /// One cannot be had, or the host's addresses cannot be changed.
    pub(super) fn new(config: &Config, network: &Description, tunnels: &VxlanPorts, timing: Timing) -> Result<Self> {
        let sockets = NetworkSockets::open(network, tunnels)?;
        let addresses = match &config.backend {
            crate::config::BackendSpec::Ibverbs(spec) => {
                pvrdma_ibverbs::host_addresses(spec).map_err(|problem| anyhow!("{}: {problem}", spec.device))?
            }
            crate::config::BackendSpec::Rxe => None,
        };
        let services = Services::new(network, sockets.connectors(&network.devices), addresses);
        let setup = NetworkSetup {
            backend: config.backend.clone(),
            sandbox: config.sandbox,
            captures: config.captures.is_on(),
            network: Description { devices: Vec::new(), ..network.clone() },
        };
        Ok(Self { setup, devices: network.devices.clone(), sockets, services: Arc::new(services), timing })
    }
}

impl Network {
    /// Starts the worker, in a process if there is a program for it.
    ///
    /// # Errors
    /// It cannot serve.
    pub(super) fn start(plan: Arc<Plan>, program: Option<Program>) -> Result<Self> {
        let runs = match program {
            Some(program) => Runs::Process(Process::start(Arc::clone(&plan), program)?),
            None => {
                let host: Arc<dyn Host> = Arc::<Services>::clone(&plan.services);
                let worker = Worker::start(plan.setup.clone(), plan.uplink()?, host)?;
                for addition in plan.additions() {
                    let (name, request, fds) = addition?;
                    if let Reply::Error(problem) = worker.handle(request, fds) {
                        return Err(anyhow!("device {name}: {problem}"));
                    }
                }
                Runs::Here(Box::new(worker))
            }
        };
        Ok(Self { runs, plan, showing: Mutex::default() })
    }

    /// Returns `true` if a device of this name is here.
    pub(super) fn has(&self, device: &str) -> bool {
        self.devices().any(|known| known == device)
    }

    /// Names of its devices.
    pub(super) fn devices(&self) -> impl Iterator<Item = &str> {
        self.plan.devices.iter().map(|device| device.config.name.as_str())
    }

    pub(super) fn name(&self) -> &str {
        self.plan.name()
    }

    /// Has the worker end, without waiting for that. Nobody gets replies from it any more.
    pub(super) fn begin_stop(&self) {
        if let Runs::Process(process) = &self.runs {
            process.begin_stop();
        }
    }

    /// Asks, and waits for the reply.
    ///
    /// # Errors
    /// There is none, or in time.
    pub(super) fn call(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, CallError> {
        let _turn = matches!(request, Request::Show { .. }).then(|| self.showing.lock());
        match &self.runs {
            Runs::Here(worker) => Ok(worker.handle(request, fds)),
            Runs::Process(process) => {
                let receiver = process.ask(request, &fds)?;
                reply_by(&receiver, Instant::now() + self.plan.timing.call)
            }
        }
    }

    /// Asks for the status, without waiting for it.
    pub(super) fn ask_status(&self) -> AskedStatus {
        match &self.runs {
            Runs::Here(worker) => AskedStatus::Known(Box::new(worker.status())),
            Runs::Process(process) => {
                process.ask(Request::Status {}, &[]).map_or_else(AskedStatus::None, AskedStatus::Owed)
            }
        }
    }

    /// When a status that is asked for now has to be here.
    pub(super) fn status_deadline(&self) -> Instant {
        Instant::now() + self.plan.timing.status
    }

    /// The state of the network, and what its worker says, if that is here in time.
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
        let (pid, restarts, last_end) = match &self.runs {
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
            sandbox: said.as_ref().and_then(|said| said.sandbox.clone()),
            devices: self.devices().map(str::to_owned).collect(),
        };
        (status, said)
    }

    /// Keeps to the devices that are here, whatever a worker says of others.
    fn of_this_network(&self, status: WorkerStatus) -> WorkerStatus {
        let mut left: Vec<&str> = self.devices().collect();
        let mut take = |report: &DeviceReport| {
            let at = left.iter().position(|&name| name == report.name());
            at.map(|at| left.swap_remove(at)).is_some()
        };
        let devices: Vec<_> = status.devices.into_iter().filter(|report| take(report)).collect();
        WorkerStatus { devices, ..status }
    }
}
