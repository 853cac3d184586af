//! The devices of one daemon, a host beyond the uplink, and the wire between them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::Random;
use pvrdma_dev::{
    DeviceConfig, PvrdmaDevice,
    testing::{GuestMemory, Irqs, TestDevice},
};
use pvrdma_link::{
    Clock, Link, LinkReader, ManualClock, MonotonicClock,
    switch::{Switch, UnknownUnicast},
};
use pvrdma_roce::Congestion;
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::testing::mac;
use pvrdma_vmxnet3::NicLink;
use pvrdmad::testing::Dice;
use rustix::time::ClockId;

use crate::machine::{Machine, Watcher};
use crate::wire::{Cable, Wire};

/// The host beyond the uplink.
pub(crate) const BEYOND: u8 = 4;
/// Devices of the daemon that are connected to the wire. All except the first belong to attackers.
pub(crate) const ON_THE_WIRE: [u8; 3] = [3, KERNEL, VMM];
/// The guest that reboots.
pub(crate) const VISITOR: u8 = 5;
/// The attackers' devices.
pub(crate) const KERNEL: u8 = 66;
pub(crate) const VMM: u8 = 67;

/// Length of IP packets on the wire in bytes.
const MTU: u32 = 1500;
/// Queue pair runs before ports are served, and rounds of both between two steps.
const RUNS: usize = 16;
const ROUNDS: usize = 64;
/// Code of an ACK timeout as programs use it, and of one whose retries last long enough for a process that gets no CPU
/// for seconds.
pub(crate) const ACK_TIMEOUT: u8 = 14;
const PATIENT_ACK_TIMEOUT: u8 = 18;
/// Most consecutive looks in which the wire does nothing: on one thread (shorter than the retries), and on threads.
const STOP: usize = 8;
const LONG_STOP: usize = 4096;
/// Time for which an address stays reserved after its owner has gone.
pub(crate) const HOLD: Duration = Duration::from_secs(60);

pub(crate) struct Network {
    pub(crate) watcher: Watcher,
    pub(crate) wire: Arc<Mutex<Wire>>,
    /// All cables of the wire.
    pub(crate) cables: Vec<Arc<Cable>>,
    /// Connects devices of the daemon to one cable, if they share one.
    pub(crate) switch: Option<Arc<Switch>>,
    /// Stations of the daemon's devices.
    pub(crate) stations: Vec<RxeStation>,
    _plugged: Vec<RxeStation>,
    here: Rxe,
    beyond: Rxe,
    /// Manual clock, for runs on one thread.
    manual: Option<Arc<ManualClock>>,
    _reader: Option<Arc<Reader>>,
}

/// Connections of the devices on the wire.
struct Outside {
    /// The link of each device.
    links: Vec<(u8, Arc<dyn Link>)>,
    cables: Vec<Arc<Cable>>,
    switch: Option<Arc<Switch>>,
}

impl Outside {
    /// Creates a cable for each device, or one for the whole daemon. The switch has a thread unless there is a manual
    /// clock.
    fn new(wire: &mut Wire, one_uplink: bool, clock: Option<&Arc<ManualClock>>) -> Self {
        let beyond = wire.cable(vec![mac(BEYOND)]);
        let far = (BEYOND, Arc::clone(&beyond) as _);
        if !one_uplink {
            let cables = ON_THE_WIRE.map(|number| wire.cable(vec![mac(number)]));
            let near = ON_THE_WIRE.into_iter().zip(cables.iter().map(|cable| Arc::clone(cable) as _));
            return Self {
                links: near.chain([far]).collect(),
                cables: [&cables[..], &[beyond]].concat(),
                switch: None,
            };
        }
        let cable = wire.cable(ON_THE_WIRE.map(mac).into());
        let uplink = Some(Arc::clone(&cable) as _);
        let switch = match clock {
            Some(clock) => Switch::without_thread(uplink, MTU, Arc::clone(clock) as _),
            None => Switch::new(uplink, MTU),
        };
        let switch = Arc::new(switch.unwrap());
        let near = ON_THE_WIRE
            .map(|number| (number, switch.port(mac(number), UnknownUnicast::Drop).unwrap() as Arc<dyn Link>));
        Self { links: near.into_iter().chain([far]).collect(), cables: vec![cable, beyond], switch: Some(switch) }
    }
}

/// Carries frames of a network function at once when there are no workers: its driver would be dropped before the next
/// step.
#[derive(Debug)]
struct Reader {
    hosts: [Rxe; 2],
    switch: Option<Arc<Switch>>,
    wire: Arc<Mutex<Wire>>,
}

impl LinkReader for Reader {
    fn read(&self) {
        let run = || self.hosts.iter().for_each(|rxe| _ = rxe.run_some(RUNS));
        run();
        self.wire.lock().carry();
        self.switch.iter().for_each(|switch| _ = switch.service());
        run();
    }
}

impl Network {
    /// Creates the network. Without workers it runs on one thread and in virtual time, otherwise as in a daemon.
    /// `cards`: owners of network functions, with their links.
    pub(crate) fn new(seed: u64, workers: usize, cards: &[(u8, Arc<NicLink>)]) -> Self {
        let manual = (workers == 0).then(|| Arc::new(ManualClock::default()));
        let clock: Arc<dyn Clock> = match &manual {
            Some(clock) => Arc::clone(clock) as _,
            None => Arc::new(MonotonicClock::default()),
        };
        let mut dice = Dice::new(seed, 13);
        let one_uplink = dice.one_in(2);
        // Small limits, so that even transfers of a few pages need several runs.
        let config = RxeConfig::default()
            .with_workers(workers)
            .with_inline_bytes(6000)
            .with_inline_requests(3)
            .with_worker_bytes(6000)
            .with_worker_requests(3)
            .with_port_threads(1 + dice.below(2))
            .with_clock(Arc::clone(&clock));
        let beyond = Rxe::new(config.clone()).unwrap();
        let here = Rxe::new(config).unwrap();
        let numbers = [1, 2].into_iter().chain(ON_THE_WIRE).chain([VISITOR]);
        let stations = numbers.map(|number| here.station(mac(number))).collect();
        let mut wire = Wire::new(Dice::new(seed, 1), if manual.is_some() { STOP } else { LONG_STOP });
        let Outside { links, cables, switch } = Outside::new(&mut wire, one_uplink, manual.as_ref());
        let plug = |(number, uplink)| {
            let rules = PortRules::default()
                // Tenants begin at once.
                .with_alone(true)
                .with_congestion(Some(Congestion::default()))
                .with_negotiate(true)
                .with_multipath(true);
            let nic =
                cards.iter().find(|(owner, _)| *owner == number).map(|(_, card)| Arc::<NicLink>::clone(card) as _);
            let rxe = if number == BEYOND { &beyond } else { &here };
            let station = rxe.station(mac(number));
            station.plug(PortConfig::new(uplink, MTU).with_nic(nic).with_rules(rules)).unwrap();
            station
        };
        let plugged = links.into_iter().map(plug).collect();
        let wire = Arc::new(Mutex::new(wire));
        let reader = manual.is_some().then(|| {
            let hosts = [here.clone(), beyond.clone()];
            Arc::new(Reader { hosts, switch: switch.clone(), wire: Arc::clone(&wire) })
        });
        if let Some(reader) = &reader {
            cards.iter().for_each(|(_, card)| card.set_reader(Arc::downgrade(reader) as _));
        }
        let watcher = Watcher::new(clock, Dice::new(seed, 9));
        Self { watcher, stations, _plugged: plugged, wire, cables, switch, here, beyond, manual, _reader: reader }
    }

    /// Returns virtual time. With threads, returns the CPU time of this process, so that a busy machine does not fail
    /// the test.
    pub(crate) fn now(&self) -> Duration {
        match &self.manual {
            Some(clock) => clock.now(),
            None => Duration::try_from(rustix::time::clock_gettime(ClockId::ProcessCPUTime)).unwrap(),
        }
    }

    /// Returns the code of the tenants' ACK timeout.
    pub(crate) const fn ack_timeout(&self) -> u8 {
        if self.manual.is_some() { ACK_TIMEOUT } else { PATIENT_ACK_TIMEOUT }
    }

    /// Returns the ACK timeout (InfiniBand specification 9.7.6.1.3).
    pub(crate) fn ack_timeout_time(&self) -> Duration {
        Duration::from_nanos(4096 << self.ack_timeout())
    }

    /// Creates a machine with this memory. The seed decides the kind of its doorbells.
    pub(crate) fn machine(&self, number: u8, memory: Arc<GuestMemory>, seed: u64) -> Machine {
        let irqs = Irqs::new();
        let space = Arc::clone(memory.space());
        let device = PvrdmaDevice::new(Self::config(number, seed), space, irqs.clone(), &self.station(number)).unwrap();
        let test = TestDevice { memory, irqs, device };
        let is_mapped = Dice::new(seed, 100 + u64::from(number)).one_in(2);
        if is_mapped { Machine::mapped(test, &self.watcher) } else { Machine::trapping(test) }
    }

    pub(crate) fn config(number: u8, seed: u64) -> DeviceConfig {
        let config = DeviceConfig::new(format!("guest {number}"));
        // Queue pair numbers begin at random. The hostile kernel has guessed its victim's seed, so it gets the same
        // numbers as the guest that reboots.
        let begin = if number == KERNEL { VISITOR } else { number };
        config.with_random(Random::Seed(seed.wrapping_mul(u64::from(begin))))
    }

    pub(crate) fn rxe(&self, number: u8) -> &Rxe {
        if number == BEYOND { &self.beyond } else { &self.here }
    }

    pub(crate) fn station(&self, number: u8) -> RxeStation {
        self.rxe(number).station(mac(number))
    }

    /// Without workers: runs until there is no more work. Returns `false` if an actor keeps the adapter busy without
    /// end.
    pub(crate) fn settle(&self) -> bool {
        for _ in 0..ROUNDS {
            let found = self.watcher.look();
            let busy = self.manual.is_some() && self.run();
            if found == 0 && !busy {
                return true;
            }
        }
        false
    }

    /// Does the work of the threads for a moment. Returns `false` if there was none.
    fn run(&self) -> bool {
        let came = self.switch.as_ref().is_some_and(|switch| switch.service());
        let ran = [&self.here, &self.beyond].map(|rxe| rxe.run_some(RUNS) > 0);
        came || ran != [false; 2] || self.wire.lock().carry() > 0
    }

    /// Advances virtual time to the next timer, at most by `at_most`, and does the work that is due then.
    pub(crate) fn pass(&self, at_most: Duration) {
        self.settle();
        if let Some(clock) = &self.manual {
            let next = [&self.here, &self.beyond].into_iter().filter_map(Rxe::next_deadline).min();
            let now = clock.now();
            clock.advance(next.map_or(at_most, |next| next.saturating_sub(now)).min(at_most));
            self.settle();
        }
    }

    /// Advances virtual time in one step; no events happen meanwhile.
    pub(crate) fn pass_at_once(&self, time: Duration) {
        if let Some(clock) = &self.manual {
            self.settle();
            clock.advance(time);
            self.settle();
        }
    }
}
