//! A served device: the RDMA function, its port on the network, and the server for its client.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, anyhow, bail};
use pvrdma_dev::MappedDoorbells;
use pvrdma_guest_memory::{DmaSpace, MemoryLimits};
use pvrdma_link::Link;
use pvrdma_pci_function::Migratable;
use pvrdma_vfio_user_server::{
    ConnectionStats, Endpoint, IrqTable, Mappable, MigratableDevice, Server, StuckClient, keeper::client::Keeper,
};

use super::any_device::AnyDevice;
use super::backend::{Created, Station};
use super::hand_over::{Arrivals, GivenFunction};
use super::network_function::NetworkFunction;
use super::reporter::{DeviceLinks, Reporter};
use super::{Host, recovery};
use crate::config::{Device, LinkState};
use crate::doorbells::{DoorbellSetup, Doorbells, ServedFile};
use crate::protocol::Carrier;
use crate::status::FormerCounts;

/// A served device. Dropping it disconnects its client.
pub(super) struct ServedDevice {
    // Fields are dropped in this order: the client is disconnected before the device loses its port.
    server: Server,
    nic_server: Option<Server>,
    /// The device, or the reason why its adapter cannot save it.
    migratable: Result<Arc<dyn Migratable>, &'static str>,
    pub(super) reporter: Reporter,
}

impl std::fmt::Debug for ServedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedDevice").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl ServedDevice {
    /// Describes the obstacles to a move to another host, in the words of the log when a VMM tries to move the device.
    pub(super) fn blockers(&self) -> Vec<String> {
        match &self.migratable {
            Ok(function) => function.blockers(),
            Err(reason) => vec![format!("backend: {reason}")],
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.reporter.device.config.name
    }

    /// Disconnects its clients, within a bounded time. Returns the client threads that do not end. They keep the device
    /// alive, but not its port on the network.
    pub(super) fn end(self) -> Vec<StuckClient> {
        let Self { server, nic_server, .. } = self;
        server.end().into_iter().chain(nic_server.and_then(Server::end)).collect()
    }

    /// Returns its functions in the order in which a hand-over sends them.
    ///
    /// # Errors
    /// The device cannot be handed over.
    pub(super) fn functions(&self) -> Result<Vec<GivenFunction<'_>>> {
        let device = self.name();
        let function = self.migratable.as_ref().map_err(|reason| anyhow!("device {device}: {reason}"))?;
        let nic = self.nic_server.as_ref().zip(self.reporter.nic.as_ref()).map(|(server, nic)| GivenFunction {
            device,
            nic: true,
            server,
            function: Arc::clone(&nic.device) as _,
            doorbells: None,
            counts: Box::new(|| nic.counts()),
        });
        let own = GivenFunction {
            device,
            nic: false,
            server: &self.server,
            function: Arc::clone(function),
            doorbells: Some(&self.reporter.doorbells),
            counts: Box::new(|| self.reporter.counts()),
        };
        Ok(nic.into_iter().chain([own]).collect())
    }

    /// Creates the device and serves it at `listener`. With `arrivals`, its state and its client come from there.
    ///
    /// # Errors
    /// The adapter refuses the device, or no thread can be started.
    // Long: a list of fields that are moved from one structure to another.
    pub(super) fn start(
        device: Device,
        listener: OwnedFd,
        place: Place,
        host: &Arc<dyn Host>,
        (keeper, mut arrivals): (Option<&Arc<Keeper>>, Option<&mut Arrivals>),
    ) -> Result<Self> {
        let Place { network, mtu, link, carrier, station, nic, nic_link, left, doorbells, pages } = place;
        let mut limits = MemoryLimits::default();
        limits.locked_bytes = device.memory.max_locked;
        let memory = DmaSpace::with_limits(device.pin.into(), limits);
        let irqs = Arc::new(IrqTable::default());
        let (name, told) = (device.config.name.clone(), Arc::clone(host));
        let stats = Arc::new(ConnectionStats::with_observer(move |connected| told.client(&name, connected)));
        let Created { function, migratable } =
            station.create(device.config.clone(), Arc::clone(&memory), irqs.clone())?;
        function.set_uplink_mtu(carrier.mtu);
        if [link, carrier.state].contains(&LinkState::Down) {
            function.set_link(false)?;
            if let Some(nic) = &nic {
                nic.link.device().set_link(false);
            }
        }
        let arriving = arrivals.as_deref_mut().map(|arrivals| arrivals.receive((&device.config.name, false)));
        let (doorbells, pages, touched) = match arriving.transpose()?.flatten() {
            Some((setup, file, touched)) => (setup, Some(file), touched),
            None => (doorbells, pages, false),
        };
        let doorbells = lend(&device, doorbells, pages, &function)?;
        let migration = migratable.as_ref().ok().map(|migratable| MigratableDevice {
            function: Arc::clone(migratable),
            budget: Arc::clone(function.budget()),
            left,
        });
        let name = device.config.name.clone();
        let endpoint = Endpoint::new(name, function.clone(), Arc::clone(&memory), Arc::clone(&irqs))
            .with_files(device.memory.into())
            .with_keeper(keeper.map(Keeper::device))
            .with_stats(Arc::clone(&stats))
            .with_migration(migration)
            .with_mappable(mappable(&doorbells, &*function))
            .with_intx(device.config.intx);
        let listener = UnixListener::from(listener);
        let (server, former) = match (arrivals, &migratable) {
            (Some(arrivals), Ok(migratable)) => {
                let server = arrivals.serve(&device.config.name, Arc::clone(migratable), listener, endpoint)?;
                arrivals.add_pages(doorbells.arriving(touched, function.clone()));
                (server, arrivals.take_counts())
            }
            (Some(_), Err(reason)) => bail!("it cannot be restored: {reason}"),
            (None, _) => {
                doorbells.serve();
                let server = recovery::serve((&device.config.name, false), listener, endpoint, host)?;
                (server, FormerCounts::default())
            }
        };
        let (nic, nic_server) = nic.map(NetworkFunction::into_parts).unzip();
        let links = Arc::new(DeviceLinks {
            function: Arc::clone(&function),
            nic: nic.as_ref().map(|nic| Arc::clone(&nic.device)),
            is_down: AtomicBool::new(link == LinkState::Down),
            is_faulty: AtomicBool::new(false),
        });
        let reporter = Reporter {
            device,
            function,
            links,
            memory,
            irqs,
            stats,
            network,
            mtu,
            station,
            nic_link,
            nic,
            doorbells,
            former,
        };
        Ok(Self { server, nic_server, migratable, reporter })
    }
}

/// Index of the BAR with the doorbell pages.
const DOORBELL_BAR: u32 = 2;
/// Size of a doorbell page in bytes.
const PAGE: u64 = 4096;

/// Sets up the doorbells of a device as the supervisor decided.
fn lend(
    device: &Device,
    setup: DoorbellSetup,
    file: Option<ServedFile>,
    function: &Arc<dyn AnyDevice>,
) -> Result<Doorbells> {
    let mut doorbells = Doorbells::new(&device.config.name, setup, file, function.doorbell_pages().end)?;
    if let Some(watcher) = doorbells.watcher() {
        function.set_watcher(watcher);
        doorbells.watch(function.clone())?;
    }
    Ok(doorbells)
}

/// Returns the pages that a client may map: the doorbell pages of guest processes.
fn mappable(doorbells: &Doorbells, function: &dyn MappedDoorbells) -> Option<Mappable> {
    let pages = function.doorbell_pages();
    let [offset, end] = [pages.start, pages.end].map(|page| u64::from(page).saturating_mul(PAGE));
    let size = end.saturating_sub(offset);
    doorbells.file().map(|file| Mappable { region: DOORBELL_BAR, offset, size, file })
}

/// Surroundings of a device.
pub(super) struct Place {
    /// Name of the network.
    pub(super) network: String,
    /// Longest IP packet of the network, in bytes.
    pub(super) mtu: u32,
    /// Administrative state of the link.
    pub(super) link: LinkState,
    /// State of the uplink's interface.
    pub(super) carrier: Carrier,
    /// Its station at the adapter.
    pub(super) station: Box<dyn Station>,
    /// Called when its VM has moved away.
    pub(super) left: Arc<dyn Fn() + Send + Sync>,
    /// The way in which its doorbells are implemented.
    pub(super) doorbells: DoorbellSetup,
    /// The file of its doorbell pages, if clients may map them.
    pub(super) pages: Option<ServedFile>,
    /// The network function beside it, if this daemon emulates it.
    pub(super) nic: Option<NetworkFunction>,
    /// The link to the network function, if QEMU emulates it.
    pub(super) nic_link: Option<Arc<dyn Link>>,
}
