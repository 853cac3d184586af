//! Services that the supervisor performs for a worker, each checked against the configuration of the worker's network.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::LogLimit;
use pvrdma_ibverbs::{AddressOwner, HostAddresses, MAX_ADDRESSES};
use pvrdma_link::Connector;
use pvrdma_rxe::FailureCause;

use super::keeper_places::LeftKeeper;
use super::keepers::Keepers;
use super::wedged::{Wedged, WorkerProcess};
use crate::events::{Event, Events};
use crate::failures;
use crate::text::printable_text;
use crate::worker::Host;

/// The part of a network's services that stays in the supervisor.
#[derive(Debug)]
pub(super) struct Services {
    network: String,
    /// Reopen the uplink's descriptors, one for each interface.
    uplink: Vec<Arc<dyn Connector>>,
    /// Devices, each with the connector that reopens the descriptor of its `nic`.
    devices: Mutex<HashMap<String, Option<Arc<dyn Connector>>>>,
    addresses: Option<Arc<HostAddresses>>,
    pub(super) keepers: Keepers,
    /// Addresses that were put on the host's interface for this worker.
    held: Mutex<BTreeSet<IpAddr>>,
    clients: Mutex<Clients>,
    /// Subscribers of events.
    pub(super) events: Arc<Events>,
    wedged: Arc<Wedged>,
    log: LogLimit,
}

#[derive(Debug, Default)]
struct Clients {
    /// Devices with a connected VMM.
    connected: BTreeSet<String>,
    /// Devices whose VMM a keeper holds until the next worker serves it.
    kept: BTreeSet<String>,
    /// Devices whose VM lost its connection when a worker ended, and has not reconnected.
    lost: BTreeSet<String>,
}

/// Clients of a worker that has ended, by device.
#[derive(Debug)]
pub(super) struct LeftClients {
    /// Keepers hold them until the next worker serves them.
    pub(super) kept: Vec<String>,
    /// They were disconnected.
    pub(super) lost: Vec<String>,
}

impl Services {
    /// Creates the services of a network that has no devices yet.
    pub(super) fn new(
        network: String,
        uplink: Vec<Arc<dyn Connector>>,
        addresses: Option<Arc<HostAddresses>>,
        keepers: Keepers,
        events: Arc<Events>,
        wedged: Arc<Wedged>,
    ) -> Self {
        Self {
            network,
            uplink,
            devices: Mutex::default(),
            addresses,
            keepers,
            held: Mutex::default(),
            clients: Mutex::default(),
            events,
            wedged,
            log: LogLimit::new(),
        }
    }

    /// Accepts requests of the worker about this device from now on.
    pub(super) fn add(&self, device: &str, nic: Option<Arc<dyn Connector>>) {
        self.devices.lock().insert(device.to_owned(), nic);
    }

    /// Refuses requests of the worker about this device from now on.
    pub(super) fn remove(&self, device: &str) {
        self.devices.lock().remove(device);
        self.keepers.end(device);
        let mut clients = self.clients.lock();
        clients.connected.remove(device);
        clients.kept.remove(device);
        clients.lost.remove(device);
    }

    /// Returns the devices with a connected VMM, and those whose VM lost its connection.
    pub(super) fn clients(&self) -> [BTreeSet<String>; 2] {
        let clients = self.clients.lock();
        [clients.connected.clone(), clients.lost.clone()]
    }

    /// Restores the result of [`Self::clients`] of another process.
    pub(super) fn adopt_clients(&self, [connected, lost]: [BTreeSet<String>; 2]) {
        *self.clients.lock() = Clients { connected, kept: BTreeSet::new(), lost };
    }

    /// Takes a keeper that an earlier daemon has left.
    pub(super) fn adopt_keeper(&self, keeper: LeftKeeper) {
        if keeper.has_client {
            self.clients.lock().kept.insert(keeper.device.clone());
        }
        self.keepers.adopt(keeper);
    }

    /// Ends the keepers, and starts no others: the network stops.
    pub(super) fn close_keepers(&self) {
        self.keepers.close();
    }

    /// Records a process of the network that was killed and has not ended.
    pub(super) fn leave_behind(&self, process: WorkerProcess) {
        self.wedged.keep(process, &self.network, None, &self.events);
    }

    /// Checks which of the processes that were left behind have ended.
    pub(super) fn look_for_wedged(&self) {
        self.keepers.look();
        self.wedged.look(&self.events);
    }

    /// Returns `true` if the network has left behind as many processes as allowed, so that no other may be started.
    pub(super) fn has_left_most(&self) -> bool {
        self.wedged.is_full(&self.network)
    }

    /// Returns the devices whose VMs lost their connection and have not reconnected.
    pub(super) fn lost(&self) -> Vec<String> {
        self.clients.lock().lost.iter().cloned().collect()
    }

    /// Cleans up after a worker that has ended. Returns its clients, by whether a keeper still holds them.
    pub(super) fn worker_ended(&self) -> LeftClients {
        let keepers = self.keepers.worker_ended();
        for address in std::mem::take(&mut *self.held.lock()) {
            if let Err(error) = self.take_away(address) {
                let network = format!("network {}", self.network);
                self.log.warn(
                    module_path!(),
                    &network,
                    format_args!("the address {address} of a guest cannot be removed: {error}"),
                );
            }
        }
        let mut clients = self.clients.lock();
        let connected = std::mem::take(&mut clients.connected).into_iter().chain(std::mem::take(&mut clients.kept));
        let (kept, lost): (BTreeSet<_>, BTreeSet<_>) = connected.partition(|device| keepers.contains(device));
        clients.lost.extend(lost.iter().cloned());
        clients.kept.clone_from(&kept);
        LeftClients { kept: kept.into_iter().collect(), lost: lost.into_iter().collect() }
    }

    /// Ends the recovery: the next worker serves. Returns the devices whose VMMs it has not recovered.
    pub(super) fn end_recovery(&self) -> Vec<String> {
        let mut clients = self.clients.lock();
        let lost = std::mem::take(&mut clients.kept);
        clients.lost.extend(lost.iter().cloned());
        lost.into_iter().collect()
    }

    fn take_away(&self, address: IpAddr) -> io::Result<()> {
        self.addresses.as_ref().map_or(Ok(()), |addresses| addresses.remove(address))
    }
}

impl Host for Services {
    fn client(&self, device: &str, connected: bool) {
        let devices = self.devices.lock();
        if !devices.contains_key(device) {
            return;
        }
        let mut clients = self.clients.lock();
        let changed = if connected {
            clients.lost.remove(device);
            // A client that a keeper has held is reported by `client_recovered` instead.
            clients.connected.insert(device.to_owned()) && !clients.kept.contains(device)
        } else {
            clients.connected.remove(device)
        };
        if changed {
            let (device, network) = (device.to_owned(), self.network.clone());
            self.events.tell(&Event::Client { device, network, connected });
        }
    }

    fn client_recovered(&self, device: &str, network_function: bool, problem: Option<&str>) {
        if !self.devices.lock().contains_key(device) {
            return;
        }
        if !network_function {
            self.clients.lock().kept.remove(device);
        }
        let (device, network) = (device.to_owned(), self.network.clone());
        let problem = problem.map(printable_text);
        self.events.tell(&Event::ClientRecovered { device, network, network_function, problem });
    }

    fn queue_pair_failed(&self, device: &str, qpn: u32, peer: IpAddr, (cause, history): (FailureCause, &str)) {
        if !self.devices.lock().contains_key(device) {
            return;
        }
        let (device, network) = (device.to_owned(), self.network.clone());
        let (history, help) = (printable_text(history), failures::help(cause));
        self.events.tell(&Event::QueuePairFailed { device, network, qpn, peer, cause, history, help });
    }

    fn address_conflict(&self, device: &str, address: IpAddr, vlan: Option<u16>, kept: bool) {
        if !self.devices.lock().contains_key(device) {
            return;
        }
        let (device, network) = (device.to_owned(), self.network.clone());
        self.events.tell(&Event::AddressConflict { device, network, address, vlan, kept });
    }

    fn connect(&self, device: Option<&str>, interface: usize) -> io::Result<OwnedFd> {
        let connector = match device {
            None => self.uplink.get(interface).cloned(),
            Some(device) => self.devices.lock().get(device).cloned().flatten(),
        };
        connector.ok_or_else(|| io::Error::other("there is no such link"))?.connect()
    }

    fn keeper(&self, device: &str) -> io::Result<OwnedFd> {
        // The lock is held during the start, so that a concurrent removal of the device cannot leave a keeper behind.
        let devices = self.devices.lock();
        if !devices.contains_key(device) {
            return Err(io::Error::other("there is no such device"));
        }
        self.keepers.start(device)
    }

    fn add_address(&self, address: IpAddr) -> io::Result<()> {
        let addresses = self.addresses.as_ref().ok_or_else(|| io::Error::other("no addresses are added here"))?;
        let mut held = self.held.lock();
        if held.len() >= MAX_ADDRESSES.saturating_mul(self.devices.lock().len()) {
            return Err(io::Error::other("too many addresses"));
        }
        addresses.add(address)?;
        held.insert(address);
        Ok(())
    }

    fn remove_address(&self, address: IpAddr) -> io::Result<()> {
        // Only addresses that this worker added may be removed.
        if !self.held.lock().remove(&address) {
            return Err(io::Error::other("that address was not added here"));
        }
        self.take_away(address)
    }
}
