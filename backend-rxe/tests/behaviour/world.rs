//! Engines, their clock and the cable between them: test fixtures in addition to [`pvrdma_verbs::testing`].

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_link::{
    Clock, Frames, Link, ManualClock,
    fault::{FaultLink, Faults},
    memory::{self, MemoryLink},
};
use pvrdma_rxe::{HeldRequests, PortConfig, PortRules, Rxe, RxeConfig, RxeHca, RxeStation, ShareConfig};
use pvrdma_verbs::Rules;
use pvrdma_verbs_types::{QpAttrs, QpType};

pub(crate) use pvrdma_verbs::testing::{ALL, Ring, SEND, gid, mac, page_list, pattern, post_shared, write};

pub(crate) type Node = pvrdma_verbs::testing::Node<RxeHca>;
pub(crate) type Buffer = pvrdma_verbs::testing::Buffer<RxeHca>;
pub(crate) type End = pvrdma_verbs::testing::End<RxeHca>;

/// Size of a node's memory in bytes, which costs nothing before it is touched.
const MEMORY: u64 = 64 << 20;
/// IP MTU of the cable.
const CABLE_MTU: u32 = 4500;

thread_local! {
    static CABLE: Cell<Option<(Faults, u64)>> = const { Cell::new(None) };
    static SLOW: Cell<bool> = const { Cell::new(false) };
    static HELD: Cell<HeldRequests> = const { Cell::new(HeldRequests::Off) };
}

/// Makes the memory of every node of `test` slow, so that the memory of two nodes is not held at the same time.
pub(crate) fn on_slow_memory(test: impl FnOnce()) {
    SLOW.set(true);
    test();
    SLOW.set(false);
}

/// Makes every [`World`] of `test` consist of two backends, nodes of odd numbers on one and of even numbers on the
/// other, with nodes 1 and 2 connected by a cable with these faults.
pub(crate) fn on_the_wire(faults: Faults, seed: u64, test: impl FnOnce()) {
    CABLE.set(Some((faults, seed)));
    test();
    CABLE.set(None);
}

/// Makes the ends of every cable of `test` hold off these requests while their device is paused.
pub(crate) fn holding(requests: HeldRequests, test: impl FnOnce()) {
    HELD.set(requests);
    test();
    HELD.set(HeldRequests::Off);
}

/// Connects the device with this number to a network.
pub(crate) fn plug(rxe: &Rxe, number: u8, uplink: impl Link + 'static, rules: PortRules) -> RxeStation {
    plug_in(rxe, number, PortConfig::new(Arc::new(uplink), CABLE_MTU).with_rules(rules))
}

/// As [`plug`], with this configuration of the port.
pub(crate) fn plug_in(rxe: &Rxe, number: u8, config: PortConfig) -> RxeStation {
    let station = rxe.station(mac(number));
    station.plug(config).unwrap();
    station
}

/// Backends with a clock that tests advance.
pub(crate) struct World {
    pub(crate) rxe: Rxe,
    pub(crate) clock: Arc<ManualClock>,
    /// The other end of the cable, if there is one.
    pub(crate) far: Option<Rxe>,
    /// Keep the stations of all devices.
    pub(crate) stations: Mutex<Vec<RxeStation>>,
}

impl World {
    /// Runs one ready task. Returns `false` if there was none.
    pub(crate) fn run_one(&self) -> bool {
        self.backends().iter().any(Rxe::run_one)
    }

    /// Creates backends that run only when the test runs them.
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut RxeConfig)) -> Self {
        Self::with_shares(change, &[])
    }

    /// Same as [`Self::with`], with shares of devices by number.
    pub(crate) fn with_shares(change: impl FnOnce(&mut RxeConfig), shares: &[(u8, ShareConfig)]) -> Self {
        let clock = Arc::new(ManualClock::default());
        let mut config = RxeConfig::default().with_workers(0).with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
        change(&mut config);
        let rxe = Rxe::new(config.clone()).unwrap();
        let give = |rxe: &Rxe| -> Vec<_> {
            let stations = shares.iter().map(|&(number, share)| (rxe.station(mac(number)), share));
            stations.inspect(|(station, share)| station.set_share(*share)).map(|(station, _)| station).collect()
        };
        let mut stations = give(&rxe);
        let Some((faults, seed)) = CABLE.get() else {
            return Self { rxe, clock, far: None, stations: Mutex::new(stations) };
        };
        // With two of three seeds, one end has several receive queues.
        let port_threads = if seed.is_multiple_of(3) { 1 } else { 3 };
        let far = Rxe::new(config.with_port_threads(port_threads)).unwrap();
        stations.extend(give(&far));
        let (near_end, far_end) = memory::pair(100_000).unwrap();
        // With every second seed the two ends negotiate features beyond RoCE.
        let rules = || PortRules::default().with_negotiate(seed.is_multiple_of(2)).with_held(HELD.get());
        stations.push(plug(&rxe, 1, FaultLink::new(near_end, faults, seed * 2), rules()));
        stations.push(plug(&far, 2, FaultLink::new(far_end, faults, seed * 2 + 1), rules()));
        Self { rxe, clock, far: Some(far), stations: Mutex::new(stations) }
    }

    /// Returns both backends, or the only one.
    fn backends(&self) -> Vec<Rxe> {
        [Some(self.rxe.clone()), self.far.clone()].into_iter().flatten().collect()
    }

    fn backend(&self, number: u8) -> &Rxe {
        self.far.as_ref().filter(|_| number.is_multiple_of(2)).unwrap_or(&self.rxe)
    }

    /// Returns the station of a device, which stays for as long as this world.
    pub(crate) fn station(&self, number: u8) -> RxeStation {
        let station = self.backend(number).station(mac(number));
        self.stations.lock().push(station.clone());
        station
    }

    /// Returns the backend of a device, which has a station there from now on.
    fn place(&self, number: u8) -> &Rxe {
        self.station(number);
        self.backend(number)
    }

    pub(crate) fn node(&self, number: u8) -> Node {
        self.driven(Node::with_memory(self.place(number), number, MEMORY))
    }

    /// Returns a device with these rules, which has no GID yet.
    pub(crate) fn ruled(&self, number: u8, rules: Rules) -> Node {
        self.driven(Node::with_rules(self.place(number), number, MEMORY, rules))
    }

    /// Returns a device on the memory of another, in a part of its own.
    pub(crate) fn node_beside(&self, other: &Node, number: u8) -> Node {
        let pages = other.pages(64);
        let buffers = pages[pages.len() - 1]..pages[0];
        self.driven(Node::on(self.place(number), number, Arc::clone(&other.memory), buffers))
    }

    /// Returns a device on memory of which it registers the part that the test chooses.
    pub(crate) fn node_on(&self, number: u8, memory: Arc<DmaSpace>) -> Node {
        self.driven(Node::on(self.place(number), number, memory, 0..0))
    }

    /// Sets the callback that drives the backends. Local delivery is complete when a doorbell returns and needs none;
    /// delivery over the cable takes several runs of both backends, and that to slow memory runs elsewhere.
    fn driven(&self, mut node: Node) -> Node {
        if SLOW.get() {
            node.memory.note_stall(Duration::from_secs(1));
        }
        let backends = self.backends();
        if self.far.is_some() || SLOW.get() {
            node.drive = Some(Arc::new(move || run_all(&backends)));
        }
        node
    }

    /// Runs all ready tasks, then advances the clock to the next deadline, until there are no more. Returns the elapsed
    /// virtual time.
    pub(crate) fn settle(&self) -> Duration {
        let start = self.clock.now();
        self.run();
        while self.step() {}
        self.clock.now() - start
    }

    /// Runs all ready tasks.
    pub(crate) fn run(&self) {
        run_all(&self.backends());
    }

    /// Returns the deadline of the next timer.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.backends().iter().filter_map(Rxe::next_deadline).min()
    }

    /// Advances the clock to the next deadline, if there is one, and runs all tasks that are ready then.
    pub(crate) fn step(&self) -> bool {
        let Some(deadline) = self.next_deadline() else { return false };
        self.clock.advance(deadline.saturating_sub(self.clock.now()));
        self.run();
        true
    }
}

/// Runs all backends until none has a ready task.
fn run_all(backends: &[Rxe]) {
    while backends.iter().map(Rxe::run_ready).sum::<usize>() > 0 {}
}

/// Two devices with a connected QP each.
pub(crate) struct Pair {
    pub(crate) world: World,
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) left: End,
    pub(crate) right: End,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(World::new(), |_| {}, |_| {})
    }

    /// Creates the pair; `left` and `right` change the attributes of the two QPs.
    pub(crate) fn with(world: World, left: impl FnOnce(&mut QpAttrs), right: impl FnOnce(&mut QpAttrs)) -> Self {
        let (a, b) = (world.node(1), world.node(2));
        let pair = Self { left: a.qp(QpType::Rc), right: b.qp(QpType::Rc), world, a, b };
        pair.left.connect(&pair.right, left);
        pair.right.connect(&pair.left, right);
        pair
    }

    /// Runs everything to its end on virtual time.
    pub(crate) fn settle(&self) -> Duration {
        self.world.settle()
    }
}

/// Returns a device on a cable whose other end is the test.
pub(crate) fn exposed(capacity: usize) -> (World, Node, MemoryLink, RxeStation) {
    let world = World::new();
    let (ours, theirs) = memory::pair(capacity).unwrap();
    let station = plug(&world.rxe, 1, ours, PortRules::default());
    let node = world.node(1);
    (world, node, theirs, station)
}

/// Returns a frame that a correct peer sends to QP 0x100 of node 1.
pub(crate) fn request() -> Vec<u8> {
    requests(1).remove(0)
}

/// Returns the frames of this number of SENDs of a correct peer to QP 0x100 of node 1.
pub(crate) fn requests(count: u64) -> Vec<Vec<u8>> {
    let (world, far, cable, _station) = exposed(10);
    pvrdma_verbs::Hca::bind_gid(&far.hca, 0, gid(2), pvrdma_verbs_types::GidType::RoceV2).unwrap();
    let end = far.qp(QpType::Rc);
    end.connect(&end, |a| (a.av.dgid, a.av.dmac) = (gid(1), mac(1)));
    (0..count).for_each(|id| end.post(id, SEND, &[]));
    pvrdma_verbs::QueuePair::notify_send(&end.qp);
    world.rxe.run_ready();
    let mut frames = taken(&cable);
    frames.iter_mut().for_each(|frame| frame[6..12].copy_from_slice(&mac(2).0));
    frames
}

/// Connects a QP of node 1 to a peer that the test simulates.
pub(crate) fn connect_to_test(end: &End) {
    end.connect(end, |a| (a.av.dgid, a.av.dmac) = (gid(2), mac(2)));
}

/// Returns the frames that came out of an end of a cable.
pub(crate) fn taken(link: &impl Link) -> Vec<Vec<u8>> {
    let mut frames = Frames::default();
    link.receive(&mut frames, usize::MAX);
    frames.iter().map(<[u8]>::to_vec).collect()
}

/// Sends a frame into an end of a cable.
pub(crate) fn give(link: &impl Link, frame: &[u8]) {
    let mut frames = Frames::default();
    frames.push(frame);
    assert_eq!(link.send(&frames, 0), 1);
}
