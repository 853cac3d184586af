//! Place of a device at the backend: its port to the network, its share of common resources, its traffic, captures and
//! faults.

use std::fmt;
use std::sync::Arc;

use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{DeviceContext, Station, VerbsError};

use crate::capture::{Capture, CaptureConfig, CaptureCounts};
use crate::conflicts::{AddressConflict, ObservedConflicts};
use crate::failures::{ObservedFailures, QpFailure};
use crate::faults::DeviceFaults;
use crate::flows::FlowCount;
use crate::hca::RxeHca;
use crate::iwarp::sockets::IwarpConfig;
use crate::place::Place;
use crate::port::Port;
use crate::port::config::PortConfig;
use crate::port::uplink::Uplink;
use crate::share::{ShareConfig, ShareUsage};
use crate::shared::Shared;

/// Station of a device: everything about it that does not depend on its guest.
///
/// Handles of the same MAC address refer to the same station. It ends with the last of them, and with it the port. The
/// adapter of the device keeps what it uses of the station, except the port.
#[derive(Clone)]
pub struct RxeStation {
    place: Arc<Place>,
    shared: Arc<Shared>,
}

impl fmt::Debug for RxeStation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxeStation").field("mac", &self.place.mac).finish_non_exhaustive()
    }
}

impl RxeStation {
    pub(crate) fn new(mac: MacAddr, shared: &Arc<Shared>) -> Self {
        Self { place: shared.place(mac), shared: Arc::clone(shared) }
    }

    /// Returns the MAC address.
    pub fn mac(&self) -> MacAddr {
        self.place.mac
    }

    /// Connects the device to a network. An adapter that is attached already stays without a port.
    ///
    /// # Errors
    /// The device is connected already, or the thread of the port could not be started.
    pub fn plug(&self, config: PortConfig) -> Result<(), VerbsError> {
        let surroundings = self.shared.surroundings(&self.place, &*config.uplink);
        let port = Port::new(self.place.mac, config, surroundings)?;
        self.place.plug(|| Uplink::start(port, Arc::clone(&self.shared.ports), self.shared.threaded))
    }

    /// Disconnects the device from its network. When this returns, the threads of its port have ended, and the port has
    /// left its links.
    pub fn unplug(&self) {
        self.place.unplug();
    }

    /// Sets the peers that the device reaches by iWARP, from its next adapter on. Without a configuration, which is the
    /// default, there are none. An adapter that is attached already does not change.
    ///
    /// The adapter makes the connections of its guest's `rdma_cm` to these peers over TCP, and listens for them on the
    /// ports that the rules of the device name ([`Rules::listen`](pvrdma_verbs::Rules::listen)). It does so on a thread
    /// of its own, or in [`Rxe::run_ready`](crate::Rxe::run_ready) if the engine has no workers.
    pub fn set_iwarp(&self, config: Option<IwarpConfig>) {
        self.place.set_iwarp(config);
    }

    /// Returns the counters of the port. Empty if the device is not connected.
    pub fn port_counters(&self) -> Vec<Counter> {
        self.place.port().map(|port| port.counts()).unwrap_or_default()
    }

    /// Changes the share of the device. Work that waits for a rate limit of the device continues with the new limit. A
    /// queue pair that waits for its own limit first finishes that wait.
    pub fn set_share(&self, config: ShareConfig) {
        self.place.share.set(config);
        self.shared.engine.ready_queue().look_again();
    }

    /// Returns the share of the device.
    pub fn share(&self) -> ShareConfig {
        self.place.share.config()
    }

    /// Returns the usage of the device.
    pub fn share_usage(&self) -> ShareUsage {
        self.place.share.usage()
    }

    /// Returns all flows of the device with traffic, in descending order of bytes, across restarts of its driver.
    pub fn flows(&self) -> Vec<FlowCount> {
        self.place.flows.counts()
    }

    /// Returns the faults of the device, of which there are none at first.
    pub fn faults(&self) -> DeviceFaults {
        DeviceFaults::new(Arc::clone(&self.place.faults), &self.shared.engine, &self.place.share)
    }

    /// Calls `observer` for each failed queue pair of the device, until the result is dropped. The calling thread runs
    /// queue pairs, so the observer must not wait for long.
    pub fn observe_failures(&self, observer: impl Fn(&QpFailure) + Send + Sync + 'static) -> ObservedFailures {
        ObservedFailures::new(Arc::clone(&self.place.failures), Box::new(observer))
    }

    /// Calls `observer` when a host beyond the uplink uses an address of the device, until the result is dropped. For
    /// an address that the device keeps, this happens at most once a minute.
    pub fn observe_conflicts(&self, observer: impl Fn(&AddressConflict) + Send + Sync + 'static) -> ObservedConflicts {
        ObservedConflicts::new(&self.shared.addresses, self.place.mac, observer)
    }

    /// Starts a capture, until the result is dropped. The device need not be attached.
    ///
    /// # Errors
    /// The device has too many captures already, or a descriptor could not be created.
    pub fn capture(&self, config: CaptureConfig) -> Result<Capture, VerbsError> {
        self.shared.captures.start(&self.place.point, config)
    }

    /// Returns the statistics of the captures.
    pub fn capture_counts(&self) -> CaptureCounts {
        self.place.point.counts()
    }

    #[cfg(test)]
    pub(crate) fn place(&self) -> &Arc<Place> {
        &self.place
    }
}

impl Station for RxeStation {
    type Hca = RxeHca;

    fn mac(&self) -> MacAddr {
        self.place.mac
    }

    fn attach(&self, context: DeviceContext) -> Result<RxeHca, VerbsError> {
        RxeHca::new(context, &self.place, Arc::clone(&self.shared))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pvrdma_verbs::testing::mac;

    use crate::{Rxe, RxeConfig};

    #[test]
    fn a_station_is_found_while_it_is_in_use() {
        let rxe = Rxe::new(RxeConfig::default().with_workers(0)).unwrap();
        let found = rxe.station(mac(1));
        assert!(Arc::ptr_eq(&found.place, &rxe.station(mac(1)).place));
        drop(rxe.station(mac(2)));
        let former = Arc::downgrade(&found.place);
        drop(found);
        let next = rxe.station(mac(1));
        assert!(former.upgrade().is_none());
        assert_eq!(next.shared.stations.lock().len(), 1, "the one that is not in use is removed");
    }
}
