//! What all adapters of a process share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pvrdma_verbs::MacAddr;

use crate::addresses::Addresses;
use crate::capture::Captures;
use crate::drive::Endpoint;
use crate::engine::{Engine, Workers};
use crate::failures::FailureObservers;
use crate::flows::FlowTables;
use crate::path::directory::Directory;
use crate::port::policy::VlanMode;
use crate::port::registry::Ports;
use crate::port::{PortPlace, Room};
use crate::share::Shares;

/// State of the backend that adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) directory: Arc<Directory<Endpoint>>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) ports: Arc<Ports>,
    /// What ports do with tags.
    pub(crate) vlan: VlanMode,
    /// Who may have which address.
    pub(crate) addresses: Arc<Addresses>,
    /// Devices reach each other directly.
    pub(crate) local: bool,
    /// On the link that all ports are at, if they are at one.
    pub(crate) room: Option<Arc<Room>>,
    /// What devices may use.
    pub(crate) shares: Shares,
    /// What devices moved.
    pub(crate) flows: FlowTables,
    /// Who is told of queue pairs that fail.
    pub(crate) failures: FailureObservers,
    pub(crate) captures: Arc<Captures>,
    /// Number of the next adapter.
    pub(crate) next_adapter: AtomicU64,
    /// There are workers, and each port has threads.
    pub(crate) threaded: bool,
    /// How many.
    pub(crate) port_threads: usize,
    pub(crate) _workers: Workers,
}

impl Shared {
    /// Where the port of a device is.
    pub(crate) fn place(&self, mac: MacAddr) -> PortPlace {
        PortPlace {
            vlan: self.vlan,
            point: self.captures.point(mac),
            addresses: Arc::clone(&self.addresses),
            engine: Arc::clone(&self.engine),
            share: self.shares.of(mac),
            room: self.room.clone().unwrap_or_default(),
            threads: self.port_threads,
        }
    }
}
