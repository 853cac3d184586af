// Long: one file has every request that the supervisor answers.
//! Supervisor: opens sockets and starts workers. It holds the privileges, and touches neither guest memory nor data
//! that guests send.
//!
//! [`Supervisor`] has one [`network::Network`] per network of the configuration. Where networks are isolated, a thread
//! ([`process`]) starts the worker process, sends it its configuration, monitors it ([`session`]) and starts a
//! replacement when it ends. Otherwise the same requests go to a [`crate::worker::Worker`] in this process.

mod carrier;
mod changes;
mod connection;
mod doorbells;
mod failures;
mod hand_over;
mod hand_over_order;
mod joining;
mod keeper_places;
mod keepers;
mod network;
mod plan;
mod process;
mod program;
mod reload;
mod reloaded;
pub(crate) mod replace;
mod runs;
mod segmentation_sample;
mod services;
mod session;
mod sockets;
mod stand_in;
#[cfg(test)]
mod tests;
mod timing;
mod upcalls;
mod wedged;
mod worker_log;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use anyhow::{Context, Result};
use log::info;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use pvrdma_dev::{LimitStatus, ObjectKind};
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_rxe::faults::FaultRule;
use pvrdma_vfio_user_server::socket::SocketFile;
use serde_json::Value;
use serde_json::value::RawValue;

use self::changes::Removed;
use self::connection::CallError;
use self::doorbells::DoorbellHost;
use self::keeper_places::KeeperPlaces;
use self::network::Network;
use self::plan::Plan;
pub(crate) use self::program::Program;
pub use self::reloaded::Changes;
use self::replace::outcome::Starter;
use self::sockets::Sources;
use self::timing::Timing;
use crate::config::{
    Config, Device, DeviceSpec, FaultWord, LinkState, Network as Description, NetworkSpec, SocketPlace,
};
use crate::events::{Event, Events};
use crate::logging::{self, LogFilter};
use crate::metrics::Place;
use crate::protocol::{Reply, Request, Upgraded};
use crate::socket::Inherited;
use crate::status::{DaemonStatus, DeviceReport};

/// Reason why a capture is not known to run.
#[derive(Debug)]
pub(crate) enum CaptureError {
    /// The capture does not run. The caller still has to report this to the client.
    Refused(String),
    /// The worker held the connection when it ended. The data written so far may already be a capture.
    HandedOver,
}

/// All networks. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    started: Instant,
    backend: String,
    networks: RwLock<Vec<Arc<Network>>>,
    /// Current configuration, including devices that are being added: a name is reserved as soon as its addition
    /// begins.
    config: Mutex<Config>,
    /// Configuration of the start or the last reload.
    loaded: Mutex<Config>,
    /// Sockets of the daemon itself, which another daemon takes over with the networks.
    front: Mutex<Front>,
    /// Read-locked during a change, write-locked while another daemon takes the networks over. `true` once that daemon
    /// serves them.
    gate: RwLock<bool>,
    starter: Starter,
    /// Notified when this daemon has to end, because another one has taken over.
    ended: Mutex<Option<SyncSender<()>>>,
    sources: Sources,
    program: Option<Program>,
    timing: Timing,
}

/// Sockets of the daemon itself.
#[derive(Debug, Default)]
pub(crate) struct Front {
    pub(crate) control: Option<Arc<SocketFile>>,
    pub(crate) metrics: Option<Arc<Place>>,
}

impl Supervisor {
    /// Opens all sockets, or takes the inherited ones, and starts all networks: in processes that run `program`, or in
    /// this process without one. Clients that an earlier daemon has left beside the `control` socket are served.
    ///
    /// # Errors
    /// A socket cannot be created or a network cannot be served. Nothing is left behind in that case.
    pub(crate) fn start(
        config: &Config,
        program: Option<&Program>,
        inherited: Inherited,
        control: Option<&Path>,
    ) -> Result<Self> {
        let keepers = control.filter(|_| program.is_some()).map(KeeperPlaces::beside).map(Arc::new);
        let doorbells = DoorbellHost::new(program.cloned());
        let sources = Sources { inherited, keepers, doorbells, ..Sources::default() };
        Self::with(config, program, sources, Timing::default().or_of_test())
    }

    fn with(config: &Config, program: Option<&Program>, sources: Sources, timing: Timing) -> Result<Self> {
        // All sockets are opened first, because this is the step that fails most often.
        let plans = config.networks.iter().map(|network| Plan::new(config, network, &sources, timing).map(Arc::new));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        sources.inherited.check_taken()?;
        Plan::adopt_keepers(&plans, &sources);
        let networks = plans.iter().map(|plan| {
            let name = plan.name();
            Network::start(Arc::clone(plan), program.cloned(), false)
                .map(Arc::new)
                .with_context(|| format!("network {name}"))
        });
        let networks = networks.collect::<Result<_>>().inspect_err(|_| {
            plans.iter().for_each(|plan| plan.services.keepers.leave_adopted());
        });
        let networks = RwLock::new(networks?);
        let (started, backend) = (Instant::now(), config.backend.to_string());
        let [config, loaded] = [config, config].map(|config| Mutex::new(config.clone()));
        Ok(Self {
            started,
            backend,
            networks,
            config,
            loaded,
            front: Mutex::default(),
            gate: RwLock::new(false),
            starter: Starter::default(),
            ended: Mutex::default(),
            sources,
            program: program.cloned(),
            timing,
        })
    }

    /// Sets the sockets of the daemon itself.
    pub(crate) fn set_front(&self, front: Front) {
        *self.front.lock() = front;
    }

    /// Returns a receiver that is notified when this daemon has to end, because another one has taken over.
    pub(crate) fn replaced(&self) -> Receiver<()> {
        let (ended, end) = sync_channel(1);
        *self.ended.lock() = Some(ended);
        end
    }

    /// Makes this daemon end, because another one has taken over.
    pub(crate) fn end_replaced(&self) {
        if let Some(ended) = &*self.ended.lock() {
            let _ = ended.try_send(());
        }
    }

    /// Returns `true` once another daemon has taken over.
    pub(crate) fn is_replaced(&self) -> bool {
        *self.gate.read()
    }

    /// Permits a change while the returned guard lives.
    ///
    /// # Errors
    /// Another daemon takes over.
    pub(crate) fn change(&self) -> Result<RwLockReadGuard<'_, bool>, String> {
        let gate = self.gate.try_read().filter(|replaced| !**replaced);
        gate.ok_or_else(|| "another daemon takes over: try again".to_owned())
    }

    /// Returns the event log to which subscribers listen.
    pub(crate) fn events(&self) -> &Events {
        &self.sources.events
    }

    /// Tells all workers to end, without waiting for them.
    pub(crate) fn begin_stop(&self) {
        self.all().iter().for_each(|network| network.begin_stop());
    }

    /// Returns the current status of all networks, with descriptions of the counters if `describe` is set. All workers
    /// are asked concurrently; a worker that does not reply in time is reported as unresponsive.
    pub(crate) fn status(&self, describe: bool) -> DaemonStatus {
        self.sources.wedged.look(&self.sources.events);
        let networks = self.all();
        let asked: Vec<_> = networks.iter().map(|network| network.ask_status(describe)).collect();
        let deadline = Instant::now() + self.timing.status;
        let replies = networks.iter().zip(asked).map(|(network, asked)| network.status(asked, deadline));
        let (networks, mut said): (Vec<_>, Vec<_>) = replies.unzip();
        let described = said.iter_mut().flatten().flat_map(|status| std::mem::take(&mut status.counters));
        let counters = described.filter(|_| describe).collect();
        let lost_mappings = said.iter().flatten().map(|status| status.lost_mappings).fold(0, u64::saturating_add);
        let devices: Vec<DeviceReport> = said.into_iter().flatten().flat_map(|status| status.devices).collect();
        DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            backend: self.backend.clone(),
            lost_mappings,
            // The control server fills these in, because it owns the counters of its socket.
            control: BTreeMap::new(),
            counters,
            wedged: self.sources.wedged.report(),
            networks,
            devices,
        }
    }

    /// Returns the objects of a device.
    ///
    /// # Errors
    /// There is no such device, or its network does not report the objects.
    pub(crate) fn show(&self, device: &str, object: ObjectKind) -> Result<Box<RawValue>, String> {
        let network = self.network(device)?;
        let request = Request::Show { device: device.to_owned(), object };
        match network.call(request, Vec::new()).map_err(|error| failure(&network, error))? {
            // The control protocol separates messages by newlines, so objects that contain one are refused.
            Reply::Objects(objects) if !objects.get().contains('\n') => Ok(objects),
            Reply::Error(problem) => Err(problem),
            _ => Err("its worker's reply is not understood".to_owned()),
        }
    }

    /// Starts a capture of a device's traffic to a connection. The worker itself answers
    /// the call `id` on that connection.
    ///
    /// # Errors
    /// There is no such device, or it cannot be captured.
    pub(crate) fn capture(
        &self,
        device: &str,
        snaplen: Option<u32>,
        id: Option<Value>,
        to: OwnedFd,
    ) -> Result<(), CaptureError> {
        let network = self.network(device).map_err(CaptureError::Refused)?;
        let problem = match network.call(Request::StartCapture { device: device.to_owned(), snaplen, id }, vec![to]) {
            Ok(Reply::Capturing {}) => return Ok(()),
            Ok(Reply::Error(problem)) => problem,
            Ok(_) => "its worker's reply is not understood".to_owned(),
            Err(CallError::Ended) => return Err(CaptureError::HandedOver),
            Err(error) => failure(&network, error),
        };
        Err(CaptureError::Refused(problem))
    }

    /// Adds a device, and its network if `network` describes one that does not exist yet.
    ///
    /// # Errors
    /// A description is incomplete, conflicts with the configuration, or needs resources that are unavailable.
    /// Nothing is left behind in that case.
    pub(crate) fn add(&self, device: &str, network: Option<&str>) -> Result<(), String> {
        let spec: DeviceSpec = device.parse()?;
        let network = network.map(str::parse::<NetworkSpec>).transpose()?;
        let name = spec.name.clone();
        let reserved = self.reserve(&name, true, |config| {
            config.add_device(spec, network).map_err(|error| error.to_string())?;
            let added = config.devices().find(|(_, device)| device.config.name == name);
            let whole = added.map_or(Ok(()), |(network, device)| has_whole_paths(network, device));
            whole.map_err(|problem| format!("device {name}: {problem}"))
        });
        self.serve(reserved?)
    }

    /// Serves a device whose name has been reserved.
    fn serve(&self, reserved: Reserved) -> Result<(), String> {
        let Reserved { config, network, device, temporary } = reserved;
        let name = device.config.name.clone();
        let known = self.all().into_iter().find(|known| known.name() == network.name);
        let added = match known {
            Some(known) => known.add(device, &self.sources),
            None if network.devices.len() == 1 => self.begin(&config, &network, temporary),
            None => Err(format!("network {} is just made for another device, or ends with it", network.name)),
        };
        match &added {
            Ok(()) => {
                // Log: caused only by clients of the control socket and by changes of the configuration.
                info!("device {name}: added to network {}", network.name);
                self.events().tell(&Event::DeviceAdded { device: name.clone(), network: network.name });
            }
            Err(_) => self.free(&name),
        }
        added.map_err(|problem| format!("device {name}: {problem}"))
    }

    /// Reserves the name and the other exclusive resources of a device by adding it to the configuration.
    fn reserve(
        &self,
        name: &str,
        temporary: bool,
        add: impl FnOnce(&mut Config) -> Result<(), String>,
    ) -> Result<Reserved, String> {
        let mut config = self.config.lock();
        let mut changed = config.clone();
        add(&mut changed)?;
        let found = changed.devices().find(|(_, device)| device.config.name == name);
        let (network, device) =
            found.map(|(network, device)| (network.clone(), device.clone())).ok_or_else(|| name.to_owned())?;
        *config = changed.clone();
        Ok(Reserved { config: changed, network, device, temporary })
    }

    /// Starts a network, for its first device or because the configuration lists it.
    fn begin(&self, config: &Config, network: &Description, temporary: bool) -> Result<(), String> {
        let plan = Plan::new(config, network, &self.sources, self.timing);
        let begun = plan.and_then(|plan| Network::start(Arc::new(plan), self.program.clone(), temporary));
        let begun = begun.map_err(|error| format!("{error:#}"))?;
        let begun = Arc::new(begun);
        self.networks.write().push(Arc::clone(&begun));
        // A concurrent change of the log level may have missed this network, so the level is applied again.
        let level = self.sources.log.lock().clone();
        level.map_or(Ok(()), |level| begun.log_level(&level, Instant::now() + self.timing.call))
    }

    /// Removes a device, and its network if that was created for a device added at run time and this is its last
    /// device.
    ///
    /// # Errors
    /// There is no such device, or its worker has not confirmed the removal.
    pub(crate) fn remove(&self, device: &str) -> Result<(), String> {
        let network = self.network(device)?;
        let removed = network.remove(device)?;
        // Log: caused only by clients of the control socket.
        info!("device {device}: removed from network {}", network.name());
        self.events().tell(&Event::DeviceRemoved { device: device.to_owned(), network: network.name().to_owned() });
        // The worker ends when the last reference to the network is dropped, which is usually this one.
        drop((network, self.take_empty(device)));
        self.free(device);
        match removed {
            Removed::Ended => Ok(()),
            Removed::Open(problem) => {
                Err(format!("{problem}: it is removed, but its VM has it until the worker goes on or ends"))
            }
        }
    }

    /// Replaces the workers of a network, or of all networks, by new ones that take the devices with their clients.
    /// Returns the result for each network. With `check`, only returns the obstacles.
    ///
    /// # Errors
    /// There is no such network.
    pub(crate) fn upgrade(&self, network: Option<&str>, check: bool) -> Result<Vec<Upgraded>, String> {
        let mut networks = self.all();
        networks.retain(|known| network.is_none_or(|network| known.name() == network));
        if let Some(network) = network.filter(|_| networks.is_empty()) {
            return Err(format!("there is no network '{network}'"));
        }
        // One after the other: each needs the processor, and a failure concerns one network only.
        let upgraded = |network: &Arc<Network>| {
            let name = network.name();
            if check {
                let problem = network.obstacles(Instant::now() + self.timing.call);
                return Upgraded { network: name.to_owned(), millis: None, ended: Vec::new(), problem };
            }
            network.hand_over().map_or_else(|problem| Upgraded::refused(name, &problem), |done| done.of(name))
        };
        Ok(networks.iter().map(upgraded).collect())
    }

    /// Sets the link of a device up or down.
    ///
    /// # Errors
    /// There is no such device, its link cannot be set separately, or its worker has not confirmed the change.
    pub(crate) fn link(&self, device: &str, state: LinkState) -> Result<(), String> {
        let linked = self.network(device)?.link(device, state);
        // Log: caused only by clients of the control socket.
        info!("device {device}: its link goes {state:?}");
        if linked.is_ok() {
            let state = format!("{state:?}").to_lowercase();
            self.events().tell(&Event::Link { device: device.to_owned(), state });
        }
        linked
    }

    /// Sets limits of a device and returns all of its limits.
    ///
    /// # Errors
    /// There is no such device or limit, a value is out of range, or its worker does not report the limits.
    pub(crate) fn limits(&self, device: &str, set: BTreeMap<String, u64>) -> Result<Vec<LimitStatus>, String> {
        self.network(device)?.limits(device, set)
    }

    /// Sets a device's share of common resources and returns the resulting share.
    ///
    /// # Errors
    /// There is no such device or key, the values contradict each other, or its worker does not report the share.
    pub(crate) fn share(
        &self,
        device: &str,
        set: BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, String> {
        self.network(device)?.share(device, set)
    }

    /// Injects faults into the uplink of a network, or stops injecting them.
    ///
    /// # Errors
    /// There is no such network, it has no uplink, or its worker has not confirmed the change.
    pub(crate) fn fault(&self, network: &str, fault: FaultWord) -> Result<(), String> {
        let networks = self.all();
        let known = networks.iter().find(|known| known.name() == network).ok_or_else(|| {
            let names: Vec<_> = networks.iter().map(|network| network.name()).collect();
            format!("there is no network '{network}' (the networks are {})", names.join(", "))
        })?;
        let changed = known.fault(fault);
        // Log: caused only by clients of the control socket.
        info!("network {network}: faults of its uplink: {fault}");
        changed
    }

    /// Sets the faults of devices. All devices are checked before the first one changes.
    ///
    /// # Errors
    /// There is no such device, it cannot have these faults, or its worker has not confirmed the change.
    pub(crate) fn device_faults(&self, faults: BTreeMap<String, Vec<FaultRule>>) -> Result<(), String> {
        let mut checked = Vec::new();
        for (device, faults) in faults {
            let network = self.network(&device)?;
            network.can_have_faults(&faults).map_err(|problem| format!("device {device}: {problem}"))?;
            checked.push((network, device, faults));
        }
        for (network, device, faults) in checked {
            let words = faults.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
            network.device_faults(&device, faults).map_err(|problem| format!("device {device}: {problem}"))?;
            // Log: caused only by clients of the control socket.
            info!("device {device}: faults: {}", if words.is_empty() { "off" } else { &words });
        }
        Ok(())
    }

    /// Sets the log filter of the supervisor and of all present and future workers.
    ///
    /// # Errors
    /// A worker has not confirmed the change.
    pub(crate) fn log_level(&self, level: &LogFilter) -> Result<(), String> {
        logging::set(level);
        // Stored first, so that networks that are being created read the new filter.
        *self.sources.log.lock() = Some(level.clone());
        let deadline = Instant::now() + self.timing.call;
        let told = self.all().iter().map(|network| network.log_level(level, deadline)).collect::<Vec<_>>();
        let problems: Vec<_> = told.into_iter().filter_map(Result::err).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    /// Takes out the network of this device if it is temporary and now empty.
    fn take_empty(&self, device: &str) -> Option<Arc<Network>> {
        let config = self.config.lock();
        let (of, _) = config.devices().find(|(_, known)| known.config.name == device)?;
        let mut networks = self.networks.write();
        let ends = |known: &Arc<Network>| known.temporary && known.name() == of.name && of.devices.len() == 1;
        let at = networks.iter().position(ends)?;
        Some(networks.remove(at))
    }

    /// Releases a device's name and addresses, and those of its network if that is gone.
    fn free(&self, device: &str) {
        let mut config = self.config.lock();
        let networks = self.networks.read();
        config.remove_device(device, |network| networks.iter().any(|known| known.name() == network));
    }

    /// Returns all networks.
    fn all(&self) -> Vec<Arc<Network>> {
        self.networks.read().clone()
    }

    /// Returns the network that contains this device.
    fn network(&self, device: &str) -> Result<Arc<Network>, String> {
        let networks = self.all();
        networks.iter().find(|network| network.has(device)).cloned().ok_or_else(|| {
            let names: Vec<_> = networks.iter().flat_map(|network| network.devices()).collect();
            format!("there is no device '{device}' (the devices are {})", names.join(", "))
        })
    }
}

/// A device whose name has been reserved, with its network and a copy of the whole configuration at that time.
struct Reserved {
    config: Config,
    network: Description,
    device: Device,
    /// The network was created for this device and ends with its last device.
    temporary: bool,
}

/// Checks that all paths are absolute: the working directory of the client differs from that of the daemon.
fn has_whole_paths(network: &Description, device: &Device) -> Result<(), String> {
    let links = device.nic.iter().chain(&network.uplink).flat_map(LinkSpec::paths);
    let sockets = [Some(&device.socket), device.nic_socket.as_ref()].into_iter().flatten();
    match sockets.filter_map(SocketPlace::path).chain(links).find(|path| path.is_relative()) {
        Some(path) => Err(format!("{} does not begin with /", path.display())),
        None => Ok(()),
    }
}

/// Describes why a network gave no reply.
fn failure(network: &Network, error: CallError) -> String {
    format!("network {}: {error}", network.name())
}
