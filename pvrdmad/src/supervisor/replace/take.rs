//! The side of the new supervisor.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use log::error;
use parking_lot::{Mutex, RwLock};
use pvrdma_vfio_user_server::socket::{FileIdentity, SocketFile};
use thiserror::Error;

use super::outcome::Starter;
use super::wire::{ArrivedNetwork, DescribedDaemon, New, Old, get_daemon, get_old};
use crate::config::Config;
use crate::fault_point;
use crate::logging;
use crate::metrics::Place;
use crate::protocol::Upgraded;
use crate::protocol::exchange::{put, put_descriptors};
use crate::supervisor::doorbells::DoorbellHost;
use crate::supervisor::keeper_places::KeeperPlaces;
use crate::supervisor::network::Network;
use crate::supervisor::plan::Plan;
use crate::supervisor::process::Adopting;
use crate::supervisor::process::Process;
use crate::supervisor::program::Program;
use crate::supervisor::sockets::Sources;
use crate::supervisor::timing::Timing;
use crate::supervisor::{Front, Supervisor};

/// Reason why the old daemon still serves its networks.
#[derive(Debug, Error)]
pub(crate) enum TakeOverError {
    /// Networks cannot be handed over.
    #[error("the daemon is not replaced")]
    Networks(Vec<Upgraded>),
    /// The daemon ended, or does not keep to the protocol.
    #[error("the daemon is not replaced: {0:#}")]
    Other(#[from] anyhow::Error),
}

/// A daemon that was taken over.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) supervisor: Supervisor,
    /// Configuration of the start or the last reload of the old daemon.
    pub(crate) loaded: Config,
    pub(crate) control: Option<SocketFile>,
    pub(crate) metrics: Option<Place>,
    /// Result for each network.
    pub(crate) networks: Vec<Upgraded>,
    old: UnixStream,
}

impl Taken {
    /// Tells the old daemon that this one serves its control socket, so that it ends.
    pub(crate) fn serves(old: &UnixStream) {
        // A daemon that has ended need not be told.
        let _ = put(old, &New::Serves {});
    }

    /// Takes out the connection to the old daemon.
    pub(crate) fn into_parts(self) -> (Supervisor, Config, Option<SocketFile>, Option<Place>, UnixStream) {
        let Self { supervisor, loaded, control, metrics, networks: _, old } = self;
        (supervisor, loaded, control, metrics, old)
    }
}

/// A network that is being taken.
struct Taking {
    plan: Arc<Plan>,
    temporary: bool,
    adopting: Adopting,
}

/// Takes all networks from the supervisor at the other end of a connection.
///
/// # Errors
/// The other supervisor serves them as before.
pub(crate) fn take_over(old: UnixStream, program: &Program) -> Result<Taken, TakeOverError> {
    let timing = Timing::default();
    // The old daemon has deadlines of its own, and its end closes the connection, so none is needed here.
    old.set_read_timeout(None).context("the connection")?;
    fault_point::reach("connected");
    let (daemon, fds, arrived) = get_daemon(&old)?;
    fault_point::reach("described");
    let path = daemon.control.as_ref().and_then(Option::as_ref).map(FileIdentity::path);
    let keepers = path.map(KeeperPlaces::beside).map(Arc::new);
    let sources = Sources { keepers, doorbells: DoorbellHost::new(Some(program.clone())), ..Sources::default() };
    if let Some(level) = &daemon.log {
        logging::set(level);
        *sources.log.lock() = Some(level.clone());
    }
    let (control, metrics) = front(&daemon, fds)?;
    let takings = match prepare(arrived, program, &sources, timing) {
        Ok(takings) => takings,
        Err(problems) => {
            put(&old, &New::Refused { networks: problems.clone() })?;
            return Err(TakeOverError::Networks(problems));
        }
    };
    fault_point::reach("prepared");
    let networks = exchange(&old, &takings)?;
    own(&takings, control.as_ref(), metrics.as_ref());
    let deadline = Instant::now() + timing.start;
    let served = takings.into_iter().filter_map(|taking| finish(taking, program, deadline).map(Arc::new)).collect();
    let DescribedDaemon { config, loaded, .. } = daemon;
    let supervisor = Supervisor {
        started: Instant::now(),
        backend: config.backend.to_string(),
        networks: RwLock::new(served),
        config: Mutex::new(config),
        loaded: Mutex::new(loaded.clone()),
        front: Mutex::new(Front::default()),
        gate: RwLock::new(false),
        starter: Starter::default(),
        ended: Mutex::default(),
        sources,
        program: Some(program.clone()),
        timing,
    };
    Ok(Taken { supervisor, loaded, control, metrics, networks, old })
}

/// Restores the sockets of the daemon itself.
fn front(daemon: &DescribedDaemon, fds: Vec<OwnedFd>) -> Result<(Option<SocketFile>, Option<Place>)> {
    let mut fds = VecDeque::from(fds);
    let mut next = || fds.pop_front().context("too few descriptors");
    let control = daemon.control.clone();
    let control = control.map(|file| Ok::<_, anyhow::Error>(SocketFile::adopt(UnixListener::from(next()?), file)));
    let control = control.transpose()?;
    let metrics = daemon.metrics.clone().map(|place| Ok::<_, anyhow::Error>(Place::adopt(place, next()?)));
    Ok((control, metrics.transpose()?))
}

/// Starts a worker for each network, and waits until all of them wait for their devices.
///
/// # Errors
/// Some cannot take their network, for these reasons.
fn prepare(
    arrived: Vec<ArrivedNetwork>,
    program: &Program,
    sources: &Sources,
    timing: Timing,
) -> Result<Vec<Taking>, Vec<Upgraded>> {
    let (mut takings, mut problems) = (Vec::new(), Vec::new());
    for ArrivedNetwork { plan, temporary, fds } in arrived {
        let name = plan.name().to_owned();
        let begun = Plan::adopt(plan, fds, sources, timing).map(Arc::new).and_then(|plan| {
            let adopting = Process::adopt(Arc::clone(&plan), program.clone())?;
            Ok(Taking { plan, temporary, adopting })
        });
        match begun {
            Ok(taking) => takings.push(taking),
            Err(problem) => problems.push(Upgraded::refused(&name, &format!("{problem:#}"))),
        }
    }
    for Taking { plan, adopting, .. } in &takings {
        match adopting.prepared.recv() {
            Ok(Ok(())) => {}
            Ok(Err(problem)) => problems.push(Upgraded::refused(plan.name(), &problem)),
            Err(_) => problems.push(Upgraded::refused(plan.name(), "the thread that starts its worker ended")),
        }
    }
    if problems.is_empty() { Ok(takings) } else { Err(problems) }
}

/// Exchanges the networks with the old supervisor. Returns the result for each, once this supervisor has to serve them.
///
/// # Errors
/// The old supervisor serves them.
fn exchange(old: &UnixStream, takings: &[Taking]) -> Result<Vec<Upgraded>, TakeOverError> {
    let (mut givers, mut takers) = (Vec::new(), Vec::new());
    for _ in takings {
        let (giver, taker) = UnixStream::pair().context("a socket pair")?;
        givers.push(giver.into());
        takers.push(taker);
    }
    put(old, &New::Prepared {})?;
    put_descriptors(old, &givers)?;
    drop(givers);
    for (taking, taker) in takings.iter().zip(takers) {
        // A worker that has ended is found by the other supervisor, because it is not ready.
        let _ = taking.adopting.from.try_send(taker.into());
    }
    match get_old(old)? {
        Old::Ready {} => {}
        Old::Kept { networks } => return Err(TakeOverError::Networks(networks)),
        _ => return Err(anyhow!("the old daemon does not keep to the order").into()),
    }
    fault_point::reach("ready");
    put(old, &New::Proceed {})?;
    match get_old(old) {
        Ok(Old::Replaced { networks }) => Ok(networks),
        Ok(Old::Kept { networks }) => Err(TakeOverError::Networks(networks)),
        Ok(_) => Err(anyhow!("the old daemon does not keep to the order").into()),
        // The old daemon has ended, and its workers with it. It may have permitted the hand-over before that.
        Err(problem) if takings.iter().any(is_taken) => {
            // Log: once, at the start.
            error!("the old daemon ended early: {problem:#}");
            Ok(Vec::new())
        }
        Err(problem) => Err(problem.into()),
    }
}

/// Time for a worker to report that it has its network, after the old supervisor has ended unexpectedly.
const REPORT: Duration = Duration::from_millis(500);

/// Returns `true` if the new worker of a network has its devices.
fn is_taken(taking: &Taking) -> bool {
    let Adopting { process, .. } = &taking.adopting;
    process.wait_serving(None, Instant::now() + REPORT).is_ok()
}

/// Makes this process the owner of all sockets.
fn own(takings: &[Taking], control: Option<&SocketFile>, metrics: Option<&Place>) {
    let control = control.map_or(Ok(()), SocketFile::own);
    let owned = takings.iter().map(|taking| taking.plan.own());
    let metrics = metrics.map_or(Ok(()), Place::own);
    for error in owned.chain([control, metrics]).filter_map(Result::err) {
        // Log: once for a network, at the start.
        error!("a socket of the old daemon: {error}");
    }
}

/// Waits until the new worker of a network has its devices. If it has not, they are lost for their VMs, and another
/// worker starts.
fn finish(taking: Taking, program: &Program, deadline: Instant) -> Option<Network> {
    let Taking { plan, temporary, adopting: Adopting { process, prepared: _, from: _, first } } = taking;
    let left = deadline.saturating_duration_since(Instant::now());
    let problem = match first.recv_timeout(left) {
        Ok(Ok(())) => match Network::adopt(Arc::clone(&plan), process, temporary) {
            Ok(network) => return Some(network),
            Err(problem) => format!("{problem:#}"),
        },
        Ok(Err(problem)) => problem,
        Err(_) => "its worker does not respond".to_owned(),
    };
    // Log: once for a network, at the start.
    error!("network {}: it was not taken over, and its VMs lost their devices: {problem}", plan.name());
    match Network::start(Arc::clone(&plan), Some(program.clone()), temporary) {
        Ok(network) => Some(network),
        Err(problem) => {
            // Log: likewise.
            error!("network {}: {problem:#}", plan.name());
            None
        }
    }
}
