//! Worker of one network: its adapter, its link, and its devices with the memory of their guests. It contains
//! everything that tenants of different networks must not share.
//!
//! A [`Worker`] is an object that answers [`Request`]s. In a daemon with `isolate=network`, it has a process to itself
//! ([`process`]), which opens nothing: sockets arrive with the requests, and its [`Host`] does the rest.

mod any_device;
mod backend;
mod capture;
mod device;
mod hand_over;
mod host;
mod links;
mod network_function;
pub mod process;
mod recovery;
mod reporter;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;
use pvrdma_dev::{LimitStatus, ObjectKind};
use pvrdma_ether_link::backup::Member;
use pvrdma_link::Link;
use pvrdma_rxe::{
    PortConfig,
    faults::{DeviceEffect, FaultRule},
};
use pvrdma_vfio_user_server::StuckClient;
use pvrdma_vfio_user_server::keeper::client::{Keeper, PATIENCE};
use pvrdma_vfio_user_server::sigbus;
use serde_json::Value;
use serde_json::value::RawValue;

use self::backend::{Adapter, SoftwareParts};
use self::capture::Streams;
use self::device::{Place, ServedDevice};
use self::hand_over::{Arrivals, Expected};
pub use self::host::Host;
use self::links::Ether;
use self::network_function::NetworkFunction;
use self::reporter::Reporter;
use crate::config::{Device, LinkState, Network, change_share, share_words};
use crate::doorbells::ServedFile;
use crate::failures::{FailureLog, Failures};
use crate::fault_point;
use crate::logging;
use crate::protocol::{Carrier, NetworkSetup, Reply, Request};
use crate::sandbox;
use crate::status::{Catalogue, WorkerStatus};

/// Maximum number of removed devices with client threads that may still be running. Each keeps the resources of its
/// device. While the limit is reached, no further device is accepted.
const MAX_STUCK: usize = 8;

/// A network. Dropping it disconnects all clients.
#[derive(Debug)]
pub struct Worker {
    // Fields are dropped in this order: captures end before the devices that they observe, and devices before their
    // link.
    captures: Mutex<Streams>,
    devices: Mutex<Vec<ServedDevice>>,
    failures: Arc<FailureLog>,
    /// Devices that a hand-over will bring.
    expected: Mutex<Vec<Expected>>,
    /// The devices were given to another worker, and this process must end.
    given: AtomicBool,
    /// Removed devices whose client thread has not ended.
    stuck: Mutex<Vec<(String, StuckClient)>>,
    /// State of the uplink's interface: an upper bound for the links of all devices. Locked while links change, and
    /// before `devices`.
    carrier: Arc<Mutex<Carrier>>,
    ether: Ether,
    adapter: Arc<dyn Adapter>,
    setup: NetworkSetup,
    host: Arc<dyn Host>,
}

impl Worker {
    /// Creates the network with the descriptors of its uplink, without devices.
    ///
    /// # Errors
    /// The adapter or the link cannot be created.
    pub fn start(setup: NetworkSetup, uplink: Vec<OwnedFd>, host: Arc<dyn Host>) -> Result<Self> {
        sigbus::install();
        let failures = Arc::default();
        let adapter = backend::start(&setup, &host, &failures)?;
        let ether = Ether::start(&setup.network, uplink, &host).context("uplink")?;
        let (captures, devices, carrier) = (Mutex::default(), Mutex::default(), Arc::default());
        let (expected, given, stuck) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        Ok(Self { captures, devices, failures, expected, given, stuck, carrier, ether, adapter, setup, host })
    }

    /// Performs a request. If the request takes no descriptors, those that arrive with it are closed.
    pub fn handle(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        let reply = match request {
            Request::Status { describe } => Ok(Reply::Ok(Box::new(self.status(describe)))),
            Request::Show { device, object } => self.show(&device, object).map(Reply::Objects),
            Request::Failures { device, since } => {
                let failures = self.failures.list(&self.setup.network.name, device.as_deref(), since);
                Ok(Reply::Failures(Failures { failures, silent: Vec::new() }))
            }
            Request::StartCapture { device, snaplen, id } => {
                self.capture(&device, snaplen, id, fds).map(|()| Reply::Capturing {})
            }
            Request::Serve { device, link, doorbells, kept } => {
                let device = Expected { device: *device, link, doorbells, kept, fds };
                self.serve(device, None).map(|()| Reply::Done {})
            }
            Request::Expect { device, link, doorbells } => {
                fault_point::reach("worker-expect");
                self.expected.lock().push(Expected { device: *device, link, doorbells, kept: false, fds });
                Ok(Reply::Done {})
            }
            Request::CheckHandOver { lockable } => Ok(Reply::Obstacles(self.obstacles(lockable))),
            Request::HandOver {} => self.hand_over(fds).map(|ended| Reply::Given { ended }),
            Request::TakeOver {} => self.take_over(fds).map(|()| Reply::Done {}),
            Request::RemoveDevice { device } => self.remove(&device).map(|()| Reply::Done {}),
            Request::Link { device, state } => self.link(&device, state).map(|()| Reply::Done {}),
            Request::Carrier { carrier } => self.follow_carrier(carrier).map(|()| Reply::Done {}),
            Request::Limits { device, set } => self.limits(&device, &set).map(Reply::Limits),
            Request::Share { device, set } => self.share(&device, &set).map(Reply::Share),
            Request::Fault { fault, .. } => self.ether.set_fault(fault).map(|()| Reply::Done {}),
            Request::DeviceFaults { faults } => self.set_faults(&faults).map(|()| Reply::Done {}),
            Request::LogLevel { level } => {
                logging::set(&level);
                Ok(Reply::Done {})
            }
            Request::AddDevice { .. }
            | Request::Capture { .. }
            | Request::Events {}
            | Request::PastEvents { .. }
            | Request::Upgrade { .. }
            | Request::Replace { .. } => Err(anyhow!("the supervisor serves this request")),
            Request::Hello { .. } => Err(anyhow!("the second greeting")),
        };
        reply.unwrap_or_else(|error| Reply::Error(format!("{error:#}")))
    }

    /// Returns `true` if the devices were given to another worker. This process must then end at once, without dropping
    /// this worker: it must not touch the guests' memory.
    pub fn is_given(&self) -> bool {
        self.given.load(Ordering::Relaxed)
    }

    /// Returns the obstacles to a hand-over to a new worker that may lock this number of bytes.
    fn obstacles(&self, lockable: Option<u64>) -> Vec<String> {
        let devices = self.devices.lock();
        let stuck = self.stuck().into_iter();
        let stuck = stuck.map(|name| format!("a thread of the client of {name}, which was removed, does not end"));
        let kept = devices.iter().filter_map(|served| served.functions().err().map(|problem| problem.to_string()));
        // Both processes have the pages locked for a moment. The kernel counts them for each process by itself.
        let locked = devices.iter().map(|served| served.reporter.memory.pinned_bytes());
        let locked = locked.fold(0_u64, |sum, bytes| sum.saturating_add(bytes));
        let short = lockable.filter(|&lockable| locked > lockable).map(|lockable| {
            format!(
                "pin: {} KiB are locked, and a new process may lock {} KiB (RLIMIT_MEMLOCK, LimitMEMLOCK=)",
                locked >> 10,
                lockable >> 10
            )
        });
        stuck.chain(kept).chain(short).collect()
    }

    /// Gives all devices to the worker at the other end of a socket, perhaps with a second socket for the permit.
    /// Returns the work that ends with this process.
    fn hand_over(&self, fds: Vec<OwnedFd>) -> Result<Vec<String>> {
        let mut fds = fds.into_iter().map(UnixStream::from);
        let to = fds.next().context("a hand-over needs a connection to the taker")?;
        let permit = fds.next();
        let devices = self.devices.lock();
        if let Some(name) = self.stuck().first() {
            bail!("a thread of the client of {name}, which was removed, does not end");
        }
        let mut functions = Vec::new();
        for served in &*devices {
            functions.extend(served.functions()?);
        }
        hand_over::give(&functions, &to, permit.as_ref())?;
        self.given.store(true, Ordering::Relaxed);
        drop(functions);
        drop(devices);
        let captures = self.captures.lock();
        Ok(captures.devices().map(|device| format!("capture of device {device}")).collect())
    }

    /// Takes all expected devices from the worker at the other end of a socket.
    fn take_over(&self, fds: Vec<OwnedFd>) -> Result<()> {
        let Ok([from]) = <[OwnedFd; 1]>::try_from(fds) else { bail!("a hand-over needs one connection to the giver") };
        let mut arrivals = Arrivals::from(UnixStream::from(from))?;
        fault_point::reach("worker-take-over");
        for expected in std::mem::take(&mut *self.expected.lock()) {
            let name = expected.device.config.name.clone();
            if let Err(error) = self.serve(expected, Some(&mut arrivals)) {
                let error = error.context(format!("device {name}"));
                arrivals.refuse(&error);
                return Err(error);
            }
        }
        arrivals.start()
    }

    fn serve(&self, device: Expected, mut arrivals: Option<&mut Arrivals>) -> Result<()> {
        let Expected { device, link, doorbells, kept, fds } = device;
        let name = device.config.name.clone();
        let carrier = self.carrier.lock();
        let mut devices = self.devices.lock();
        if devices.iter().any(|served| served.name() == name) {
            bail!("there is a device {name} already");
        }
        if self.stuck().len() >= MAX_STUCK {
            bail!(
                "threads of the clients of {MAX_STUCK} devices that were removed do not end (docs/troubleshooting.md)"
            );
        }
        let mut fds = fds.into_iter();
        let Some(listener) = fds.next() else { bail!("no socket for it") };
        let left = if kept { Some(fds.next().context("no connection to its keeper")?) } else { None };
        let pages = ServedFile::take(&doorbells, &mut fds)?;
        let keeper = self.setup.keepers.then(|| self.keeper(&name, left));
        let Network { name, mtu, .. } = &self.setup.network;
        let (network, mtu) = (name.clone(), *mtu);
        let mut place = Place {
            network,
            mtu,
            link,
            carrier: *carrier,
            station: self.adapter.station(&device)?,
            nic: None,
            nic_link: None,
            left: self.ether.departure(device.mac),
            doorbells,
            pages,
        };
        self.plug(&device, fds.collect(), &mut place, (keeper.as_ref(), arrivals.as_deref_mut()))?;
        let clients = (keeper.as_ref(), arrivals);
        let served = ServedDevice::start(device, listener, place, &self.host, clients)?;
        self.start_faults(&served)?;
        devices.push(served);
        Ok(())
    }

    /// Returns the keeper, which receives the descriptors of a device's clients. `left` is the connection to the keeper
    /// that a crashed worker has left.
    fn keeper(&self, device: &str, left: Option<OwnedFd>) -> Arc<Keeper> {
        let (host, device) = (Arc::clone(&self.host), device.to_owned());
        let renew = move || host.keeper(&device);
        match left {
            Some(left) => Keeper::resume(left, renew, PATIENCE),
            None => Keeper::new(renew, PATIENCE),
        }
    }

    /// Connects a device to its network, with the descriptors of its network function. This precedes the creation of
    /// the device, which looks up its port when its driver starts.
    fn plug(
        &self,
        device: &Device,
        nic: Vec<OwnedFd>,
        place: &mut Place,
        clients: (Option<&Arc<Keeper>>, Option<&mut Arrivals>),
    ) -> Result<()> {
        if !self.ether.is_for(device) {
            return Ok(());
        }
        let name = &device.config.name;
        let link: Option<Arc<dyn Link>> = if device.nic_socket.is_some() {
            let function = NetworkFunction::start(device, nic, &self.host, clients, Arc::clone(&place.left))
                .context("nic-socket")?;
            Some(Arc::clone(&place.nic.insert(function).link) as _)
        } else {
            let open = |link| links::open(link, nic, &self.host, Some(name), true);
            place.nic_link = device.nic.as_ref().map(open).transpose().context("nic")?;
            place.nic_link.clone()
        };
        let port = PortConfig::new(self.ether.port(device).context("uplink")?, self.setup.network.mtu)
            .with_nic(link)
            .with_rules(device.rules.clone().with_omit_icrc(self.setup.network.omit_icrc));
        place.station.plug(port).context("uplink")
    }

    fn remove(&self, name: &str) -> Result<()> {
        let mut devices = self.devices.lock();
        let at = devices.iter().position(|served| served.name() == name);
        let at = at.ok_or_else(|| anyhow!("there is no device '{name}'"))?;
        let removed = devices.remove(at);
        drop(devices);
        self.captures.lock().end_of(name);
        // Waits for the client's current request, within a bound.
        let stuck = removed.end();
        self.stuck.lock().extend(stuck.into_iter().map(|client| (name.to_owned(), client)));
        Ok(())
    }

    /// Returns the names of removed devices whose client thread has not ended.
    fn stuck(&self) -> Vec<String> {
        let mut stuck = self.stuck.lock();
        stuck.retain(|(_, client)| !client.is_gone());
        stuck.iter().map(|(name, _)| name.clone()).collect()
    }

    fn link(&self, name: &str, state: LinkState) -> Result<()> {
        let carrier = self.carrier.lock();
        let links = Arc::clone(&find(&self.devices.lock(), name)?.reporter.links);
        links.is_down.store(state == LinkState::Down, Ordering::Relaxed);
        // This waits for the device's traffic in progress. No lock that the data path needs is held here.
        Ok(links.set(*carrier)?)
    }

    /// Applies the state of the uplink's interface: links of devices are up only if the interface is, and their path
    /// MTU is at most its MTU. If another interface is active, the devices announce their addresses there.
    fn follow_carrier(&self, now: Carrier) -> Result<()> {
        let mut carrier = self.carrier.lock();
        if std::mem::replace(&mut *carrier, now) == now {
            return Ok(());
        }
        let links: Vec<_> = self.devices.lock().iter().map(|served| Arc::clone(&served.reporter.links)).collect();
        let moved = self.ether.select(if now.second { Member::Second } else { Member::First });
        // All links are set, even if one of them fails.
        let set: Vec<_> = links.iter().map(|link| link.set(now)).collect();
        if moved {
            self.adapter.announce();
        }
        Ok(set.into_iter().collect::<Result<(), _>>()?)
    }

    fn limits(&self, name: &str, set: &BTreeMap<String, u64>) -> Result<Vec<LimitStatus>> {
        let function = Arc::clone(&find(&self.devices.lock(), name)?.reporter.function);
        function.set_limits(set)?;
        Ok(function.limits())
    }

    fn share(&self, name: &str, set: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
        let devices = self.devices.lock();
        let station = &find(&devices, name)?.reporter.station.software().context("its adapter has no shares")?.station;
        // The lock is held during the change, so that changes are serialized.
        let changed = change_share(station.share(), set).map_err(anyhow::Error::msg)?;
        station.set_share(changed);
        Ok(share_words(&changed))
    }

    fn set_faults(&self, rules: &BTreeMap<String, Vec<FaultRule>>) -> Result<()> {
        let devices = self.devices.lock();
        for (name, rules) in rules {
            let parts = find(&devices, name)?.reporter.station.software();
            parts.context("its adapter has no faults on request")?.faults.set(rules)?;
        }
        Ok(())
    }

    /// Installs the function that applies those faults of a device that affect more than its connections, and sets the
    /// faults with which the device begins.
    fn start_faults(&self, served: &ServedDevice) -> Result<()> {
        let Reporter { station, links, device, .. } = &served.reporter;
        let Some(SoftwareParts { faults, .. }) = station.software() else { return Ok(()) };
        let (links, carrier) = (Arc::downgrade(links), Arc::clone(&self.carrier));
        faults.apply_by(move |effect| {
            // None: the device ends. It loses its links before its faults, whose end would otherwise set them up.
            let Some(links) = links.upgrade() else { return };
            match effect {
                DeviceEffect::Link { up } => links.hold_for_fault(!up, *carrier.lock()),
                DeviceEffect::GidTable => links.function.gid_table_changed(),
                DeviceEffect::Fatal => links.function.fail(),
            }
        });
        Ok(faults.set(&device.faults)?)
    }

    /// Returns the status of the network, with descriptions of the counters if `describe` is set.
    pub fn status(&self, describe: bool) -> WorkerStatus {
        let devices = self.devices.lock();
        let mut counters = Catalogue::new();
        for served in devices.iter().filter(|_| describe) {
            served.reporter.describe(&mut counters);
        }
        WorkerStatus {
            lost_mappings: sigbus::replaced(),
            sandbox: sandbox::report(),
            uplink: self.setup.network.uplink.as_ref().and_then(|spec| self.ether.report(spec)),
            stuck_clients: self.stuck(),
            counters,
            devices: devices.iter().map(|served| served.reporter.report()).collect(),
        }
    }

    fn show(&self, device: &str, object: ObjectKind) -> Result<Box<RawValue>> {
        let devices = self.devices.lock();
        let served = find(&devices, device)?;
        if object == ObjectKind::Migratable {
            return Ok(serde_json::value::to_raw_value(&served.blockers())?);
        }
        Ok(serde_json::value::to_raw_value(&served.reporter.function.device_objects(object))?)
    }

    /// Starts a capture to the connection that came with the request.
    fn capture(&self, device: &str, snaplen: Option<u32>, id: Option<Value>, fds: Vec<OwnedFd>) -> Result<()> {
        if !self.setup.captures {
            bail!("captures are switched off (captures=off)");
        }
        let Ok([to]) = <[OwnedFd; 1]>::try_from(fds) else { bail!("a capture needs one connection to go to") };
        let config = capture::config(snaplen).map_err(anyhow::Error::msg)?;
        let devices = self.devices.lock();
        let capture = find(&devices, device)?.reporter.station.capture(config)?;
        drop(devices);
        self.captures.lock().start(UnixStream::from(to), device.to_owned(), id, config.snaplen, capture)?;
        Ok(())
    }
}

/// Returns the device of this name.
fn find<'a>(devices: &'a [ServedDevice], name: &str) -> Result<&'a ServedDevice> {
    devices.iter().find(|served| served.name() == name).ok_or_else(|| anyhow!("there is no device '{name}'"))
}
