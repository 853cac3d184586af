//! State that all adapters of a process share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::addresses::Addresses;
use crate::by_mac::ByMac;
use crate::capture::Captures;
use crate::drive::Endpoint;
use crate::engine::{Engine, Workers};
use crate::path::directory::Directory;
use crate::place::Place;
use crate::port::registry::Ports;
use crate::port::rules::VlanMode;
use crate::port::{PortPlace, Room};

/// State of the backend, which adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) directory: Arc<Directory<Endpoint>>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) ports: Arc<Ports>,
    /// Treatment of VLAN tags by ports.
    pub(crate) vlan: VlanMode,
    /// Ownership of addresses.
    pub(crate) addresses: Arc<Addresses>,
    /// Devices reach each other by local delivery.
    pub(crate) local: bool,
    /// Room on the link that all ports share, if they share one.
    pub(crate) room: Option<Arc<Room>>,
    /// Stations of devices.
    pub(crate) stations: ByMac<Place>,
    pub(crate) captures: Arc<Captures>,
    /// Number of the next adapter.
    pub(crate) next_adapter: AtomicU64,
    /// The engine has workers, and each port has threads.
    pub(crate) threaded: bool,
    /// Number of threads of each port.
    pub(crate) port_threads: usize,
    pub(crate) _workers: Workers,
}

impl Shared {
    /// Returns the surroundings of the port of a station.
    pub(crate) fn surroundings(&self, place: &Place) -> PortPlace {
        PortPlace {
            vlan: self.vlan,
            point: Arc::clone(&place.point),
            addresses: Arc::clone(&self.addresses),
            engine: Arc::clone(&self.engine),
            share: Arc::clone(&place.share),
            room: self.room.clone().unwrap_or_default(),
            threads: self.port_threads,
        }
    }
}
