//! Where everybody lives: the devices of one daemon, a host beyond the uplink, and the wire between them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_dev::testing::{GuestMemory, Irqs, TestDevice};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_ether_link::memory::{self, MemoryLink};
use pvrdma_ether_link::{Clock, Frames, Link, LinkReader, ManualClock, MonotonicClock};
use pvrdma_rxe::{Congestion, PortConfig, PortRules, Rxe, RxeConfig, Uplink};
use pvrdma_verbs::testing::mac;
use pvrdma_verbs::{MacAddr, Random};
use pvrdma_vmxnet3::NicLink;
use pvrdmad::testing::Dice;
use rustix::time::ClockId;

use crate::frames::KIND;
use crate::machine::{Machine, Watcher};

/// The host beyond the uplink.
pub(crate) const BEYOND: u8 = 4;
/// Devices of the daemon that are on the wire; all but the first are attackers'.
pub(crate) const ON_THE_WIRE: [u8; 3] = [3, KERNEL, VMM];
/// Who reboots.
pub(crate) const VISITOR: u8 = 5;
/// The attackers' devices.
pub(crate) const KERNEL: u8 = 66;
pub(crate) const VMM: u8 = 67;

/// Frames that a cable holds in each direction.
const CABLE: usize = 512;
/// Runs of queue pairs before ports are served, and how often both have their turn between two steps.
const RUNS: usize = 16;
const ROUNDS: usize = 64;
/// Code of an ACK timeout as programs have it, and of one whose retries last while a process gets no processor for
/// seconds.
pub(crate) const ACK_TIMEOUT: u8 = 14;
const PATIENT_ACK_TIMEOUT: u8 = 20;
/// How long an address stays with who had it.
pub(crate) const HOLD: Duration = Duration::from_secs(60);

pub(crate) struct Network {
    pub(crate) watcher: Watcher,
    _uplinks: Vec<Uplink>,
    pub(crate) wire: Arc<Mutex<Wire>>,
    here: Rxe,
    beyond: Rxe,
    /// Time that stands still until it is moved, for runs on one thread.
    manual: Option<Arc<ManualClock>>,
    _reader: Option<Arc<Reader>>,
}

/// Carries what a network card sends, without workers: its driver would be gone before the next step.
#[derive(Debug)]
struct Reader {
    hosts: [Rxe; 2],
    wire: Arc<Mutex<Wire>>,
}

impl LinkReader for Reader {
    fn read(&self) {
        let run = || self.hosts.iter().for_each(|rxe| _ = rxe.run_some(RUNS));
        run();
        self.wire.lock().carry();
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
        // Small, so that transfers of a few pages already go on from run to run.
        let config = RxeConfig {
            workers,
            inline_bytes: 6000,
            inline_requests: 3,
            worker_bytes: 6000,
            worker_requests: 3,
            clock: Arc::clone(&clock),
            ..RxeConfig::default()
        };
        let (here, beyond) = (Rxe::new(config.clone()).unwrap(), Rxe::new(config).unwrap());
        let (mut ports, mut uplinks) = (Vec::new(), Vec::new());
        for number in ON_THE_WIRE.into_iter().chain([BEYOND]) {
            let (ours, theirs) = memory::pair(CABLE).unwrap();
            let rules = PortRules {
                congestion: Some(Congestion::default()),
                negotiate: true,
                multipath: true,
                ..PortRules::default()
            };
            let nic =
                cards.iter().find(|(owner, _)| *owner == number).map(|(_, card)| Arc::<NicLink>::clone(card) as _);
            let config = PortConfig { uplink: Arc::new(ours), nic, mtu: 1500, rules };
            let rxe = if number == BEYOND { &beyond } else { &here };
            uplinks.push(rxe.plug(mac(number), config).unwrap());
            ports.push((mac(number), theirs));
        }
        let wire = Arc::new(Mutex::new(Wire { ports, dice: Dice::new(seed, 1), recent: VecDeque::new() }));
        let reader = manual
            .is_some()
            .then(|| Arc::new(Reader { hosts: [here.clone(), beyond.clone()], wire: Arc::clone(&wire) }));
        if let Some(reader) = &reader {
            cards.iter().for_each(|(_, card)| card.set_reader(Arc::downgrade(reader) as _));
        }
        let watcher = Watcher::new(clock, Dice::new(seed, 9));
        Self { watcher, _uplinks: uplinks, wire, here, beyond, manual, _reader: reader }
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
            let runs = [&self.here, &self.beyond].map(|rxe| if self.manual.is_some() { rxe.run_some(RUNS) } else { 0 });
            if found == 0 && runs == [0; 2] && (self.manual.is_none() || self.wire.lock().carry() == 0) {
                return true;
            }
        }
        false
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

/// What connects the devices that have an uplink. It loses, doubles and overtakes, and somebody listens.
#[derive(Debug)]
pub(crate) struct Wire {
    ports: Vec<(MacAddr, MemoryLink)>,
    dice: Dice,
    /// What was carried of late.
    recent: VecDeque<Vec<u8>>,
}

impl Wire {
    /// Carries what has come, and returns how many frames there were.
    pub(crate) fn carry(&mut self) -> usize {
        let mut frames = Frames::default();
        for (_, port) in &self.ports {
            port.receive(&mut frames, 64);
        }
        let mut order: Vec<&[u8]> = frames.iter().collect();
        if order.len() > 1 && self.dice.one_in(8) {
            let at = self.dice.below(order.len() - 1);
            order.swap(at, at + 1);
        }
        for frame in order {
            let times = match self.dice.below(200) {
                0 => 0,
                1 => 2,
                _ => 1,
            };
            (0..times).for_each(|_| self.give(frame));
            // What has no checksum would be taken for what it says.
            if frame.get(12..14) != Some(&KIND.to_be_bytes()) {
                self.recent.push_back(frame.to_vec());
            }
        }
        while self.recent.len() > 32 {
            self.recent.pop_front();
        }
        frames.len()
    }

    /// A frame that was carried of late.
    pub(crate) fn recent(&mut self) -> Option<Vec<u8>> {
        let at = self.dice.below(self.recent.len().max(1));
        self.recent.get(at).cloned()
    }

    /// Sends a frame to whom it names, or to everybody. What finds no room is lost.
    pub(crate) fn give(&self, frame: &[u8]) {
        let mut frames = Frames::default();
        frames.push(frame);
        let named = frame.first_chunk().map(|address| MacAddr(*address));
        let everybody = named.is_none_or(|mac| mac.0[0] & 1 != 0);
        for (mac, port) in &self.ports {
            if everybody || named == Some(*mac) {
                port.send(&frames, 0);
            }
        }
    }
}
