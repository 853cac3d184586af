//! The backend: creates adapters, and holds the state that they share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::{Clock, MonotonicClock};
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{Backend, VerbsError};

use crate::addresses::Addresses;
use crate::budget::Budget;
use crate::engine::{Engine, Workers};
use crate::hca::RxeHca;
use crate::iwarp::registry::Registry;
use crate::port::rules::VlanMode;
use crate::shared::Shared;
use crate::station::RxeStation;

/// Configuration of the engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RxeConfig {
    /// Number of worker threads. With 0, nothing runs in the background: call [`Rxe::run_ready`].
    pub workers: usize,
    /// Bytes that a doorbell moves on the calling thread before a worker takes over.
    pub inline_bytes: u64,
    /// Requests that a doorbell runs on the calling thread.
    pub inline_requests: u32,
    /// Bytes that a worker moves for one QP before it continues with the next one. This also bounds the time that an
    /// unmap or destroy command has to wait.
    pub worker_bytes: u64,
    /// Requests that a worker runs for one QP before it continues with the next one.
    pub worker_requests: u32,
    /// Source of time.
    pub clock: Arc<dyn Clock>,
    /// Treatment of VLAN tags by ports.
    pub vlan: VlanMode,
    /// Devices reach each other by local delivery. If not set, all packets between devices take their uplinks.
    pub local: bool,
    /// Number of threads of each port that read frames from its links, at least one. Only one of them at a time handles
    /// the packets of a queue pair. Without workers, ports have no threads, but still this number of receive queues.
    pub port_threads: usize,
}

impl Default for RxeConfig {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)),
            // These take 100 to 250 microseconds. With smaller budgets, waking a worker would cost more than it gains.
            inline_bytes: 1 << 20,
            inline_requests: 256,
            worker_bytes: 1 << 20,
            worker_requests: 512,
            clock: Arc::new(MonotonicClock::default()),
            vlan: VlanMode::Untagged,
            local: true,
            port_threads: 1,
        }
    }
}

pvrdma_base::setters!(RxeConfig {
    with_workers => workers: usize,
    with_inline_bytes => inline_bytes: u64,
    with_inline_requests => inline_requests: u32,
    with_worker_bytes => worker_bytes: u64,
    with_worker_requests => worker_requests: u32,
    with_clock => clock: Arc<dyn Clock>,
    with_vlan => vlan: VlanMode,
    with_local => local: bool,
    with_port_threads => port_threads: usize,
});

/// The software adapter backend. Clones share the same state.
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
        let engine = Arc::new(Engine::new(config.clock, worker_budget, inline_budget, config.workers > 0));
        Ok(Self(Arc::new(Shared {
            directory: Arc::default(),
            ports: Arc::default(),
            iwarp: Registry::default(),
            vlan: config.vlan,
            addresses,
            local: config.local,
            rooms: Mutex::default(),
            stations: Mutex::default(),
            captures: Arc::default(),
            next_adapter: AtomicU64::new(0),
            threaded: config.workers > 0,
            port_threads: config.port_threads,
            _workers: Workers::start(Arc::clone(&engine), config.workers)?,
            engine,
        })))
    }

    /// Runs all tasks that are ready or due on the calling thread. Returns the number of runs.
    pub fn run_ready(&self) -> usize {
        let mut runs = 0;
        loop {
            match self.run_some(usize::MAX) {
                0 => return runs,
                more => runs += more,
            }
        }
    }

    /// Runs up to `most` tasks that are ready or due on the calling thread, then services each port. Returns the number
    /// of runs: 0 if there was nothing to do. Unlike [`Self::run_ready`], this ends even if guests keep an adapter
    /// busy.
    pub fn run_some(&self, most: usize) -> usize {
        let mut runs = 0;
        while runs < most && self.0.engine.run_one() {
            runs += 1;
        }
        // With workers, ports have their own threads.
        let ports = if self.0.threaded { Vec::new() } else { self.0.ports.all() };
        runs += ports.iter().filter(|port| port.service()).count();
        runs += self.0.iwarp.all().iter().filter(|device| device.service()).count();
        runs.max(usize::from(ports.iter().any(|port| port.is_holding())))
    }

    /// Runs one task that is ready or due on the calling thread. If there is none, services each port. Returns `false`
    /// if there was nothing to do.
    pub fn run_one(&self) -> bool {
        if self.0.engine.run_one() {
            return true;
        }
        let ports = if self.0.threaded { Vec::new() } else { self.0.ports.all() };
        let busy = ports.iter().filter(|port| port.service()).count()
            + self.0.iwarp.all().iter().filter(|device| device.service()).count();
        busy > 0 || self.0.engine.run_one()
    }

    /// Returns the station of the device with this MAC address.
    pub fn station(&self, mac: MacAddr) -> RxeStation {
        RxeStation::new(mac, &self.0)
    }

    /// Announces all devices at the uplink, because it leads to another port of the switch: now, and twice again within
    /// 1.2 s.
    pub fn announce(&self) {
        self.0.ports.all().iter().for_each(|port| port.announce());
    }

    /// Returns the time at which the next timer fires, on the clock of the configuration.
    pub fn next_deadline(&self) -> Option<Duration> {
        let devices = self.0.iwarp.all();
        let connections = devices.iter().filter_map(|device| device.deadline());
        self.0.engine.next_deadline().into_iter().chain(connections).min()
    }
}

impl Backend for Rxe {
    type Hca = RxeHca;
    type Station = RxeStation;

    fn station(&self, mac: MacAddr) -> Result<RxeStation, VerbsError> {
        Ok(Self::station(self, mac))
    }
}
