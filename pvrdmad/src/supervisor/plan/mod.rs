//! Plan of a network: the configuration and sockets that outlive its workers.

pub(super) mod transfer;
pub(super) mod uplink_watch;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use log::info;
use parking_lot::Mutex;
use pvrdma_dev::LimitError;
use pvrdma_ether_link::backup::Member;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_ether_link::{InterfaceName, InterfaceState};
use pvrdma_link::Connector;
use pvrdma_packet::MacAddr;
use pvrdma_rxe::{RxeConfig, ShareConfig, VlanMode, faults::FaultRule};

use self::uplink_watch::{UplinkState, UplinkWatch, Watched, mtu_words};
use super::doorbells::lend;
use super::keepers::Keepers;
use super::services::Services;
use super::sockets::{DeviceSockets, LinkSockets, Sources};
use super::stand_in::StandIns;
use super::timing::Timing;
use crate::config::{Config, Device, FaultSpec, LinkState, Network};
use crate::doorbells::DoorbellSetup;
use crate::logging::LogFilter;
use crate::protocol::{Carrier, NetworkSetup, Request, VERSION};
use crate::sandbox::Profile;
use crate::status::InterfaceReport;

/// State of a network that outlives its workers.
#[derive(Debug)]
pub(super) struct Plan {
    /// The setup without devices.
    pub(super) setup: NetworkSetup,
    /// Sandbox profile of its workers, fixed for the lifetime of the network.
    profile: Profile,
    devices: Mutex<Vec<Arc<Planned>>>,
    settings: Mutex<Settings>,
    uplink: Option<LinkSockets>,
    /// Watch of the uplink's interfaces, until a follower takes it.
    watch: Mutex<Option<UplinkWatch>>,
    pub(super) services: Arc<Services>,
    pub(super) stand_ins: StandIns,
    pub(super) timing: Timing,
}

/// Settings of a network that can change while it runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Settings {
    /// Faults injected into the uplink.
    pub(super) fault: Option<FaultSpec>,
    /// Log filter of its workers. `None`: their default.
    pub(super) log: Option<LogFilter>,
    /// State of the uplink's interfaces, if device links follow them.
    pub(super) interface: Option<UplinkState>,
}

impl Settings {
    /// Returns the upper bound that the uplink's interface sets for the links of devices.
    pub(super) fn carrier(&self) -> Carrier {
        let seen = self.interface.map(UplinkState::state);
        let state = if seen.is_none_or(InterfaceState::is_up) { LinkState::Up } else { LinkState::Down };
        let second = self.interface.is_some_and(|interface| interface.active == Member::Second);
        Carrier { state, mtu: seen.and_then(InterfaceState::mtu), second }
    }
}

/// Reason why doorbells of a device trap after a hand-over although they may be mapped.
const TRAPPED_BEFORE: &str = "they trapped in the process that has handed the network over";

/// State of a device that outlives its workers. It is immutable and replaced as a whole, so that pointer comparison
/// tells whether a worker was given the current version.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) device: Device,
    link: LinkState,
    pub(super) doorbells: DoorbellSetup,
    /// `None` once the device is removed.
    sockets: Arc<Mutex<Option<DeviceSockets>>>,
}

impl Planned {
    /// Opens the sockets of a device.
    ///
    /// # Errors
    /// A socket cannot be opened. Nothing is left behind in that case.
    pub(super) fn new(device: Device, vlan: VlanMode, doorbells: DoorbellSetup, sources: &Sources) -> Result<Self> {
        let sockets = DeviceSockets::open(&device, vlan, sources)?;
        Ok(Self { device, link: LinkState::Up, doorbells, sockets: Arc::new(Mutex::new(Some(sockets))) })
    }

    pub(super) fn name(&self) -> &str {
        &self.device.config.name
    }

    /// Returns the request that makes a worker serve the device, with its descriptors, or `None` if the device was
    /// removed meanwhile.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn request(&self, stand_ins: &StandIns) -> io::Result<Option<(Request, Vec<OwnedFd>)>> {
        let sockets = self.sockets.lock();
        let Some(sockets) = sockets.as_ref() else { return Ok(None) };
        let (doorbells, pages) = lend(&self.device, &self.doorbells, stand_ins)?;
        let mut fds = sockets.duplicates()?;
        // Inserted after the listening socket, which is always the first descriptor.
        fds.splice(1..1, pages);
        let device = Box::new(self.device.clone());
        Ok(Some((Request::Serve { device, link: self.link, doorbells, kept: false }, fds)))
    }

    /// Returns the request that makes a worker expect the device from another worker, with its descriptors, or `None`
    /// if the device was removed meanwhile. Its doorbell pages come from that worker.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn expectation(&self) -> io::Result<Option<(Request, Vec<OwnedFd>)>> {
        let sockets = self.sockets.lock();
        let Some(sockets) = sockets.as_ref() else { return Ok(None) };
        let doorbells = match &self.doorbells {
            DoorbellSetup::Mapped { .. } => DoorbellSetup::Trapped { reason: Some(TRAPPED_BEFORE.to_owned()) },
            trapped @ DoorbellSetup::Trapped { .. } => trapped.clone(),
        };
        let device = Box::new(self.device.clone());
        Ok(Some((Request::Expect { device, link: self.link, doorbells }, sockets.duplicates()?)))
    }

    /// Returns the same device with other limits.
    ///
    /// # Errors
    /// There is no such limit, or the value is out of range.
    pub(super) fn with_limits(&self, values: &BTreeMap<String, u64>) -> Result<Self, LimitError> {
        let mut device = self.device.clone();
        device.config.limits.set_all(values)?;
        Ok(Self { device, link: self.link, doorbells: self.doorbells.clone(), sockets: Arc::clone(&self.sockets) })
    }

    /// Returns the same device with another share.
    pub(super) fn with_share(&self, share: ShareConfig) -> Self {
        let device = Device { share, ..self.device.clone() };
        Self { device, link: self.link, doorbells: self.doorbells.clone(), sockets: Arc::clone(&self.sockets) }
    }

    /// Returns the same device with these faults.
    pub(super) fn with_faults(&self, faults: Vec<FaultRule>) -> Self {
        let device = Device { faults, ..self.device.clone() };
        Self { device, link: self.link, doorbells: self.doorbells.clone(), sockets: Arc::clone(&self.sockets) }
    }

    /// Returns the same device with its link up or down.
    pub(super) fn with_link(&self, link: LinkState) -> Self {
        let (device, doorbells) = (self.device.clone(), self.doorbells.clone());
        Self { device, link, doorbells, sockets: Arc::clone(&self.sockets) }
    }

    /// Returns the connector that reopens the descriptor of its `nic`, if it has one.
    pub(super) fn connector(&self) -> Option<Arc<dyn Connector>> {
        self.sockets.lock().as_ref().and_then(DeviceSockets::connector)
    }

    fn lost_sockets(&self) -> Vec<PathBuf> {
        self.sockets.lock().as_ref().map_or_else(Vec::new, DeviceSockets::lost)
    }

    /// Closes its sockets and removes their files, even while other references to the device exist.
    pub(super) fn close(&self) {
        self.sockets.lock().take();
    }
}

impl Plan {
    /// Opens the sockets of a network.
    ///
    /// # Errors
    /// A socket cannot be opened, or the host's addresses cannot be changed.
    pub(super) fn new(config: &Config, network: &Network, sources: &Sources, timing: Timing) -> Result<Self> {
        let planned = network.devices.iter().map(|device| {
            let doorbells = sources.doorbells.decide(device, &config.backend);
            let planned =
                doorbells.and_then(|doorbells| Planned::new(device.clone(), network.vlan, doorbells, sources));
            planned.map(Arc::new).with_context(|| format!("device {}", device.config.name))
        });
        let planned = planned.collect::<Result<Vec<_>>>()?;
        let macs: Vec<_> = network.devices.iter().map(|device| device.mac).collect();
        let open = |link| LinkSockets::open(link, &macs, network.vlan, sources);
        let uplink = network.uplink.as_ref().map(open).transpose();
        let uplink = uplink.with_context(|| format!("network {}: uplink", network.name))?;
        // The trial runs before any other frame leaves through the uplink.
        let tried = uplink.as_ref().filter(|_| network.offload).zip(macs.first());
        let offload = network.offload && tried.is_none_or(|(uplink, &mac)| uplink.may_offload(mac));
        let setup = NetworkSetup {
            backend: config.backend.clone(),
            sandbox: config.sandbox,
            keepers: false,
            captures: config.captures.is_on(),
            engine_threads: RxeConfig::default().workers,
            network: Network { devices: Vec::new(), offload, ..network.clone() },
        };
        let settings = Settings { fault: network.fault, log: sources.log.lock().clone(), interface: None };
        Self::assemble(setup, planned, uplink, settings, sources, timing)
    }

    /// Combines the parts of a plan.
    fn assemble(
        mut setup: NetworkSetup,
        planned: Vec<Arc<Planned>>,
        uplink: Option<LinkSockets>,
        settings: Settings,
        sources: &Sources,
        timing: Timing,
    ) -> Result<Self> {
        let addresses = setup.backend.settings().host_addresses().map_err(anyhow::Error::msg)?;
        let name = &setup.network.name;
        let connectors = uplink.as_ref().map(LinkSockets::connectors).unwrap_or_default();
        let (events, wedged) = (Arc::clone(&sources.events), Arc::clone(&sources.wedged));
        let (program, places) = (sources.doorbells.keepers(), sources.keepers.clone());
        let keepers = {
            let (wedged, events) = (Arc::clone(&wedged), Arc::clone(&events));
            Keepers::new(program, places, setup.sandbox, name, timing.crashes, wedged, events)
        };
        setup.keepers = keepers.are_used();
        let services = Services::new(name.clone(), connectors, addresses, keepers, events, wedged);
        for planned in &planned {
            services.add(planned.name(), planned.connector());
        }
        let profile = profile(&setup, &planned);
        let stand_ins = sources.doorbells.stand_ins(setup.sandbox, name);
        let (watch, interface) = watch(&setup.network).unzip();
        if let Some((uplink, UplinkState { active, .. })) = uplink.as_ref().zip(interface) {
            uplink.select(active).with_context(|| format!("network {name}: uplink"))?;
        }
        let (services, devices) = (Arc::new(services), Mutex::new(planned));
        let (settings, watch) = (Mutex::new(Settings { interface, ..settings }), Mutex::new(watch));
        Ok(Self { setup, profile, devices, settings, uplink, watch, services, stand_ins, timing })
    }

    /// Finds the keepers that an earlier daemon has left, for the devices of these networks.
    pub(super) fn adopt_keepers(plans: &[Arc<Self>], sources: &Sources) {
        let Some(places) = &sources.keepers else { return };
        for keeper in places.find(|device| plans.iter().any(|plan| plan.has(device))) {
            if let Some(plan) = plans.iter().find(|plan| plan.has(&keeper.device)) {
                // Log: once for each device, at the start.
                info!("device {}: an earlier daemon has left its client", keeper.device);
                plan.services.adopt_keeper(keeper);
            }
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.setup.network.name
    }

    /// Returns the sandbox mode and profile of a worker as arguments: it confines itself before it reads any input.
    pub(super) fn confinement(&self) -> [&'static str; 2] {
        [self.setup.sandbox.word(), self.profile.word()]
    }

    /// Checks that a worker may use the links of this device. The sandbox of a worker is fixed at its start.
    ///
    /// # Errors
    /// It may not use them.
    pub(super) fn admits(&self, device: &Device) -> Result<(), String> {
        match &device.nic {
            Some(nic) if needs_addresses(nic) && self.profile == Profile::Rxe => Err(format!(
                "nic={nic} needs system calls that the worker of network {} gave up at its start, as no link of that \
                 kind was there",
                self.name()
            )),
            _ => Ok(()),
        }
    }

    /// Returns duplicates of the uplink's descriptors for a worker.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn uplink(&self) -> io::Result<Vec<OwnedFd>> {
        self.uplink.as_ref().map_or_else(|| Ok(Vec::new()), LinkSockets::duplicates)
    }

    /// Takes the watch of the uplink's interfaces, if device links follow them. Only the first call returns it.
    pub(super) fn watch(&self) -> Option<UplinkWatch> {
        self.watch.lock().take()
    }

    /// Returns the interface of the uplink, if device links follow it.
    pub(super) fn interface(&self) -> Option<InterfaceReport> {
        let (interfaces, seen) = (interfaces_of(&self.setup.network)?, self.settings().interface?);
        let state = seen.state();
        Some(InterfaceReport {
            name: names(interfaces),
            state: state.to_string(),
            up: state.is_up(),
            mtu: state.mtu(),
            wanted: Some(self.setup.network.mtu),
            active: self.active(),
            backup: seen.backup().map(|backup| backup.to_string()),
            different_mtus: seen.different_mtus(),
        })
    }

    /// Returns the active interface, if the uplink has two.
    pub(super) fn active(&self) -> Option<String> {
        let (first, second) = interfaces_of(&self.setup.network)?;
        let active = self.settings().interface?.active;
        Some(active.of(&[first, second?]).to_string())
    }

    /// Makes an interface of two the one on which frames arrive.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn select(&self, active: Member) -> io::Result<()> {
        self.uplink.as_ref().map_or(Ok(()), |uplink| uplink.select(active))
    }

    /// Makes the uplink receive frames for the current devices, and for one that is about to be added.
    ///
    /// # Errors
    /// The system call fails.
    pub(super) fn wire(&self, coming: Option<MacAddr>) -> io::Result<()> {
        let macs: Vec<_> = self.devices().iter().map(|planned| planned.device.mac).chain(coming).collect();
        self.uplink.as_ref().map_or(Ok(()), |uplink| uplink.connector.set_addresses(&macs))
    }

    /// Returns the paths of sockets whose files were removed: clients cannot connect until the sockets are created
    /// again.
    pub(super) fn lost_sockets(&self) -> Vec<String> {
        let devices = self.devices().into_iter().flat_map(|planned| planned.lost_sockets());
        let uplink = self.uplink.as_ref().and_then(LinkSockets::lost).map(Path::to_owned);
        devices.chain(uplink).map(|path| path.display().to_string()).collect()
    }

    /// Returns the first request. The upcall socket precedes its descriptors.
    pub(super) fn hello(&self) -> Request {
        Request::Hello { version: VERSION, network: Box::new(self.setup.clone()) }
    }

    /// Returns the current devices.
    pub(super) fn devices(&self) -> Vec<Arc<Planned>> {
        self.devices.lock().clone()
    }

    /// Returns the number of current devices.
    pub(super) fn count(&self) -> usize {
        self.devices.lock().len()
    }

    /// Returns `true` if the network has a device of this name.
    pub(super) fn has(&self, device: &str) -> bool {
        self.devices.lock().iter().any(|planned| planned.name() == device)
    }

    /// Returns the current settings.
    pub(super) fn settings(&self) -> Settings {
        self.settings.lock().clone()
    }

    /// Returns the settings with which a worker starts.
    pub(super) fn first_settings(&self) -> Settings {
        Settings { fault: self.setup.network.fault, log: None, interface: None }
    }

    /// Changes the settings for all future workers.
    pub(super) fn set(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings.lock());
    }

    /// Returns the share of a device.
    ///
    /// # Errors
    /// There is no such device.
    pub(super) fn share(&self, device: &str) -> Result<ShareConfig, String> {
        let devices = self.devices.lock();
        let planned = devices.iter().find(|planned| planned.name() == device);
        planned.map(|planned| planned.device.share).ok_or_else(|| format!("there is no device '{device}'"))
    }

    /// Checks that the network can carry all guaranteed rates if this device has this share.
    ///
    /// # Errors
    /// It cannot.
    pub(super) fn can_promise(&self, device: &str, share: ShareConfig) -> Result<(), String> {
        let others = self.devices();
        let others = others.iter().filter(|planned| planned.name() != device);
        let promised = others.map(|planned| (planned.name(), planned.device.share)).chain([(device, share)]);
        self.setup.network.carries(promised).map_err(|(device, problem)| format!("device {device}: {problem}"))
    }

    /// Returns `true` if `given` are exactly the current devices.
    pub(super) fn is(&self, given: &[Arc<Planned>]) -> bool {
        let devices = self.devices.lock();
        devices.len() == given.len() && devices.iter().all(|known| given.iter().any(|given| Arc::ptr_eq(known, given)))
    }

    /// Adds a device for all future workers.
    pub(super) fn push(&self, planned: Arc<Planned>) {
        self.devices.lock().push(planned);
    }

    /// Removes a device for all future workers.
    pub(super) fn take(&self, device: &str) -> Option<Arc<Planned>> {
        let mut devices = self.devices.lock();
        let at = devices.iter().position(|planned| planned.name() == device)?;
        Some(devices.remove(at))
    }

    /// Replaces a device.
    ///
    /// # Errors
    /// There is no such device, or `new` fails.
    pub(super) fn replace(
        &self,
        device: &str,
        new: impl FnOnce(&Planned) -> Result<Planned, String>,
    ) -> Result<(), String> {
        let mut devices = self.devices.lock();
        let planned = devices.iter_mut().find(|planned| planned.name() == device);
        let planned = planned.ok_or_else(|| format!("there is no device '{device}'"))?;
        *planned = Arc::new(new(planned)?);
        Ok(())
    }
}

/// Returns the sandbox profile of a network's worker.
fn profile(setup: &NetworkSetup, planned: &[Arc<Planned>]) -> Profile {
    let nics = planned.iter().filter_map(|planned| planned.device.nic.as_ref());
    setup.backend.settings().profile(setup.network.uplink.iter().chain(nics).any(needs_addresses))
}

/// Returns the interface that the links of a network's devices follow, and the second one if there are two.
fn interfaces_of(network: &Network) -> Option<(&InterfaceName, Option<&InterfaceName>)> {
    match &network.uplink {
        Some(LinkSpec::AfPacket(name) | LinkSpec::Tap(name)) if network.follow_carrier => Some((name, None)),
        Some(LinkSpec::AfPacketPair([first, second])) => Some((first, Some(second))),
        // A tunnel leaves by the interface of the current route, which can change at any time, so there is none to
        // follow.
        _ => None,
    }
}

/// Returns the names of the interfaces, as in the configuration.
fn names((first, second): (&InterfaceName, Option<&InterfaceName>)) -> String {
    second.map_or_else(|| first.to_string(), |second| format!("{first}+{second}"))
}

/// Opens a watch of the interfaces and reads their current state.
fn watch(network: &Network) -> Option<(UplinkWatch, UplinkState)> {
    let (first, second) = interfaces_of(network)?;
    let name = names((first, second));
    let seen = UplinkWatch::open(first, second).and_then(|mut watch| watch.look().map(|state| (watch, state)));
    seen.inspect_err(|error| {
        // Log: once for a network.
        log::warn!("network {}: {name} cannot be seen: links of its devices stay up: {error}", network.name);
    })
    .inspect(|(_, state)| {
        if let Some(mtus) = state.different_mtus() {
            // Log: once for a network.
            log::warn!("network {}: {}", network.name, mtu_words(&name, mtus));
        }
        if let Some(mtu) = state.state().mtu().filter(|&mtu| mtu < network.mtu) {
            let wanted = network.mtu;
            // Log: once for a network.
            log::warn!(
                "network {}: {name} carries packets of {mtu} bytes, the network is to carry {wanted}: path MTUs are shorter",
                network.name
            );
        }
    })
    .ok()
}

/// Returns `true` if this link names a destination in the system calls that send frames.
const fn needs_addresses(link: &LinkSpec) -> bool {
    matches!(link, LinkSpec::Vxlan(_) | LinkSpec::AfPacket(_) | LinkSpec::AfPacketPair(_))
}
