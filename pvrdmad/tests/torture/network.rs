//! Where everybody lives: the devices of one daemon, a host beyond the uplink, and the wire between them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_dev::testing::{GuestMemory, Irqs, TestDevice};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_ether_link::switch::{Switch, UnknownUnicast};
use pvrdma_ether_link::{Clock, Link, LinkReader, ManualClock, MonotonicClock};
use pvrdma_rxe::{Congestion, DeviceShare, PortConfig, PortRules, Rxe, RxeConfig, ShareConfig, Uplink};
use pvrdma_verbs::Random;
use pvrdma_verbs::testing::mac;
use pvrdma_vmxnet3::NicLink;
use pvrdmad::testing::Dice;
use rustix::time::ClockId;

use crate::machine::{Machine, Watcher};
use crate::wire::{Cable, Wire};

/// The host beyond the uplink.
pub(crate) const BEYOND: u8 = 4;
/// Devices of the daemon that are on the wire; all but the first are attackers'.
pub(crate) const ON_THE_WIRE: [u8; 3] = [3, KERNEL, VMM];
/// Who reboots.
pub(crate) const VISITOR: u8 = 5;
/// The attackers' devices.
pub(crate) const KERNEL: u8 = 66;
pub(crate) const VMM: u8 = 67;

/// IP packets on the wire.
const MTU: u32 = 1500;
/// Runs of queue pairs before ports are served, and how often both have their turn between two steps.
const RUNS: usize = 16;
const ROUNDS: usize = 64;
/// Code of an ACK timeout as programs have it, and of one whose retries last while a process gets no processor for
/// seconds.
pub(crate) const ACK_TIMEOUT: u8 = 14;
const PATIENT_ACK_TIMEOUT: u8 = 18;
/// Looks for which the wire stands still at most: of a run on one thread, shorter than its retries, and on threads.
const STOP: usize = 8;
const LONG_STOP: usize = 4096;
/// How long an address stays with who had it.
pub(crate) const HOLD: Duration = Duration::from_secs(60);

pub(crate) struct Network {
    pub(crate) watcher: Watcher,
    _uplinks: Vec<Uplink>,
    pub(crate) wire: Arc<Mutex<Wire>>,
    /// All that lead to the wire.
    pub(crate) cables: Vec<Arc<Cable>>,
    /// Between devices of the daemon and one cable, if they have one together.
    pub(crate) switch: Option<Arc<Switch>>,
    /// Of the daemon's devices.
    pub(crate) shares: Vec<DeviceShare>,
    here: Rxe,
    beyond: Rxe,
    /// Time that stands still until it is moved, for runs on one thread.
    manual: Option<Arc<ManualClock>>,
    _reader: Option<Arc<Reader>>,
}

/// What the devices on the wire have to do with it.
struct Outside {
    /// The link of each device.
    links: Vec<(u8, Arc<dyn Link>)>,
    cables: Vec<Arc<Cable>>,
    switch: Option<Arc<Switch>>,
}

impl Outside {
    /// A cable for each device, or one for all of the daemon. The switch has a thread unless there is a clock.
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

/// Carries what a network card sends, without workers: its driver would be gone before the next step.
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
    /// On one thread and virtual time without workers, else as a daemon has it. `cards`: whose device
    /// has a network function beside it.
    pub(crate) fn new(seed: u64, workers: usize, cards: &[(u8, Arc<NicLink>)]) -> Self {
        let manual = (workers == 0).then(|| Arc::new(ManualClock::default()));
        let clock: Arc<dyn Clock> = match &manual {
            Some(clock) => Arc::clone(clock) as _,
            None => Arc::new(MonotonicClock::default()),
        };
        let mut dice = Dice::new(seed, 13);
        let one_uplink = dice.one_in(2);
        // Small, so that transfers of a few pages already go on from run to run.
        let config = RxeConfig {
            workers,
            inline_bytes: 6000,
            inline_requests: 3,
            worker_bytes: 6000,
            worker_requests: 3,
            port_threads: 1 + dice.below(2),
            clock: Arc::clone(&clock),
            ..RxeConfig::default()
        };
        let beyond = Rxe::new(config.clone()).unwrap();
        let here = Rxe::new(RxeConfig { one_uplink, ..config }).unwrap();
        let shares = [1, 2].into_iter().chain(ON_THE_WIRE).chain([VISITOR]);
        let shares = shares.map(|number| here.share(mac(number), ShareConfig::default())).collect();
        let mut wire = Wire::new(Dice::new(seed, 1), if manual.is_some() { STOP } else { LONG_STOP });
        let Outside { links, cables, switch } = Outside::new(&mut wire, one_uplink, manual.as_ref());
        let plug = |(number, uplink)| {
            let rules = PortRules {
                // Tenants begin at once.
                alone: true,
                congestion: Some(Congestion::default()),
                negotiate: true,
                multipath: true,
                ..PortRules::default()
            };
            let nic =
                cards.iter().find(|(owner, _)| *owner == number).map(|(_, card)| Arc::<NicLink>::clone(card) as _);
            let rxe = if number == BEYOND { &beyond } else { &here };
            rxe.plug(mac(number), PortConfig { uplink, nic, mtu: MTU, rules }).unwrap()
        };
        let uplinks = links.into_iter().map(plug).collect();
        let wire = Arc::new(Mutex::new(wire));
        let reader = manual.is_some().then(|| {
            let hosts = [here.clone(), beyond.clone()];
            Arc::new(Reader { hosts, switch: switch.clone(), wire: Arc::clone(&wire) })
        });
        if let Some(reader) = &reader {
            cards.iter().for_each(|(_, card)| card.set_reader(Arc::downgrade(reader) as _));
        }
        let watcher = Watcher::new(clock, Dice::new(seed, 9));
        Self { watcher, _uplinks: uplinks, wire, cables, switch, shares, here, beyond, manual, _reader: reader }
    }

    /// Virtual time. On threads what this process had of the processors: nobody is to blame for what others took.
    pub(crate) fn now(&self) -> Duration {
        match &self.manual {
            Some(clock) => clock.now(),
            None => Duration::try_from(rustix::time::clock_gettime(ClockId::ProcessCPUTime)).unwrap(),
        }
    }

    /// The code of the tenants' ACK timeouts.
    pub(crate) const fn ack_timeout(&self) -> u8 {
        if self.manual.is_some() { ACK_TIMEOUT } else { PATIENT_ACK_TIMEOUT }
    }

    /// How long that is (InfiniBand specification 9.7.6.1.3).
    pub(crate) fn ack_timeout_time(&self) -> Duration {
        Duration::from_nanos(4096 << self.ack_timeout())
    }

    /// A machine with this memory. The seed says what its doorbells are.
    pub(crate) fn machine(&self, number: u8, memory: Arc<GuestMemory>, seed: u64) -> Machine {
        let irqs = Irqs::new();
        let space = Arc::clone(memory.space());
        let device = PvrdmaDevice::new(Self::config(number, seed), space, irqs.clone(), self.rxe(number)).unwrap();
        let test = TestDevice { memory, irqs, device };
        let is_mapped = Dice::new(seed, 100 + u64::from(number)).one_in(2);
        if is_mapped { Machine::mapped(test, &self.watcher) } else { Machine::trapping(test) }
    }

    pub(crate) fn config(number: u8, seed: u64) -> DeviceConfig {
        let config = DeviceConfig::new(format!("guest {number}"), mac(number));
        // Numbers begin at random. The kernel has guessed right: its own are those of who reboots.
        let begin = if number == KERNEL { VISITOR } else { number };
        DeviceConfig { random: Random::Seed(seed.wrapping_mul(u64::from(begin))), ..config }
    }

    pub(crate) fn rxe(&self, number: u8) -> &Rxe {
        if number == BEYOND { &self.beyond } else { &self.here }
    }

    /// Does what there is to do now, without workers; not all of it, if somebody keeps the adapter busy for ever.
    /// Returns `false` then.
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

    /// What threads do else, for a moment. Returns `false` if there was nothing to do.
    fn run(&self) -> bool {
        let came = self.switch.as_ref().is_some_and(|switch| switch.service());
        let ran = [&self.here, &self.beyond].map(|rxe| rxe.run_some(RUNS) > 0);
        came || ran != [false; 2] || self.wire.lock().carry() > 0
    }

    /// Moves virtual time on to where the next timer fires, at most so far, and does what is to be done then.
    pub(crate) fn pass(&self, at_most: Duration) {
        self.settle();
        if let Some(clock) = &self.manual {
            let next = [&self.here, &self.beyond].into_iter().filter_map(Rxe::next_deadline).min();
            let now = clock.now();
            clock.advance(next.map_or(at_most, |next| next.saturating_sub(now)).min(at_most));
            self.settle();
        }
    }

    /// Lets time pass in which nothing happens, if it is virtual.
    pub(crate) fn pass_at_once(&self, time: Duration) {
        if let Some(clock) = &self.manual {
            self.settle();
            clock.advance(time);
            self.settle();
        }
    }
}
