//! Torture test. Three tenants exchange data, of which every byte is compared, beside attackers that know everything
//! except secrets: a guest's kernel, a process in a tenant's own guest, a peer on the wire, and a VMM. An operator
//! makes legal changes at the worst moments. A seed determines their actions and the connections of the devices.
//!
//! `cargo test -p pvrdmad --test torture` runs many short seeds on one thread in virtual time, so that a failing seed
//! can be repeated: `SEED=17 cargo test -p pvrdmad --test torture -- --ignored one_thread`. With `SECONDS=3600` it
//! continues with the following seeds for that time. `all_threads` runs the same with workers, a thread for each actor,
//! and real time; it finds races, but is not exactly repeatable.
#![expect(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation, reason = "a panic fails the test")]

mod forger;
mod frames;
mod kernel;
mod machine;
mod network;
mod operator;
mod tenant;
mod visitor;
mod vmm;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forger::Forger;
use frames::{Cards, FrameFlow};
use kernel::Kernel;
use network::{BEYOND, HOLD, KERNEL, Network, ON_THE_WIRE, VISITOR, VMM};
use operator::Operator;
use parking_lot::Mutex;
use pvrdma_dev::testing::Stop;
use pvrdma_dev::{KeptStatus, ObjectKind};
use pvrdma_verbs::testing::{CountingAllocator, mac};
use pvrdmad::testing::{Dice, HostilePeer, HostileProcess, Target, Targets};
use tenant::{Flow, PATIENCE, Tenant};
use visitor::Visitor;
use vmm::{HostileCard, Vmm};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator::new();

/// Serializes the tests, because all of them measure the same heap.
static ALONE: Mutex<()> = Mutex::new(());

/// Steps of a run on one thread.
const STEPS: usize = 600;
/// Number of steps in which the time passes for which an address stays reserved.
const NIGHT: u32 = 3;
/// Batches of each connection after which a threaded run ends.
const BATCHES: u64 = 40;
/// Workers of a daemon on threads.
const WORKERS: usize = 2;
/// Bytes by which the heap may grow between the first run and later ones, for maps that have grown.
const ROOM: usize = 64 << 10;

/// All actors, and the network between them.
struct World<'a> {
    flows: Vec<Flow>,
    frames: FrameFlow<'a>,
    forger: Forger<'a>,
    tenants: Vec<Tenant>,
    /// Resources of each tenant before the first attack.
    kept: Vec<KeptStatus>,
    process: Option<HostileProcess>,
    visitor: Visitor,
    kernel: Kernel,
    peer: HostilePeer,
    vmm: Vmm,
    operator: Operator,
    network: Network,
    seed: u64,
}

impl<'a> World<'a> {
    /// `cards`: network functions that the test drives.
    fn new(seed: u64, workers: usize, cards: &'a Cards) -> Self {
        let card = HostileCard::new();
        let have_drivers = cards.iter().map(|card| (card.owner, Arc::clone(&card.link)));
        let links: Vec<_> = have_drivers.chain([(VMM, Arc::clone(&card.link))]).collect();
        let network = Network::new(seed, workers, &links);
        let tenants: Vec<Tenant> = [1, 2, 3, BEYOND].map(|number| Tenant::new(&network, number, seed)).into();
        let pairs = [(0, 1), (1, 2), (2, 0), (2, 3)];
        let mut flows: Vec<Flow> = (0..)
            .zip(pairs)
            .map(|(actor, (left, right))| {
                Flow::new(&tenants[left], &tenants[right], network.ack_timeout(), Dice::new(seed, 10 + actor))
            })
            .collect();
        // Each flow moves data once, so that everything that is created only once exists.
        settle(&network, &mut flows, 1);
        let kept = tenants.iter().map(Tenant::kept).collect();
        let targets: Vec<Target> = flows.iter().flat_map(Flow::targets).collect();
        let on_the_wire = |target: &&Target| ON_THE_WIRE.contains(&target.number) || target.number == BEYOND;
        let victims = targets.iter().filter(on_the_wire).map(|target| (*target, mac(target.number)));
        let peer = HostilePeer::new(victims.collect(), Dice::new(seed, 3));
        let targets = Targets::new(targets);
        let process =
            Some(HostileProcess::new(&tenants[0].driver, tenants[0].gid, targets.clone(), Dice::new(seed, 5)));
        let visitor = Visitor::new(&network, targets.clone(), seed);
        let kernel = Kernel::new(&network, targets, seed);
        let vmm = Vmm::new(&network, card, seed, workers > 0);
        let forger = Forger::new(&cards.forger, seed);
        let frames = FrameFlow::new(&cards.tenants);
        let machines = tenants.iter().map(|tenant| (tenant.number, &tenant.machine));
        let machines = machines.chain([(KERNEL, &kernel.machine), (VISITOR, visitor.machine())]);
        let devices = machines.map(|(number, machine)| (number, Arc::clone(&machine.test.device)));
        let operator = Operator::new(devices.chain([(VMM, Arc::clone(&vmm.device))]).collect(), seed);
        Self { flows, frames, forger, tenants, kept, process, visitor, kernel, peer, vmm, operator, network, seed }
    }

    /// Runs randomly chosen steps on this thread.
    fn run(&mut self) {
        let mut dice = Dice::new(self.seed, 6);
        for _ in 0..STEPS {
            self.operator.restore_after(&self.network, operator::DOWN);
            match dice.below(26) {
                24 | 25 => self.operator.step(&self.network),
                20..23 => self.visitor.step(&self.network, &self.tenants[0]),
                23 if dice.one_in(2) && self.visitor.has_left() => self.pass_night(),
                0..7 => {
                    let at = dice.below(self.flows.len());
                    self.flows[at].step(self.network.now());
                }
                7..12 => self.kernel.step(),
                12..16 => self.process.iter_mut().for_each(HostileProcess::step),
                16 | 17 => self.network.wire.lock().attack(&mut self.peer),
                18 if dice.one_in(3) => self.vmm.step(),
                18 => self.frames.step(self.network.now()),
                19 => (0..4).for_each(|_| self.forger.step()),
                _ => self.network.pass(Duration::from_millis(dice.below(50) as u64)),
            }
            if dice.one_in(2) {
                self.network.settle();
            }
        }
    }

    /// Lets so much time pass that addresses of absent guests become free. Present guests are heard of meanwhile.
    fn pass_night(&mut self) {
        self.operator.restore_after(&self.network, Duration::ZERO);
        for _ in 0..NIGHT {
            settle(&self.network, &mut self.flows, 1);
            self.let_visitor_end();
            self.let_frames_end();
            self.network.pass_at_once(HOLD / NIGHT);
        }
    }

    fn let_visitor_end(&mut self) {
        let since = self.network.now();
        while !self.visitor.is_idle() {
            assert!(self.network.now() < since + PATIENCE, "no completion for a guest that reboots, or for its peer");
            self.visitor.look(&self.network);
            self.network.pass(Duration::from_millis(10));
            thread::yield_now();
        }
    }

    fn let_frames_end(&mut self) {
        while !self.frames.is_idle() {
            self.frames.look(self.network.now());
            self.network.pass(Duration::from_millis(10));
            self.network.wire.lock().carry();
            thread::yield_now();
        }
    }

    /// Same as `run`, with a thread for each actor.
    fn run_on_threads(&mut self) {
        let Self { flows, frames, forger, tenants, process, visitor, kernel, peer, vmm, operator, network, .. } = self;
        let (network, stop) = (&*network, AtomicBool::new(false));
        let until_the_end = |step: &mut dyn FnMut()| {
            let _stop = Stop(&stop);
            while !stop.load(Ordering::Acquire) {
                step();
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| until_the_end(&mut || _ = network.wire.lock().carry()));
            scope.spawn(|| until_the_end(&mut || _ = network.watcher.look()));
            scope.spawn(|| until_the_end(&mut || network.wire.lock().attack(peer)));
            scope.spawn(|| until_the_end(&mut || kernel.step()));
            scope.spawn(|| until_the_end(&mut || process.iter_mut().for_each(HostileProcess::step)));
            scope.spawn(|| until_the_end(&mut || vmm.step()));
            scope.spawn(|| until_the_end(&mut || forger.step()));
            scope.spawn(|| until_the_end(&mut || visitor.step(network, &tenants[0])));
            scope.spawn(|| until_the_end(&mut || frames.step(network.now())));
            scope.spawn(|| until_the_end(&mut || operator.step(network)));
            let _stop = Stop(&stop);
            while !stop.load(Ordering::Acquire) && flows.iter().any(|flow| flow.batches < BATCHES) {
                flows.iter_mut().for_each(|flow| flow.step(network.now()));
                thread::yield_now();
            }
        });
    }

    /// Removes all attackers. Outstanding traffic ends well, the tenants continue, and no resources of the attackers
    /// remain.
    fn end(mut self) {
        self.operator.end(&self.network);
        self.kernel.end();
        self.process.take().into_iter().for_each(HostileProcess::end);
        self.let_visitor_end();
        self.visitor.end();
        settle(&self.network, &mut self.flows, 2);
        self.frames.step(self.network.now());
        self.let_frames_end();
        self.frames.end();
        self.vmm.end();
        self.forger.end();
        assert!((0..100).any(|_| self.network.settle()), "an actor that has left keeps the adapter busy");
        for (tenant, before) in self.tenants.iter().zip(&self.kept) {
            let after = tenant.kept();
            assert_eq!(after.used_bytes, before.used_bytes, "kept for guest {}: {after:?}", tenant.number);
        }
        // The first tenant has the hostile process, and the last one is not a device of this daemon.
        self.tenants[1..3].iter().for_each(Tenant::check_counters);
    }
}

impl Drop for World<'_> {
    /// Prints the progress of all actors if the run did not end normally.
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for tenant in &self.tenants {
            let device = &tenant.machine.test.device;
            println!("guest {}: {:?}", tenant.number, device.status());
            for kind in [ObjectKind::Qp, ObjectKind::Cq] {
                println!("{kind:?}: {}", device.inspect_objects(kind));
            }
        }
        for station in &self.network.stations {
            println!("{:?}: {:?}", station.share(), station.share_usage());
        }
    }
}

/// Lets every connection finish its batch and do some more.
fn settle(network: &Network, flows: &mut [Flow], batches: u64) {
    let goals: Vec<u64> = flows.iter().map(|flow| flow.batches + batches).collect();
    while flows.iter().zip(&goals).any(|(flow, goal)| flow.batches < *goal || !flow.is_idle()) {
        for (flow, goal) in flows.iter_mut().zip(&goals) {
            if flow.batches < *goal { flow.step(network.now()) } else { flow.look(network.now()) }
        }
        network.pass(Duration::from_millis(10));
        network.wire.lock().carry();
        thread::yield_now();
    }
}

/// Prints the seed of a run that fails.
struct Running {
    seed: u64,
    test: &'static str,
}

impl Drop for Running {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("again: SEED={} cargo test -p pvrdmad --test torture -- --ignored {}", self.seed, self.test);
        }
    }
}

/// Executes a whole run. Returns the number of compared batches.
fn torture(seed: u64, workers: usize) -> u64 {
    let test = if workers == 0 { "one_thread" } else { "all_threads" };
    let _running = Running { seed, test };
    let cards = Cards::new();
    let mut world = World::new(seed, workers, &cards);
    if workers == 0 {
        world.run()
    } else {
        world.run_on_threads()
    }
    let batches = world.flows.iter().map(|flow| flow.batches).sum();
    world.end();
    batches
}

/// Executes runs with these seeds, and checks that the heap does not grow from run to run.
fn runs(seeds: impl Iterator<Item = u64>, workers: usize) {
    let _alone = ALONE.lock();
    let (mut batches, mut runs, mut first) = (0, 0_u64, None);
    for seed in seeds {
        batches += torture(seed, workers);
        runs += 1;
        let bytes = HEAP.bytes();
        let first = *first.get_or_insert(bytes);
        assert!(bytes < first + ROOM, "after seed {seed}: {bytes} bytes, {first} after the first");
    }
    println!("{runs} runs, {batches} batches compared");
}

/// Returns a number from the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Returns the seeds that the environment asks for.
fn seeds() -> impl Iterator<Item = u64> {
    let (first, seconds) = (number("SEED").unwrap_or(1), number("SECONDS"));
    let begin = Instant::now();
    (first..).enumerate().map_while(move |(count, seed)| {
        let more = seconds.is_some_and(|seconds| begin.elapsed() < Duration::from_secs(seconds));
        (count == 0 || more).then_some(seed)
    })
}

#[test]
fn attackers_do_not_harm_tenants() {
    runs(1..=24, 0);
}

/// A failing seed must be repeatable.
#[test]
fn a_seed_does_the_same_again() {
    let _alone = ALONE.lock();
    let [once, again] = [(); 2].map(|()| {
        let cards = Cards::new();
        let mut world = World::new(7, 0, &cards);
        world.run();
        let machines = world.tenants.iter().map(|tenant| &tenant.machine).chain([&world.kernel.machine]);
        machines.map(|machine| machine.test.device.status()).collect::<Vec<_>>()
    });
    assert_eq!(once, again);
}

#[test]
fn attackers_do_not_harm_tenants_on_threads() {
    runs(1..=2, WORKERS);
}

#[test]
#[ignore = "run by name, with SEED and SECONDS: docs/dev/proof.md"]
fn one_thread() {
    runs(seeds(), 0);
}

#[test]
#[ignore = "run by name, with SEED and SECONDS: docs/dev/proof.md"]
fn all_threads() {
    runs(seeds(), WORKERS);
}
