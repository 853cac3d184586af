//! The backend: what all adapters of a process share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pvrdma_verbs::{Backend, DeviceContext, Gid, MacAddr, VerbsError};

use crate::addresses::Addresses;
use crate::budget::Budget;
use crate::capture::{Capture, CaptureConfig, CaptureCounts};
use crate::engine::{Engine, Workers};
use crate::failures::{FailureObservers, ObservedFailures, QpFailure};
use crate::flows::{DeviceFlows, FlowTables};
use crate::hca::RxeHca;
use crate::port::policy::VlanMode;
use crate::port::uplink::Uplink;
use crate::port::{Port, PortConfig};
use crate::share::{DeviceShare, ShareConfig, Shares};
use crate::shared::Shared;
use pvrdma_link::{Clock, MonotonicClock};

/// How the engine runs.
#[derive(Clone, Debug)]
pub struct RxeConfig {
    /// Worker threads. With 0 nothing runs by itself: call [`Rxe::run_ready`].
    pub workers: usize,
    /// Bytes that a doorbell moves on the calling thread before it leaves the rest to a worker.
    pub inline_bytes: u64,
    /// Requests that a doorbell runs on the calling thread.
    pub inline_requests: u32,
    /// Bytes that a worker moves for one QP before it turns to the next one. Also the longest time, in bytes, that an
    /// unmap or a destroy command has to wait.
    pub worker_bytes: u64,
    /// Requests that a worker runs for one QP before it turns to the next one.
    pub worker_requests: u32,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// What ports do with VLAN tags.
    pub vlan: VlanMode,
    /// Devices reach each other directly. Otherwise all that one sends to another goes through their uplinks.
    pub local: bool,
    /// Threads of each port that take frames from its links, at least one. The packets of a queue pair are for one of
    /// them at a time. Without workers ports have no threads, but as many receive queues.
    pub port_threads: usize,
    /// All ports are at one link, and have its room together: when one finds none, the others do not try.
    pub one_uplink: bool,
}

impl Default for RxeConfig {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)),
            // A tenth to a quarter of a millisecond: less than a hand-over to a worker that has to wake up would win.
            inline_bytes: 1 << 20,
            inline_requests: 256,
            worker_bytes: 1 << 20,
            worker_requests: 512,
            clock: Arc::new(MonotonicClock::default()),
            vlan: VlanMode::Untagged,
            local: true,
            port_threads: 1,
            one_uplink: false,
        }
    }
}

/// A host beyond the uplink uses an address that a device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressConflict {
    /// The address.
    pub address: Gid,
    /// Its VLAN.
    pub vlan: Option<u16>,
    /// The device keeps the address: it is listed, or its rule is `any`. Otherwise its claim has ended.
    pub kept: bool,
}

/// Tells of conflicts of a device, until this is dropped.
#[derive(Debug)]
pub struct ObservedConflicts {
    addresses: Arc<Addresses>,
    mac: MacAddr,
}

impl Drop for ObservedConflicts {
    fn drop(&mut self) {
        self.addresses.stop_observing(self.mac);
    }
}

/// The software adapter backend. Clones are the same backend.
#[derive(Clone)]
pub struct Rxe(Arc<Shared>);

impl fmt::Debug for Rxe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rxe").finish_non_exhaustive()
    }
}

impl Rxe {
    /// Starts the engine.
    ///
    /// # Errors
    /// A worker thread could not be started.
    pub fn new(config: RxeConfig) -> Result<Self, VerbsError> {
        let worker_budget = Budget::new(config.worker_bytes, config.worker_requests);
        pvrdma_roce::wire::choose_crc(|| config.clock.now());
        let inline_budget = Budget::new(config.inline_bytes, config.inline_requests);
        let addresses = Arc::new(Addresses::new(Arc::clone(&config.clock)));
        let engine = Arc::new(Engine::new(config.clock, worker_budget, inline_budget));
        Ok(Self(Arc::new(Shared {
            directory: Arc::default(),
            ports: Arc::default(),
            vlan: config.vlan,
            addresses,
            local: config.local,
            room: config.one_uplink.then(Arc::default),
            shares: Shares::default(),
            flows: FlowTables::default(),
            failures: FailureObservers::default(),
            captures: Arc::default(),
            next_adapter: AtomicU64::new(0),
            threaded: config.workers > 0,
            port_threads: config.port_threads,
            _workers: Workers::start(Arc::clone(&engine), config.workers)?,
            engine,
        })))
    }

    /// Runs everything that is ready or due on the calling thread and returns how many runs that took.
    pub fn run_ready(&self) -> usize {
        let mut runs = 0;
        loop {
            match self.run_some(usize::MAX) {
                0 => return runs,
                more => runs += more,
            }
        }
    }

    /// Runs tasks that are ready or due on the calling thread, so many at most, and then lets each port do what there
    /// is to do. Returns how many runs that took: 0 if nothing was to be done. Guests can keep an adapter busy for
    /// ever.
    pub fn run_some(&self, most: usize) -> usize {
        let mut runs = 0;
        while runs < most && self.0.engine.run_one() {
            runs += 1;
        }
        // With workers, ports have threads of their own.
        let ports = if self.0.threaded { Vec::new() } else { self.0.ports.all() };
        runs += ports.iter().filter(|port| port.service()).count();
        runs.max(usize::from(ports.iter().any(|port| port.is_holding())))
    }

    /// Runs one task that is ready or due on the calling thread or, if there is none, lets each port do what there is
    /// to do. Returns `false` if nothing was to be done.
    pub fn run_one(&self) -> bool {
        if self.0.engine.run_one() {
            return true;
        }
        let ports = if self.0.threaded { Vec::new() } else { self.0.ports.all() };
        let busy = ports.iter().filter(|port| port.service()).count();
        busy > 0 || self.0.engine.run_one()
    }

    /// Says what the device with this address may use, until what is returned is dropped. Do so before the device is
    /// plugged in and attaches.
    pub fn share(&self, mac: MacAddr, config: ShareConfig) -> DeviceShare {
        self.0.shares.set(mac, config)
    }

    /// Changes what a device may use. What waits for a rate of the device goes on by the new one; a queue pair that
    /// waits for its own does so to the end.
    pub fn set_share(&self, share: &DeviceShare, config: ShareConfig) {
        share.set(config);
        self.0.engine.ready_queue().look_again();
    }

    /// What the device with this address moves, from now on and until what is returned is dropped, over all drivers
    /// of it.
    pub fn flows(&self, mac: MacAddr) -> DeviceFlows {
        DeviceFlows(self.0.flows.of(mac))
    }

    /// Tells `observer` of queue pairs of the device with this address that fail, at most as often as the log of the
    /// device does, until what is returned is dropped.
    pub fn observe_failures(
        &self,
        mac: MacAddr,
        observer: impl Fn(&QpFailure) + Send + Sync + 'static,
    ) -> ObservedFailures {
        ObservedFailures::new(self.0.failures.of(mac), Box::new(observer))
    }

    /// Tells `observer` when a host beyond the uplink uses an address of the device with this MAC address, at most once
    /// a minute for each address that the device keeps, until what is returned is dropped.
    pub fn observe_conflicts(
        &self,
        mac: MacAddr,
        observer: impl Fn(&AddressConflict) + Send + Sync + 'static,
    ) -> ObservedConflicts {
        let addresses = Arc::clone(&self.0.addresses);
        addresses.observe(mac, move |conflict| {
            let (address, vlan) = conflict.address;
            observer(&AddressConflict { address, vlan, kept: conflict.kept });
        });
        ObservedConflicts { addresses, mac }
    }

    /// Connects the device with this address to a network, until what is returned is dropped. Do so before the device
    /// attaches.
    ///
    /// # Errors
    /// It is connected already, or the port's thread could not be started.
    pub fn plug(&self, mac: MacAddr, config: PortConfig) -> Result<Uplink, VerbsError> {
        let port = Port::new(mac, config, self.0.place(mac))?;
        self.0.ports.insert(&port)?;
        Ok(Uplink::start(port, Arc::clone(&self.0.ports), self.0.threaded)?)
    }

    /// Begins to watch the device with this address, until what is returned is dropped. It need not be attached.
    ///
    /// # Errors
    /// Too many watch it already, or a descriptor could not be had.
    pub fn capture(&self, mac: MacAddr, config: CaptureConfig) -> Result<Capture, VerbsError> {
        self.0.captures.start(mac, config)
    }

    /// How the captures of a device did.
    pub fn capture_counts(&self, mac: MacAddr) -> CaptureCounts {
        self.0.captures.point(mac).counts()
    }

    /// When the next timer fires, on the clock of the configuration.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.0.engine.next_deadline()
    }
}

impl Backend for Rxe {
    type Hca = RxeHca;

    fn attach(&self, context: DeviceContext) -> Result<RxeHca, VerbsError> {
        RxeHca::new(context, Arc::clone(&self.0))
    }
}
