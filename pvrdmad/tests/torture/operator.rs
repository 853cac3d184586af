//! An operator who inspects devices, captures their frames, changes shares and takes links down for a while, without
//! regard to traffic in progress.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_dev::{ObjectKind, PvrdmaDevice};
use pvrdma_rxe::capture::{Batch, Capture, CaptureConfig};
use pvrdma_rxe::{DEFAULT_WEIGHT, RxeHca, ShareConfig};
use pvrdmad::testing::Dice;

use crate::network::{BEYOND, KERNEL, Network, VMM};

/// Maximum number of simultaneous captures.
const CAPTURES: usize = 3;
/// Bytes of each frame that a capture keeps, and size of its buffer.
const CAPTURE: CaptureConfig = CaptureConfig::new(96, 16 << 10);
/// Rates in bytes per second, and burst sizes. At the lowest rate, a batch of a tenant takes some tens of milliseconds.
const RATES: [Option<u64>; 4] = [None, Some(1 << 20), Some(16 << 20), Some(1 << 30)];
const BURSTS: [Option<u64>; 3] = [None, Some(4 << 10), Some(1 << 20)];
/// Minimum rates. Their sum does not exceed the available rate.
const PROMISES: [Option<u64>; 2] = [None, Some(64 << 10)];
/// Duration of an outage. Retries of a connection last at least half a second.
pub(crate) const DOWN: Duration = Duration::from_millis(100);
/// Number of ACK timeouts between two outages.
const UP: u32 = 4;

pub(crate) struct Operator {
    devices: Vec<(u8, Arc<PvrdmaDevice<RxeHca>>)>,
    captures: Vec<Capture>,
    batch: Batch,
    outage: Option<Outage>,
    /// End of the last outage.
    restored: Duration,
    dice: Dice,
}

/// An outage in progress.
struct Outage {
    what: Down,
    since: Duration,
}

#[derive(Clone, Copy)]
enum Down {
    /// The link of a device.
    Link(usize),
    /// A cable of the network.
    Cable(usize),
}

impl Operator {
    /// Creates an operator of these numbered devices.
    pub(crate) fn new(devices: Vec<(u8, Arc<PvrdmaDevice<RxeHca>>)>, seed: u64) -> Self {
        let dice = Dice::new(seed, 14);
        Self { devices, captures: Vec::new(), batch: Batch::default(), outage: None, restored: Duration::ZERO, dice }
    }

    pub(crate) fn step(&mut self, network: &Network) {
        self.restore_after(network, DOWN);
        match self.dice.below(8) {
            0..3 => self.look(network),
            3..5 => self.share(network),
            5 => self.watch(network),
            6 => self.carry(),
            _ if self.outage.is_none() && network.now() >= self.restored + network.ack_timeout_time() * UP => {
                self.take_down(network)
            }
            _ => {}
        }
    }

    /// Ends an outage that has lasted for this time.
    pub(crate) fn restore_after(&mut self, network: &Network, time: Duration) {
        let now = network.now();
        if let Some(outage) = self.outage.take_if(|outage| now >= outage.since + time) {
            self.set_down(network, outage.what, false);
            self.restored = now;
        }
    }

    fn look(&mut self, network: &Network) {
        let (_, device) = &self.devices[self.dice.below(self.devices.len())];
        device.status();
        device.inspect_objects(self.dice.pick(&ObjectKind::ALL));
        network.switch.iter().for_each(|switch| _ = switch.inspect());
        network.stations.iter().for_each(|station| _ = station.share_usage());
    }

    /// Changes the share of a device of the daemon.
    fn share(&mut self, network: &Network) {
        let (stations, dice) = (&network.stations, &mut self.dice);
        let config = ShareConfig::default()
            .with_weight(dice.pick(&[1, DEFAULT_WEIGHT, 1000]))
            .with_max_rate(dice.pick(&RATES))
            .with_burst(dice.pick(&BURSTS))
            .with_qp_max_rate(dice.pick(&RATES))
            .with_min_rate(dice.pick(&PROMISES));
        stations[dice.below(stations.len())].set_share(config);
    }

    /// Starts a capture, ends one, or reads its frames.
    fn watch(&mut self, network: &Network) {
        let dice = &mut self.dice;
        let at = dice.below(CAPTURES);
        match self.captures.get(at) {
            None => {
                let (number, _) = self.devices[dice.below(self.devices.len())];
                self.captures.push(network.station(number).capture(CAPTURE).unwrap());
            }
            Some(_) if dice.one_in(2) => drop(self.captures.remove(at)),
            Some(capture) => capture.take(&mut self.batch),
        }
    }

    /// Changes the MTU of the uplink for the attackers' devices, whose traffic is not checked.
    fn carry(&mut self) {
        let bytes = self.dice.pick(&[None, Some(400), Some(1400)]);
        let hostile = self.devices.iter().filter(|(number, _)| [KERNEL, VMM].contains(number));
        hostile.for_each(|(_, device)| _ = device.set_uplink_mtu(bytes));
    }

    /// Takes down a link that carries no datagrams of tenants, because lost datagrams are not retransmitted.
    fn take_down(&mut self, network: &Network) {
        let dice = &mut self.dice;
        let what = if dice.one_in(2) {
            Down::Cable(dice.below(network.cables.len()))
        } else {
            let number = dice.pick(&[BEYOND, KERNEL, VMM]);
            Down::Link(self.devices.iter().position(|(device, _)| *device == number).unwrap())
        };
        self.set_down(network, what, true);
        self.outage = Some(Outage { what, since: network.now() });
    }

    fn set_down(&self, network: &Network, what: Down, down: bool) {
        match what {
            Down::Link(at) => {
                assert!(self.devices[at].1.set_link(!down).unwrap(), "another operation took a link down")
            }
            Down::Cable(at) => network.cables[at].set_unplugged(down),
        }
    }

    /// Restores the initial state.
    pub(crate) fn end(&mut self, network: &Network) {
        self.restore_after(network, Duration::ZERO);
        self.captures.clear();
        self.devices.iter().for_each(|(_, device)| _ = device.set_uplink_mtu(None));
        network.stations.iter().for_each(|station| station.set_share(ShareConfig::default()));
    }
}
