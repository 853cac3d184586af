//! Devices without PCI: queues, sinks and guest memory for tests of the engine.

mod node;
mod pair;
mod queues;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PinPolicy};
use pvrdma_verbs::{
    Access, Backend, DeviceContext, EventSink, Gid, GidType, Hca, MacAddr, RemoteAddress, SendData, SendOp,
};
use vm_memory::mmap::MmapRegion;

pub(crate) use node::{Buffer, Node};
pub(crate) use pair::{End, Pair};
pub(crate) use queues::{Completions, Events, Ring};

use crate::{PortConfig, PortRules, Rxe, RxeConfig, Uplink};
use pvrdma_ether_link::fault::{FaultLink, Faults};
use pvrdma_ether_link::{Clock, ManualClock};
use pvrdma_ether_link::{Link, memory};

/// First bus address of a node's memory.
const BASE: u64 = 0x1000_0000;
/// Bytes of a node's memory.
const MEMORY: u64 = 256 << 20;

pub(crate) const ALL: Access = Access::all();

thread_local! {
    static WIRE: Cell<Option<(Faults, u64)>> = const { Cell::new(None) };
}

/// Has every [`World`] that `test` makes consist of two backends, nodes of odd numbers on one and of even numbers on the
/// other, with nodes 1 and 2 connected by a cable with these faults.
pub(crate) fn on_the_wire(faults: Faults, seed: u64, test: impl FnOnce()) {
    WIRE.set(Some((faults, seed)));
    test();
    WIRE.set(None);
}

/// The Ethernet address of a node.
pub(crate) const fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number])
}

/// Bytes of an IP packet on the cable.
const CABLE_MTU: u32 = 4500;

/// One backend with a clock that tests move.
pub(crate) struct World {
    pub(crate) rxe: Rxe,
    pub(crate) clock: Arc<ManualClock>,
    /// The other end of the cable, if there is one.
    pub(crate) far: Option<Rxe>,
    /// Keep the cable plugged in.
    pub(crate) _uplinks: Vec<Uplink>,
}

impl World {
    /// Nothing runs by itself.
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut RxeConfig)) -> Self {
        let clock = Arc::new(ManualClock::default());
        let mut config = RxeConfig { workers: 0, clock: Arc::clone(&clock) as Arc<dyn Clock>, ..RxeConfig::default() };
        change(&mut config);
        let rxe = Rxe::new(config.clone()).unwrap();
        let Some((faults, seed)) = WIRE.get() else { return Self { rxe, clock, far: None, _uplinks: Vec::new() } };
        let far = Rxe::new(config).unwrap();
        let (near_end, far_end) = memory::pair(100_000).unwrap();
        let plug = |rxe: &Rxe, number, link, seed| {
            let uplink: Arc<dyn Link> = Arc::new(FaultLink::new(link, faults, seed));
            rxe.plug(mac(number), PortConfig { uplink, nic: None, mtu: CABLE_MTU, rules: PortRules::default() })
                .unwrap()
        };
        let uplinks = vec![plug(&rxe, 1, near_end, seed * 2), plug(&far, 2, far_end, seed * 2 + 1)];
        Self { rxe, clock, far: Some(far), _uplinks: uplinks }
    }

    /// Both backends, or the one that there is.
    fn backends(&self) -> Vec<Rxe> {
        [Some(self.rxe.clone()), self.far.clone()].into_iter().flatten().collect()
    }

    pub(crate) fn node(&self, number: u8) -> Node {
        let memory = DmaSpace::new(PinPolicy::Off);
        let mapping = Arc::new(MmapRegion::new(usize::try_from(MEMORY).unwrap()).unwrap());
        // Two ranges, so that copies meet a border.
        let half = MEMORY / 2;
        for part in [0, half] {
            let backing = Some(Backing { mapping: Arc::clone(&mapping), offset: usize::try_from(part).unwrap() });
            memory.map(DmaRange { iova: BASE + part, len: half, writable: true, backing }).unwrap();
        }
        self.node_on(number, memory)
    }

    pub(crate) fn node_on(&self, number: u8, memory: Arc<DmaSpace>) -> Node {
        let events = Arc::new(Events::default());
        let rxe = self.far.as_ref().filter(|_| number.is_multiple_of(2)).unwrap_or(&self.rxe);
        let hca = rxe
            .attach(DeviceContext {
                name: format!("node{number}"),
                mac: mac(number),
                roce: GidType::RoceV2,
                memory: Arc::clone(&memory),
                events: Arc::clone(&events) as Arc<dyn EventSink>,
            })
            .unwrap();
        hca.bind_gid(0, gid(number), GidType::RoceV2).unwrap();
        let pd = hca.create_pd().unwrap();
        Node {
            number,
            pd,
            hca,
            memory,
            events,
            wire: if self.far.is_some() { self.backends() } else { Vec::new() },
            next_page: AtomicU64::new(BASE + u64::from(number) * (16 << 20)),
            next_qpn: AtomicU32::new(0x100),
        }
    }

    /// Runs what is ready, then moves the clock to the next deadline, until nothing is left. Gives the time that passed.
    pub(crate) fn settle(&self) -> Duration {
        let start = self.clock.now();
        self.run();
        while self.step() {}
        self.clock.now() - start
    }

    /// Runs what is ready.
    pub(crate) fn run(&self) {
        run_all(&self.backends());
    }

    /// Moves the clock to the next deadline, if there is one, and runs what is ready then.
    pub(crate) fn step(&self) -> bool {
        let deadline = self.backends().iter().filter_map(Rxe::next_deadline).min();
        let Some(deadline) = deadline else { return false };
        self.clock.advance(deadline.saturating_sub(self.clock.now()));
        self.run();
        true
    }
}

/// Runs all backends until none has anything to do now.
fn run_all(backends: &[Rxe]) {
    while backends.iter().map(Rxe::run_ready).sum::<usize>() > 0 {}
}

/// `::ffff:10.0.0.number`
pub(crate) fn gid(number: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, number])
}

pub(crate) const SEND: SendOp = SendOp::Send { data: SendData::None, to: None };

pub(crate) const fn write(remote: RemoteAddress) -> SendOp {
    SendOp::Write { remote, immediate: None }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}
