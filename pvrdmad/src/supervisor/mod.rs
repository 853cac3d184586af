//! The process that opens sockets and starts workers: it has the rights, and touches neither the memory of a guest nor
//! what a guest sends.
//!
//! [`Supervisor`] has a [`network::Network`] for each network of the configuration. Where networks are isolated, a
//! thread ([`process`]) starts the worker's process, tells it what it is for, watches it ([`session`]) and starts the
//! next one when it ends. Otherwise the same requests go to a [`crate::worker::Worker`] in this process.

mod carrier;
mod changes;
mod connection;
mod doorbells;
mod joining;
mod keepers;
mod network;
mod plan;
mod process;
mod program;
mod reload;
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
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use log::info;
use parking_lot::{Mutex, RwLock};
use pvrdma_dev::{LimitStatus, ObjectKind};
use serde_json::value::RawValue;

use self::changes::Removed;
use self::connection::CallError;
use self::doorbells::DoorbellHost;
use self::network::Network;
use self::plan::Plan;
pub(crate) use self::program::Program;
pub use self::reload::Changes;
use self::sockets::Sources;
use self::timing::Timing;
use crate::config::{Config, Device, DeviceSpec, FaultWord, LinkSpec, LinkState, Network as Description, SocketPlace};
use crate::events::{Event, Events};
use crate::logging::{self, LogFilter};
use crate::protocol::{Reply, Request};
use crate::socket::Inherited;
use crate::status::{DaemonStatus, DeviceReport};

/// Why it is not known that a capture runs.
#[derive(Debug)]
pub(crate) enum CaptureError {
    /// It does not, which whoever asked has yet to be told.
    Refused(String),
    /// The worker had the connection when it ended. What stands there already is a capture, perhaps.
    HandedOver,
}

/// All networks. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Supervisor {
    started: Instant,
    backend: String,
    networks: RwLock<Vec<Arc<Network>>>,
    /// What there is, and what is about to come: a name is taken as soon as somebody adds it.
    config: Mutex<Config>,
    sources: Sources,
    program: Option<Program>,
    timing: Timing,
}

impl Supervisor {
    /// Opens all sockets, or takes those that were passed on, and starts all networks: in processes that run `program`,
    /// or else in this one.
    ///
    /// # Errors
    /// A socket cannot be made or a network cannot be served; nothing is left behind then.
    pub(crate) fn start(config: &Config, program: Option<&Program>, inherited: Inherited) -> Result<Self> {
        Self::with_timing(config, program, inherited, Timing::default())
    }

    fn with_timing(config: &Config, program: Option<&Program>, inherited: Inherited, timing: Timing) -> Result<Self> {
        let sources = Sources { inherited, doorbells: DoorbellHost::new(program.cloned()), ..Sources::default() };
        // All sockets first: they are what fails most often.
        let plans = config.networks.iter().map(|network| Plan::new(config, network, &sources, timing).map(Arc::new));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        sources.inherited.check_taken()?;
        let networks = plans.into_iter().map(|plan| {
            let name = plan.name().to_owned();
            Network::start(plan, program.cloned(), false).map(Arc::new).with_context(|| format!("network {name}"))
        });
        let networks = RwLock::new(networks.collect::<Result<_>>()?);
        let (started, backend) = (Instant::now(), config.backend.to_string());
        let config = Mutex::new(config.clone());
        Ok(Self { started, backend, networks, config, sources, program: program.cloned(), timing })
    }

    /// Those who are told what happens.
    pub(crate) fn events(&self) -> &Events {
        &self.sources.events
    }

    /// Has all workers end, without waiting for that.
    pub(crate) fn begin_stop(&self) {
        self.all().iter().for_each(|network| network.begin_stop());
    }

    /// Everything at this moment, and what the counters mean if that is to be described. Workers are asked all at once;
    /// one that does not reply in time is said not to.
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
            // Whoever serves the socket knows them.
            control: BTreeMap::new(),
            counters,
            wedged: self.sources.wedged.report(),
            networks,
            devices,
        }
    }

    /// The objects of a device.
    ///
    /// # Errors
    /// There is no such device, or its network does not say.
    pub(crate) fn show(&self, device: &str, object: ObjectKind) -> Result<Box<RawValue>, String> {
        let network = self.network(device)?;
        let request = Request::Show { device: device.to_owned(), object };
        match network.call(request, Vec::new()).map_err(|error| failure(&network, error))? {
            // Whoever asked takes what ends with a line.
            Reply::Objects(objects) if !objects.get().contains('\n') => Ok(objects),
            Reply::Error(problem) => Err(problem),
            _ => Err("its worker's reply is not understood".to_owned()),
        }
    }

    /// Has what goes over a device sent to a connection, to which the worker says by itself that it does.
    ///
    /// # Errors
    /// There is no such device, or it cannot be watched.
    pub(crate) fn capture(&self, device: &str, snaplen: Option<u32>, to: OwnedFd) -> Result<(), CaptureError> {
        let network = self.network(device).map_err(CaptureError::Refused)?;
        let problem = match network.call(Request::Capture { device: device.to_owned(), snaplen }, vec![to]) {
            Ok(Reply::Capturing {}) => return Ok(()),
            Ok(Reply::Error(problem)) => problem,
            Ok(_) => "its worker's reply is not understood".to_owned(),
            Err(CallError::Ended) => return Err(CaptureError::HandedOver),
            Err(error) => failure(&network, error),
        };
        Err(CaptureError::Refused(problem))
    }

    /// Adds a device, and its network if the device describes one that is not there.
    ///
    /// # Errors
    /// It is not described completely, does not go together with what is there, or cannot be had. Nothing is left
    /// behind then.
    pub(crate) fn add(&self, device: &str) -> Result<(), String> {
        let spec: DeviceSpec = device.parse()?;
        let name = spec.name.clone();
        let reserved = self.reserve(&name, true, |config| {
            config.add_device(spec).map_err(|error| error.to_string())?;
            let added = config.devices().find(|(_, device)| device.config.name == name);
            let whole = added.map_or(Ok(()), |(network, device)| has_whole_paths(network, device));
            whole.map_err(|problem| format!("device {name}: {problem}"))
        });
        self.serve(reserved?)
    }

    /// Serves a device whose name is taken for it.
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
                // Log: whoever may use the control socket or changes the configuration causes it.
                info!("device {name}: added to network {}", network.name);
                self.events().tell(&Event::DeviceAdded { device: name.clone(), network: network.name });
            }
            Err(_) => self.free(&name),
        }
        added.map_err(|problem| format!("device {name}: {problem}"))
    }

    /// Takes a name, and all else that a device has for itself, by what adds it to the configuration.
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

    /// Starts a network for its first device, or one of the configuration.
    fn begin(&self, config: &Config, network: &Description, temporary: bool) -> Result<(), String> {
        let plan = Plan::new(config, network, &self.sources, self.timing);
        let begun = plan.and_then(|plan| Network::start(Arc::new(plan), self.program.clone(), temporary));
        let begun = begun.map_err(|error| format!("{error:#}"))?;
        let begun = Arc::new(begun);
        self.networks.write().push(Arc::clone(&begun));
        // Whoever changed it meanwhile did not know of this network.
        let level = self.sources.log.lock().clone();
        level.map_or(Ok(()), |level| begun.log_level(&level, Instant::now() + self.timing.call))
    }

    /// Removes a device, and its network if that was made for devices that came later and this is the last of them.
    ///
    /// # Errors
    /// There is no such device, or its worker has not confirmed that it ended.
    pub(crate) fn remove(&self, device: &str) -> Result<(), String> {
        let network = self.network(device)?;
        let removed = network.remove(device)?;
        // Log: whoever may use the control socket causes it.
        info!("device {device}: removed from network {}", network.name());
        self.events().tell(&Event::DeviceRemoved { device: device.to_owned(), network: network.name().to_owned() });
        // Its worker ends when the last who knows the network lets go of it: here, most often.
        drop((network, self.take_empty(device)));
        self.free(device);
        match removed {
            Removed::Ended => Ok(()),
            Removed::Open(problem) => {
                Err(format!("{problem}: it is removed, but its VM has it until the worker goes on or ends"))
            }
        }
    }

    /// Takes the link of a device up or down.
    ///
    /// # Errors
    /// There is no such device, its link is not its own, or its worker has not confirmed that it has followed.
    pub(crate) fn link(&self, device: &str, state: LinkState) -> Result<(), String> {
        let linked = self.network(device)?.link(device, state);
        // Log: whoever may use the control socket causes it.
        info!("device {device}: its link goes {state:?}");
        if linked.is_ok() {
            let state = format!("{state:?}").to_lowercase();
            self.events().tell(&Event::Link { device: device.to_owned(), state });
        }
        linked
    }

    /// Sets limits of a device, and says what they are.
    ///
    /// # Errors
    /// There is no such device or limit, a limit cannot have its value, or its worker does not say what they are.
    pub(crate) fn limits(&self, device: &str, set: BTreeMap<String, u64>) -> Result<Vec<LimitStatus>, String> {
        self.network(device)?.limits(device, set)
    }

    /// Sets what a device may use of what it shares with others, and says what that is.
    ///
    /// # Errors
    /// There is no such device or key, the values do not go together, or its worker does not say what they are.
    pub(crate) fn share(
        &self,
        device: &str,
        set: BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, String> {
        self.network(device)?.share(device, set)
    }

    /// Has the uplink of a network suffer faults, or none any more.
    ///
    /// # Errors
    /// There is no such network, it has no uplink, or its worker has not confirmed that it has followed.
    pub(crate) fn fault(&self, network: &str, fault: FaultWord) -> Result<(), String> {
        let networks = self.all();
        let known = networks.iter().find(|known| known.name() == network).ok_or_else(|| {
            let names: Vec<_> = networks.iter().map(|network| network.name()).collect();
            format!("there is no network '{network}' (the networks are {})", names.join(", "))
        })?;
        let changed = known.fault(fault);
        // Log: whoever may use the control socket causes it.
        info!("network {network}: faults of its uplink: {fault}");
        changed
    }

    /// Sets what is logged, here and by all workers, also by those to come.
    ///
    /// # Errors
    /// A worker has not confirmed that it has followed.
    pub(crate) fn log_level(&self, level: &LogFilter) -> Result<(), String> {
        logging::set(level);
        // Before networks that are being made look for it.
        *self.sources.log.lock() = Some(level.clone());
        let deadline = Instant::now() + self.timing.call;
        let told = self.all().iter().map(|network| network.log_level(level, deadline)).collect::<Vec<_>>();
        let problems: Vec<_> = told.into_iter().filter_map(Result::err).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    /// Takes out a network that ends with this device.
    fn take_empty(&self, device: &str) -> Option<Arc<Network>> {
        let config = self.config.lock();
        let (of, _) = config.devices().find(|(_, known)| known.config.name == device)?;
        let mut networks = self.networks.write();
        let ends = |known: &Arc<Network>| known.temporary && known.name() == of.name && of.devices.len() == 1;
        let at = networks.iter().position(ends)?;
        Some(networks.remove(at))
    }

    /// A device's name and addresses are free again, and so is its network's if that is gone.
    fn free(&self, device: &str) {
        let mut config = self.config.lock();
        let networks = self.networks.read();
        config.remove_device(device, |network| networks.iter().any(|known| known.name() == network));
    }

    /// All networks.
    fn all(&self) -> Vec<Arc<Network>> {
        self.networks.read().clone()
    }

    /// The network that has this device.
    fn network(&self, device: &str) -> Result<Arc<Network>, String> {
        let networks = self.all();
        networks.iter().find(|network| network.has(device)).cloned().ok_or_else(|| {
            let names: Vec<_> = networks.iter().flat_map(|network| network.devices()).collect();
            format!("there is no device '{device}' (the devices are {})", names.join(", "))
        })
    }
}

/// A device whose name is taken, with the network that it is in and all that there is then.
struct Reserved {
    config: Config,
    network: Description,
    device: Device,
    /// A network that is made for it ends with its last device.
    temporary: bool,
}

/// Whoever asks has another folder than we.
fn has_whole_paths(network: &Description, device: &Device) -> Result<(), String> {
    let links = device.nic.iter().chain(&network.uplink).flat_map(LinkSpec::paths);
    let sockets = [Some(&device.socket), device.nic_socket.as_ref()].into_iter().flatten();
    match sockets.filter_map(SocketPlace::path).chain(links).find(|path| path.is_relative()) {
        Some(path) => Err(format!("{} does not begin with /", path.display())),
        None => Ok(()),
    }
}

/// Why a network gave no reply, in words.
fn failure(network: &Network, error: CallError) -> String {
    format!("network {}: {error}", network.name())
}
