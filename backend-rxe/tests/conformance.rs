//! The verbs conformance suite on this adapter: with local delivery, and with a cable between the devices.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::sync::Arc;

use pvrdma_link::memory;
use pvrdma_packet::MacAddr;
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig, RxeHca, RxeStation};
use pvrdma_verbs::conformance::Profile;
use pvrdma_verbs::testing::mac;
use pvrdma_verbs::{Backend, VerbsError};

fn engine() -> Rxe {
    Rxe::new(RxeConfig::default()).unwrap()
}

/// One whose ports have several threads.
fn with_port_threads() -> Rxe {
    Rxe::new(RxeConfig::default().with_port_threads(3)).unwrap()
}

/// Two engines with a cable between devices 1 and 2, as if on two hosts.
struct Cabled {
    engines: [Rxe; 2],
    _stations: [RxeStation; 2],
}

impl Cabled {
    fn new() -> Self {
        // One test sends datagrams to two queue pairs of the second device and relies on their order, which several
        // threads do not keep.
        let engines = [with_port_threads(), engine()];
        let (near, far) = memory::pair(10_000).unwrap();
        let plug = |rxe: &Rxe, number, link| {
            let station = rxe.station(mac(number));
            station.plug(PortConfig::new(Arc::new(link), 4500)).unwrap();
            station
        };
        let stations = [plug(&engines[0], 1, near), plug(&engines[1], 2, far)];
        Self { engines, _stations: stations }
    }
}

impl Backend for Cabled {
    type Hca = RxeHca;
    type Station = RxeStation;

    fn station(&self, address: MacAddr) -> Result<RxeStation, VerbsError> {
        Ok(self.engines[usize::from(address == mac(2))].station(address))
    }
}

mod local {
    pvrdma_verbs::conformance_tests!(|| (super::engine(), super::Profile::FULL));
}

mod over_a_cable {
    pvrdma_verbs::conformance_tests!(|| (super::Cabled::new(), super::Profile::FULL));
}
