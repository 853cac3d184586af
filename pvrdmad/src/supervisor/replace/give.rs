//! The side of the supervisor that is replaced.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::Result;
use log::{info, warn};

use super::outcome::Outcome;
use super::wire::{DescribedDaemon, New, Old, get_new};
use crate::events::Event;
use crate::protocol::Upgraded;
use crate::protocol::exchange::{ALL_READY, get_descriptors, put, put_descriptors};
use crate::supervisor::Supervisor;
use crate::supervisor::hand_over_order::{Gift, HandOverResult};
use crate::supervisor::network::Network;
use crate::supervisor::runs::Runs;

/// Time for a worker to report the result of a hand-over that was permitted or called off.
const RESULT: Duration = Duration::from_secs(5);

/// Time for the new supervisor to serve the control socket. It serves the networks already.
const SERVES: Duration = Duration::from_secs(5);

/// Shortest timeout of a socket: zero means none.
const SHORTEST: Duration = Duration::from_millis(1);

/// A network whose worker is about to give its devices away.
struct Giving {
    network: Arc<Network>,
    permit: UnixStream,
    result: Receiver<HandOverResult>,
}

impl Supervisor {
    /// Checks that another supervisor can replace this one.
    ///
    /// # Errors
    /// Networks have no processes of their own.
    pub(crate) fn is_replaceable(&self) -> Result<(), String> {
        match self.program {
            Some(_) => Ok(()),
            None => Err("networks have no processes of their own (isolate=none): restart the daemon".to_owned()),
        }
    }

    /// Gives all networks to the supervisor at the other end of a connection. `replaced` is called once the other
    /// supervisor serves them, and before it serves the control socket.
    pub(crate) fn replace(&self, to: &UnixStream, replaced: impl FnOnce()) -> Outcome {
        let _replacing = self.starter.replacing();
        let outcome = match self.try_replace(to) {
            Ok(networks) => {
                replaced();
                self.tell_replaced(to, &networks);
                Outcome { replaced: true, networks }
            }
            Err(networks) => {
                // A supervisor that has ended needs no reasons.
                let _ = put(to, &Old::Kept { networks: networks.clone() });
                Outcome { replaced: false, networks }
            }
        };
        for Upgraded { network, problem, .. } in &outcome.networks {
            if let Some(problem) = problem {
                // Log: caused only by clients of the control socket.
                warn!("network {network}: not handed to another daemon: {problem}");
            }
        }
        self.starter.tell(&outcome);
        outcome
    }

    fn tell_replaced(&self, to: &UnixStream, networks: &[Upgraded]) {
        // Log: once, at the end.
        info!("another daemon serves all networks");
        for Upgraded { network, millis, .. } in networks {
            if let Some(millis) = *millis {
                self.events().tell(&Event::NetworkHandedOver { network: network.clone(), millis });
            }
        }
        let told = put(to, &Old::Replaced { networks: networks.to_vec() });
        let _ = to.set_read_timeout(Some(SERVES));
        if let Err(error) = told.and_then(|()| get_new(to)) {
            // Log: once, at the end.
            warn!("the other daemon does not say that it serves the control socket: {error:#}");
        }
    }

    /// Gives all networks away. Returns the result for each.
    ///
    /// # Errors
    /// The networks stay here, for these reasons.
    fn try_replace(&self, to: &UnixStream) -> Result<Vec<Upgraded>, Vec<Upgraded>> {
        let networks = self.all();
        let all_refused = |reason: &str| all_refused(&networks, reason);
        let Some(mut gate) = self.gate.try_write_for(self.timing.call) else {
            return Err(all_refused("another change has not come to its end"));
        };
        if *gate {
            return Err(all_refused("another daemon serves the networks"));
        }
        // Obstacles are found before the new program starts anything, and while the guests are served.
        let deadline = Instant::now() + self.timing.call;
        let obstacles = networks.iter().filter_map(|network| Some(refused(network, &network.obstacles(deadline)?)));
        let obstacles: Vec<_> = obstacles.collect();
        if !obstacles.is_empty() {
            return Err(complete(&networks, obstacles));
        }
        let fds = match self.introduce(to, &networks) {
            Ok(Ok(fds)) => fds,
            Ok(Err(problems)) if !problems.is_empty() => return Err(problems),
            Ok(Err(_)) => return Err(all_refused("the new program refuses")),
            Err(error) => return Err(all_refused(&does_not_continue(&error))),
        };
        let deadline = Instant::now() + ALL_READY;
        let (givings, problems) = begin(&networks, fds);
        let ready = if problems.is_empty() { wait_ready(&givings, deadline) } else { Err(problems) };
        let confirmed =
            ready.and_then(|()| confirm(to, deadline).map_err(|error| all_refused(&does_not_continue(&error))));
        if let Err(problems) = confirmed {
            return Err(call_off(&networks, givings, problems));
        }
        let results = permit(givings);
        if results.iter().all(|result| result.problem.is_some()) && !results.is_empty() {
            return Err(results);
        }
        *gate = true;
        Ok(results)
    }

    /// Describes this daemon to the new supervisor, and waits until its workers are prepared. Returns the sockets to
    /// them, or the reasons of a refusal.
    fn introduce(&self, to: &UnixStream, networks: &[Arc<Network>]) -> Result<Result<Vec<OwnedFd>, Vec<Upgraded>>> {
        to.set_read_timeout(Some(self.timing.take_over))?;
        to.set_write_timeout(Some(self.timing.take_over))?;
        let (daemon, fds) = self.describe()?;
        put(to, &Old::Daemon(Box::new(daemon)))?;
        put_descriptors(to, &fds)?;
        for network in networks {
            let (plan, fds) = network.plan.describe()?;
            let (plan, temporary, descriptors) = (Box::new(plan), network.temporary, fds.len());
            put(to, &Old::Network { plan, temporary, descriptors })?;
            put_descriptors(to, &fds)?;
        }
        put(to, &Old::End {})?;
        match get_new(to)? {
            New::Prepared {} => Ok(Ok(get_descriptors(to, networks.len())?)),
            New::Refused { networks } => Ok(Err(networks)),
            New::Proceed {} | New::Serves {} => anyhow::bail!("it does not keep to the order"),
        }
    }

    fn describe(&self) -> Result<(DescribedDaemon, Vec<OwnedFd>)> {
        let front = self.front.lock();
        let control = front.control.as_ref().map(|control| control.listener().as_fd());
        let metrics = front.metrics.as_ref().map(|place| place.as_fd());
        let fds = control.into_iter().chain(metrics).map(|fd| fd.try_clone_to_owned());
        let fds = fds.collect::<std::io::Result<_>>()?;
        let daemon = DescribedDaemon {
            config: self.config.lock().clone(),
            loaded: self.loaded.lock().clone(),
            log: self.sources.log.lock().clone(),
            control: front.control.as_ref().map(|control| control.identity().cloned()),
            metrics: front.metrics.as_ref().map(|place| place.describe()),
        };
        Ok((daemon, fds))
    }
}

fn does_not_continue(error: &anyhow::Error) -> String {
    format!("the new program does not continue: {error:#}")
}

fn all_refused(networks: &[Arc<Network>], reason: &str) -> Vec<Upgraded> {
    networks.iter().map(|network| refused(network, reason)).collect()
}

fn refused(network: &Network, reason: &str) -> Upgraded {
    Upgraded::refused(network.name(), reason)
}

/// Makes all workers pause and send their devices, each to a new worker. Returns those that do, and the problems of the
/// others.
fn begin(networks: &[Arc<Network>], fds: Vec<OwnedFd>) -> (Vec<Giving>, Vec<Upgraded>) {
    let (mut givings, mut problems) = (Vec::new(), Vec::new());
    for (network, to) in networks.iter().zip(fds) {
        let begun = UnixStream::pair().map_err(|error| error.to_string()).and_then(|(permit, theirs)| {
            let Runs::Process(process) = &*network.runs else { return Err("it has no process".to_owned()) };
            let result = process.give(Gift { to, permit: theirs.into() })?;
            Ok(Giving { network: Arc::clone(network), permit, result })
        });
        match begun {
            Ok(giving) => givings.push(giving),
            Err(problem) => problems.push(refused(network, &problem)),
        }
    }
    (givings, problems)
}

/// Waits until all workers report that their new workers are ready.
///
/// # Errors
/// Some do not, for these reasons.
fn wait_ready(givings: &[Giving], deadline: Instant) -> Result<(), Vec<Upgraded>> {
    let mut problems = Vec::new();
    for giving in givings {
        let left = deadline.saturating_duration_since(Instant::now()).max(SHORTEST);
        let ready = giving.permit.set_read_timeout(Some(left)).and_then(|()| (&giving.permit).read_exact(&mut [0]));
        match ready {
            Ok(()) => {}
            // The end of the stream: the worker has given up, and says why.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                let problem = match giving.result.recv_timeout(RESULT) {
                    Ok(Err(problem)) => problem,
                    Ok(Ok(_)) | Err(_) => "its worker does not respond".to_owned(),
                };
                problems.push(refused(&giving.network, &problem));
            }
            Err(_) => {
                let problem = format!("not ready within {} ms", ALL_READY.as_millis());
                problems.push(refused(&giving.network, &problem));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Asks the new supervisor whether it can proceed: one that has ended or hangs must not get the networks.
fn confirm(to: &UnixStream, deadline: Instant) -> Result<()> {
    to.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now()).max(SHORTEST)))?;
    put(to, &Old::Ready {})?;
    match get_new(to)? {
        New::Proceed {} => Ok(()),
        _ => anyhow::bail!("it does not keep to the order"),
    }
}

/// Withdraws all permits, and waits until the workers serve their devices again. Returns the result for each network.
fn call_off(networks: &[Arc<Network>], givings: Vec<Giving>, problems: Vec<Upgraded>) -> Vec<Upgraded> {
    let results: Vec<_> = givings.into_iter().map(|Giving { result, .. }| result).collect();
    for result in results {
        // A problem that was found before says more.
        let _ = result.recv_timeout(RESULT);
    }
    complete(networks, problems)
}

/// Adds a reason for each network that has none: another one cannot be handed over.
fn complete(networks: &[Arc<Network>], mut problems: Vec<Upgraded>) -> Vec<Upgraded> {
    for network in networks {
        if !problems.iter().any(|problem| problem.network == network.name()) {
            problems.push(refused(network, "it stays, because another network cannot be handed over"));
        }
    }
    let order = |problem: &Upgraded| networks.iter().position(|network| network.name() == problem.network);
    problems.sort_by_key(order);
    problems
}

/// Permits all hand-overs, and then waits for their results.
fn permit(givings: Vec<Giving>) -> Vec<Upgraded> {
    let granted: Vec<_> = givings.iter().map(|giving| (&giving.permit).write_all(&[1]).is_ok()).collect();
    let result = |(giving, granted): (Giving, bool)| {
        let Giving { network, permit: _permit, result } = giving;
        if !granted {
            return refused(&network, "its worker has given up");
        }
        match result.recv_timeout(RESULT) {
            Ok(Ok(done)) => done.of(network.name()),
            Ok(Err(problem)) => refused(&network, &problem),
            Err(_) => refused(&network, "its worker does not respond"),
        }
    };
    givings.into_iter().zip(granted).map(result).collect()
}
