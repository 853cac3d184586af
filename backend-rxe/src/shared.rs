//! State that all adapters of a process share.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_link::Link;
use pvrdma_packet::MacAddr;

use crate::addresses::Addresses;
use crate::capture::Captures;
use crate::drive::Endpoint;
use crate::engine::{Engine, Workers};
use crate::iwarp::registry::Registry;
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
    /// Devices with iWARP, if the engine has no threads.
    pub(crate) iwarp: Registry,
    /// Treatment of VLAN tags by ports.
    pub(crate) vlan: VlanMode,
    /// Ownership of addresses.
    pub(crate) addresses: Arc<Addresses>,
    /// Devices reach each other by local delivery.
    pub(crate) local: bool,
    /// Room on each [line](Link::line) that ports share: once a port finds it full, the others do not try.
    pub(crate) rooms: Mutex<HashMap<usize, Weak<Room>>>,
    /// Stations of devices. A station lasts as long as it is in use.
    pub(crate) stations: Mutex<HashMap<MacAddr, Weak<Place>>>,
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
    /// Returns the state of a station, or a new one if none is in use.
    pub(crate) fn place(&self, mac: MacAddr) -> Arc<Place> {
        in_use_or(&mut self.stations.lock(), mac, || Place::new(mac))
    }

    /// Returns the room on the line of a link.
    fn room(&self, uplink: &dyn Link) -> Arc<Room> {
        let Some(line) = uplink.line() else { return Arc::default() };
        in_use_or(&mut self.rooms.lock(), line, Room::default)
    }

    /// Returns the surroundings of the port of a station, for this uplink.
    pub(crate) fn surroundings(&self, place: &Place, uplink: &dyn Link) -> PortPlace {
        PortPlace {
            vlan: self.vlan,
            point: Arc::clone(&place.point),
            addresses: Arc::clone(&self.addresses),
            engine: Arc::clone(&self.engine),
            share: Arc::clone(&place.share),
            room: self.room(uplink),
            threads: self.port_threads,
        }
    }
}

/// Returns the value of a key, or a new one if none is in use. Values that are no longer in use are removed.
fn in_use_or<K: Eq + Hash, V>(values: &mut HashMap<K, Weak<V>>, key: K, new: impl FnOnce() -> V) -> Arc<V> {
    if let Some(value) = values.get(&key).and_then(Weak::upgrade) {
        return value;
    }
    values.retain(|_, value| value.strong_count() > 0);
    let value = Arc::new(new());
    values.insert(key, Arc::downgrade(&value));
    value
}
