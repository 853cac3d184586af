//! Memory that a guest costs this process, counted by the allocator. This test runs alone in its process.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, gid, rxe_member};
use parking_lot::Mutex;
use pvrdma_dev::{
    KeptStatus, Limits,
    testing::{
        CommandError, Driver, GuestMemory, Mr, Path, Placement, Qp, QpInit, SendWr, TestDevice, access, send_flag,
    },
};
use pvrdma_guest_memory::PinPolicy;
use pvrdma_link::{
    Frames, Link, ManualClock,
    memory::{self, MemoryLink},
};
use pvrdma_packet::{Ethernet, MacAddr};
use pvrdma_roce::wire::{Bth, Extension, Header, Ipv4, Network, Opcode, Position, Reth, Udp, build};
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::testing::CountingAllocator;
use pvrdma_verbs_types::{Psn, Qpn, Sge};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator::new();

/// Value of ERR if a command exceeds the memory limit.
const ENOMEM: u32 = 12;

/// Serializes the tests, because all of them measure the same heap.
static ALONE: Mutex<()> = Mutex::new(());

/// Objects of a kind.
const COUNT: usize = 2_000;

/// Returns the heap bytes for each of [`COUNT`] objects that `make` creates, excluding the returned values.
fn bytes_each<T>(make: impl FnMut(usize) -> T) -> usize {
    let before = HEAP.bytes();
    let made: Vec<T> = (0..COUNT).map(make).collect();
    drop(made);
    (HEAP.bytes() - before) / COUNT
}

/// Bounds the heap size of objects of which a guest may have tens of thousands. The reason for a larger bound stands
/// beside it.
#[test]
fn objects_stay_small() {
    let _alone = ALONE.lock();
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let (_test, driver) = rxe_member(&backend, 1, GuestMemory::new(128 << 20));
    let process = Process::new(&driver, true, 1024);
    let buffer = driver.buffer(16 << 10, 0, Placement::Contiguous);
    let rc = QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&process.pd, &process.cq) };
    let [qp, mr, cq] = [
        // Rings of three scattered pages. Tables double in size, so up to half of them is unused.
        bytes_each(|_| driver.create_qp(&rc).unwrap()),
        bytes_each(|_| driver.reg_mr(&process.pd, &buffer, access::ALL).unwrap()),
        bytes_each(|_| driver.create_cq(None, 16).unwrap()),
    ];
    println!("bytes of a QP {qp}, of an MR {mr}, of a CQ {cq}");
    // Parts of a QP that are less obvious: its share of the workers' time and the two numbers of its connection (32
    // bytes), the watching of its rings if its doorbell page is memory (32), flags between threads (16), flow counts by
    // route and its last events (32), its source GID instead of an index (16), and the number of pauses at its last run
    // (16).
    assert!(qp <= 1488 && mr <= 224 && cq <= 384, "bytes of a QP {qp}, of an MR {mr}, of a CQ {cq}");
}

/// A device on a cable whose far end is the test, and the kernel of its guest.
struct Exposed {
    rxe: Rxe,
    device: TestDevice<Rxe>,
    driver: Driver,
    kernel: Process,
    cable: MemoryLink,
    _station: RxeStation,
}

impl Exposed {
    /// Creates a device that may use this many bytes. The cable holds so few frames that responses stay owed.
    fn new(max_memory: u64) -> Self {
        let config = RxeConfig::default().with_workers(0).with_clock(Arc::new(ManualClock::default()));
        let rxe = Rxe::new(config).unwrap();
        let (ours, cable) = memory::pair(2).unwrap();
        let uplink = PortConfig::new(Arc::new(ours), 4500).with_rules(PortRules::default().with_alone(true));
        let station = rxe.station(TestDevice::<Rxe>::mac(1));
        station.plug(uplink).unwrap();
        let config = TestDevice::<Rxe>::config(1).with_limits(Limits::default().with_max_memory(max_memory));
        let device = TestDevice::new(&rxe, config, GuestMemory::new(512 << 20));
        let driver = device.driver();
        driver.bind_gid(0, gid(1)).unwrap();
        let kernel = Process::new(&driver, false, 65_536);
        Self { rxe, device, driver, kernel, cable, _station: station }
    }

    fn kept(&self) -> KeptStatus {
        self.device.device.status().kept
    }

    /// Creates a QP with deep queues that is connected to the test. Returns `None` if the device may not have another
    /// one.
    fn qp(&self) -> Option<Qp> {
        let mut qp = self.idle_qp()?;
        qp.connect(&Self::path(4)).unwrap();
        Some(qp)
    }

    /// The same before it is connected.
    fn idle_qp(&self) -> Option<Qp> {
        let Process { pd, cq, .. } = &self.kernel;
        let init = QpInit { max_send_wr: 256, max_send_sge: 16, max_recv_wr: 1, ..QpInit::rc(pd, cq) };
        self.driver.create_qp(&init).ok()
    }

    /// Returns a path to the test, with this many READs and atomics outstanding in each direction.
    fn path(reads: u8) -> Path {
        let path = Path { mtu: 5, access: access::ALL, timeout: 0, dmac: [2; 6], ..Path::to(gid(2), 0x77) };
        Path { max_rd_atomic: reads, max_dest_rd_atomic: reads, ..path }
    }

    /// Posts requests whose packets get no answer.
    fn post(&self, qp: &mut Qp, first: SendWr, others: SendWr) {
        qp.post_send(&[&[first][..], &vec![others; 255]].concat()).unwrap();
        self.rxe.run_ready();
        self.cable.receive(&mut Frames::default(), usize::MAX);
        self.rxe.run_ready();
    }

    /// Sends a packet that the peer of a QP may send.
    fn packet(&self, qp: &Qp, opcode: Opcode, number: u32, remote: &Mr, at: u64, payload: &[u8]) {
        let network = Ipv4 {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, 2],
            destination: [10, 0, 0, 1],
        };
        let length = if payload.is_empty() { 1 << 20 } else { u32::try_from(payload.len()).unwrap() };
        let header = Header {
            ethernet: Ethernet { destination: TestDevice::<Rxe>::mac(1), source: MacAddr([2; 6]), vlan: None },
            network: Network::V2Ipv4(network, Udp { source_port: 0xc001, checksum: 0 }),
            bth: Bth::new(opcode, Qpn::new(qp.qpn), Psn::new(0x1234 + number)),
            extension: Extension::Reth(Reth { address: at, rkey: remote.rkey, length }),
        };
        let mut frames = Frames::default();
        frames.push(&build(&header, payload).unwrap());
        assert_eq!(self.cable.send(&frames, 0), 1);
        self.rxe.run_ready();
    }

    /// The peer sends packets after one that was lost, so they have to wait for it.
    fn send_behind_a_gap(&self, qp: &Qp, remote: &Mr, at: u64, payload: &[u8]) {
        (1..129).for_each(|number| self.packet(qp, Opcode::write(Position::Only), number, remote, at, payload));
    }

    /// The peer requests much data and does not take it. Packets that it sends after that have to wait.
    fn send_waiting_packets(&self, qp: &Qp, remote: &Mr, at: u64, payload: &[u8]) {
        self.packet(qp, Opcode::READ_REQUEST, 0, remote, at, &[]);
        for number in 0..128 {
            self.packet(qp, Opcode::write(Position::Only), (1 << 20) / 4096 + number, remote, at, payload);
        }
    }
}

/// A buffer that the peer may access, large enough for a READ of 1 MiB.
fn target(exposed: &Exposed) -> (Mr, u64) {
    let buffer = exposed.driver.buffer(1 << 20, 0, Placement::Contiguous);
    let mr = exposed.driver.reg_mr(&exposed.kernel.pd, &buffer, access::ALL).unwrap();
    (mr, buffer.va())
}

/// Packets that wait behind a READ are bounded in bytes, not by number: 128 long ones would be 7.3 MiB for each QP.
#[test]
fn packets_that_wait_behind_a_read_fit_the_path_mtu() {
    let _alone = ALONE.lock();
    let exposed = Exposed::new(256 << 20);
    let ((mr, at), qps) = (target(&exposed), [(); 8].map(|()| exposed.qp().unwrap()));
    let payload = vec![7; 60_000];
    let [first, others @ ..] = &qps;
    // The first QP makes the port allocate its buffers.
    exposed.send_waiting_packets(first, &mr, at, &payload);
    let before = HEAP.bytes();
    others.iter().for_each(|qp| exposed.send_waiting_packets(qp, &mr, at, &payload));
    let each = HEAP.bytes().saturating_sub(before) / others.len();
    assert!(each < 16 << 10, "{each} bytes for each QP");
    assert_eq!(exposed.kept().packets_bytes, 0);
}

/// Waiting packets are bounded for the device, not for each QP: 10,000 connections would keep 5 GiB.
#[test]
fn waiting_packets_share_one_budget() {
    let _alone = ALONE.lock();
    let exposed = Exposed::new(32 << 20);
    let ((mr, at), qps) = (target(&exposed), [(); 24].map(|()| exposed.qp().unwrap()));
    let payload = vec![7; 4096];
    // The first QP makes the port allocate its buffers.
    exposed.send_waiting_packets(&qps[0], &mr, at, &payload);
    let before = (HEAP.bytes(), exposed.kept().packets_bytes);
    for (number, qp) in qps.iter().enumerate().skip(1) {
        if number % 2 == 0 {
            exposed.send_waiting_packets(qp, &mr, at, &payload);
        } else {
            exposed.send_behind_a_gap(qp, &mr, at, &payload);
        }
    }
    let (grown, kept) = ((HEAP.bytes() - before.0) as u64, exposed.kept());
    // A quarter of the 32 MiB is for packets of peers. The wire state of the 24 QPs was charged when they were created.
    assert!((7 << 20..=8 << 20).contains(&kept.packets_bytes), "{kept:?}");
    assert!(grown <= kept.packets_bytes - before.1 + (24 << 13), "{grown} {kept:?}");
    let counter = |name| exposed.device.device.status().adapter.iter().find(|count| count.name == name).unwrap().value;
    assert!(counter("wire_dropped_deferred") > 0 && counter("wire_dropped_ahead") > 0);
    qps.into_iter().for_each(|qp| qp.destroy().unwrap());
    assert_eq!(exposed.kept().packets_bytes, 0);
}

/// Posts fast registrations that wait behind a fence, each with a list of 128 pages in as many pieces.
fn post_lists(exposed: &Exposed, qp: &mut Qp, directory: u64) {
    let read = SendWr::read(1, &[], 0, 0);
    let list = SendWr::fast_register(2, 0, 0, directory, 128, 128 << 12, 0).flags(send_flag::FENCE);
    exposed.post(qp, read, list);
}

/// Page lists of waiting requests are charged: copies for 128 requests ahead would be 320 KiB for each QP.
#[test]
fn waiting_page_lists_are_bounded_and_charged() {
    let _alone = ALONE.lock();
    let exposed = Exposed::new(256 << 20);
    let mut qps = [(); 32].map(|()| exposed.qp().unwrap());
    let region = exposed.driver.fast_mr(&exposed.kernel.pd, 128).unwrap();
    let directory = region.set_pages(&exposed.device.memory.alloc(128, Placement::Scattered));
    let before = HEAP.bytes();
    qps.iter_mut().for_each(|qp| post_lists(&exposed, qp, directory));
    let (each, kept) = ((HEAP.bytes() - before) / qps.len(), exposed.kept());
    assert!(each < 40 << 10, "{each} bytes for each QP");
    assert!(kept.requests_bytes > 0 && (before..).contains(&HEAP.bytes()), "{kept:?}");
}

/// The state of outstanding READs is charged for the number that the guest requested: 128 instead of 16 are 35 KiB more
/// for each QP.
#[test]
fn waiting_reads_are_charged() {
    let _alone = ALONE.lock();
    let exposed = Exposed::new(256 << 20);
    let (mr, at) = target(&exposed);
    // Returns the heap and the charge of a QP with this many READs outstanding in each direction.
    let cost = |reads: u8| {
        let (heap, kept) = (HEAP.bytes(), exposed.kept().used_bytes);
        let qps: Vec<_> = (0..8)
            .map(|_| {
                let mut qp = exposed.idle_qp().unwrap();
                qp.connect(&Exposed::path(reads)).unwrap();
                let read = SendWr::read(1, &[], 0, 0);
                exposed.post(&mut qp, read.clone(), read);
                (0..u32::from(reads)).for_each(|number| {
                    exposed.packet(&qp, Opcode::READ_REQUEST, number * ((1 << 20) / 4096), &mr, at, &[]);
                });
                qp
            })
            .collect();
        let cost = [(HEAP.bytes() - heap) as u64 / 8, (exposed.kept().used_bytes - kept) / 8];
        qps.into_iter().for_each(|qp| qp.destroy().unwrap());
        assert_eq!(exposed.kept().used_bytes, kept);
        cost
    };
    // The first QP makes tables and the port allocate their room.
    cost(16);
    let ([few_heap, few_kept], [many_heap, many_kept]) = (cost(16), cost(128));
    let (heap, kept) = (many_heap.saturating_sub(few_heap), many_kept - few_kept);
    println!("bytes of a QP with 112 READs more in either direction: {heap} of the heap, {kept} charged");
    assert!(few_heap <= few_kept, "{few_heap} bytes, {few_kept} charged");
    assert!((5 << 10..=kept).contains(&heap), "{heap} bytes, {kept} charged");
}

/// If the READs exceed the limit, the QP stays as it was. RESET returns everything that it held.
#[test]
fn reads_beyond_the_limit_are_refused() {
    let _alone = ALONE.lock();
    let exposed = Exposed::new(32 << 20);
    let idle = exposed.kept().used_bytes;
    let mut qps: Vec<_> = std::iter::from_fn(|| {
        let room = exposed.kept().used_bytes + (64 << 10) < 32 << 20;
        room.then(|| exposed.idle_qp())?
    })
    .collect();
    let before = exposed.kept().used_bytes;
    let refused = qps.iter_mut().map(|qp| qp.connect(&Exposed::path(128))).find_map(Result::err);
    assert_eq!(refused, Some(CommandError::Failed(12)), "ENOMEM");
    assert!(exposed.kept().refused > 0 && exposed.kept().used_bytes > before);
    // Sixteen are paid for.
    qps.last_mut().unwrap().connect(&Exposed::path(16)).unwrap();
    qps.into_iter().for_each(|qp| qp.destroy().unwrap());
    assert_eq!(exposed.kept().used_bytes, idle);
}

/// The record of locked memory is charged: with `pin=registered` it can reach some 50 MiB.
#[test]
fn the_record_of_pins_is_smaller_than_its_charge() {
    let _alone = ALONE.lock();
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let memory = GuestMemory::with_policy(256 << 20, PinPolicy::Registered);
    let config = TestDevice::<Rxe>::config(1);
    let config = config.with_limits(Limits::default().with_max_memory(24 << 20));
    let device = TestDevice::new(&backend, config, memory);
    let driver = device.driver();
    let process = Process::new(&driver, true, 1024);
    // Each page has a gap behind it, and each registration falls between two pages of the one before, which gives the
    // largest number of segments.
    let pages = device.memory.alloc(16_384, Placement::Scattered);
    let kept = || device.device.status().kept;
    let (heap, before) = (HEAP.bytes(), kept());
    let mut regions = Vec::new();
    let refused = loop {
        let first = regions.len() * 128 % (pages.len() - 512);
        let part = &pages[first..first + 512];
        match driver.reg_mr_pages(&process.pd, 0, 512 << 12, part, access::ALL) {
            Ok(mr) => regions.push(mr),
            Err(error) => break error,
        }
    };
    let (grown, after) = ((HEAP.bytes() - heap) as u64, kept());
    println!("{} regions of 512 pieces: heap {grown}, {after:?}", regions.len());
    assert!(matches!(refused, CommandError::Refused(_)) && after.refused > 0, "{refused:?}");
    assert!(after.pins_bytes > after.objects_bytes - before.objects_bytes, "{after:?}");
    assert!(grown <= after.used_bytes - before.used_bytes, "{grown} bytes, {after:?}");
    device.function().reset();
    assert_eq!(kept().pins_bytes, 0);
}

/// Allocates everything that the table of memory limits names until it is refused. The heap grows by less than the
/// device's limit, and everything is returned in the end.
#[test]
fn the_worst_legal_guest_and_peer_stay_below_the_limit() {
    const LIMIT: u64 = 48 << 20;
    let _alone = ALONE.lock();
    let exposed = Exposed::new(LIMIT);
    let idle = (HEAP.bytes(), exposed.kept().used_bytes);
    let (mr, at) = target(&exposed);
    let region = exposed.driver.fast_mr(&exposed.kernel.pd, 128).unwrap();
    let directory = region.set_pages(&exposed.device.memory.alloc(128, Placement::Scattered));
    let payload = vec![7; 4096];
    // QPs for a third of the limit, half of them with the largest requests and half with page lists.
    let mut qps: Vec<Qp> =
        std::iter::from_fn(|| (exposed.kept().used_bytes < LIMIT / 3).then(|| exposed.qp())?).collect();
    let sges = vec![Sge { addr: 0, length: 1, lkey: 0 }; 16];
    for (number, qp) in qps.iter_mut().enumerate() {
        if number % 2 == 0 {
            post_lists(&exposed, qp, directory);
        } else {
            let wait = SendWr::write(2, &sges, 0, 0).flags(send_flag::FENCE);
            exposed.post(qp, SendWr::read(1, &[], 0, 0), wait);
        }
    }
    for (number, qp) in qps.iter().enumerate() {
        if number % 2 == 0 {
            exposed.send_behind_a_gap(qp, &mr, at, &payload);
        } else {
            exposed.send_waiting_packets(qp, &mr, at, &payload);
        }
        if exposed.kept().refused > 0 || number > 40 {
            break;
        }
    }
    // Then completion queues and scattered regions, until neither can be created.
    let pages = exposed.device.memory.alloc(4096, Placement::Scattered);
    let mut made = 0;
    while exposed.driver.reg_mr_pages(&exposed.kernel.pd, 0, 4096 << 12, &pages, access::ALL).is_ok() {
        made += 1;
    }
    while exposed.driver.create_cq(None, 16).is_ok() {
        made += 1;
    }
    assert_eq!(exposed.driver.create_cq(None, 16).unwrap_err(), CommandError::Refused(ENOMEM));
    let (kept, counted) = (exposed.kept(), HEAP.bytes() - idle.0);
    println!("{} QPs, {made} other objects; heap {counted}, {kept:?}", qps.len());
    assert!(kept.used_bytes <= LIMIT && kept.refused > 0 && kept.packets_bytes > 0 && kept.requests_bytes > 0);
    assert!(counted as u64 <= LIMIT, "{counted} bytes, {kept:?}");
    // The memory in use is a large part of the limit, so the limit was not reached by overcharging.
    assert!(counted as u64 > LIMIT / 3, "{counted} bytes, {kept:?}");
    exposed.device.function().reset();
    assert!(exposed.kept().used_bytes <= idle.1, "{:?}", exposed.kept());
}
