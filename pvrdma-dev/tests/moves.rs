//! Guests that move between software adapters in the middle of their work: every byte arrives, every completion comes
//! once and in order.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Process, gid};
use pvrdma_dev::{
    DeviceConfig, ObjectKind,
    testing::{
        Buffer, Driver, FastMr, GuestMemory, MEMORY_BASE, MappedPages, MovingFunction, Mr, Path, Placement, Qp, QpInit,
        RecvWr, SendWr, Srq, TestDevice, access, status, wc_flag,
    },
};
use pvrdma_guest_memory::{DmaSpace, MemoryBudget};
use pvrdma_link::{
    Clock, Frames, Link, LinkInspect, ManualClock, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_pci_function::{Migratable, PciFunction};
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig, RxeStation};
use pvrdma_saved_state::{
    Message, Reader, Record, pvrdma as saved, roce, rxe,
    work::{self, Operation},
};
use pvrdma_verbs_types::Sge;
use serde_json::Value;

/// Bytes of a slot: each request has one at either end.
const SLOT: usize = 12 << 10;
/// Requests in each direction.
const REQUESTS: usize = 40;
/// Offset of the slots that the peer uses.
const PEERS: usize = REQUESTS * SLOT;
/// Offset of the number that the peer adds to.
const COUNTER: usize = 2 * PEERS;

/// A xorshift generator: the same steps in every run.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % limit
    }
}

/// An end of a cable that an adapter has until its device moves on.
#[derive(Debug)]
struct Plugged {
    cable: Arc<MemoryLink>,
    cut: Arc<AtomicBool>,
}

impl Link for Plugged {
    fn receive(&self, frames: &mut Frames, most: usize) {
        if !self.cut.load(Ordering::SeqCst) {
            self.cable.receive(frames, most);
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        if self.cut.load(Ordering::SeqCst) { frames.len() - from } else { self.cable.send(frames, from) }
    }

    fn readiness(&self) -> Readiness {
        self.cable.readiness()
    }

    fn lost(&self) -> u64 {
        self.cable.lost()
    }

    fn inspect(&self) -> LinkInspect {
        self.cable.inspect()
    }
}

/// An adapter at the end of a cable.
struct Adapter {
    rxe: Rxe,
    cut: Arc<AtomicBool>,
    _station: Option<RxeStation>,
}

impl Adapter {
    fn new(clock: &Arc<ManualClock>, host: u8, cable: Option<&Arc<MemoryLink>>) -> Self {
        let clock = Arc::<ManualClock>::clone(clock) as Arc<dyn Clock>;
        // The second host does a little at a time, so that it is often in the middle of a message.
        let default = RxeConfig::default();
        let (worker_bytes, worker_requests) = match host {
            2 => (3000, 1),
            _ => (default.worker_bytes, default.worker_requests),
        };
        let (inline_bytes, inline_requests) = (worker_bytes, worker_requests);
        let limits = default
            .with_worker_bytes(worker_bytes)
            .with_worker_requests(worker_requests)
            .with_inline_bytes(inline_bytes)
            .with_inline_requests(inline_requests);
        let rxe = Rxe::new(limits.with_workers(0).with_clock(clock)).unwrap();
        Self::plug(rxe, host, cable)
    }

    /// Connects the port of a guest with its end of the cable.
    fn plug(rxe: Rxe, host: u8, cable: Option<&Arc<MemoryLink>>) -> Self {
        let cut = Arc::new(AtomicBool::new(false));
        let station = cable.map(|cable| {
            let uplink = Arc::new(Plugged { cable: Arc::clone(cable), cut: Arc::clone(&cut) });
            let station = rxe.station(TestDevice::<Rxe>::mac(host));
            station.plug(PortConfig::new(uplink, 4500)).unwrap();
            station
        });
        Self { rxe, cut, _station: station }
    }
}

/// Returns the records of a stream, without its header, which has the time.
fn records(stream: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut input = stream;
    let mut reader = Reader::new(&mut input, u64::MAX).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.next().unwrap() {
        records.push((record.kind, record.body.to_vec()));
    }
    records
}

/// Names the operations that are in progress in a saved state.
fn in_progress(stream: &[u8]) -> Vec<&'static str> {
    let (mut part, mut found) = (Vec::new(), Vec::new());
    let mut note = |holds: bool, what| found.extend(holds.then_some(what));
    for (kind, body) in records(stream) {
        match kind {
            saved::AdapterPart::KIND => part.extend(saved::AdapterPart::decode(&*body).unwrap().bytes),
            saved::Cq::KIND => note(saved::Cq::decode(&*body).unwrap().armed != 0, "armed queue"),
            saved::Qp::KIND => queue_pair(&rxe::QueuePair::decode(&*std::mem::take(&mut part)).unwrap(), &mut note),
            _ => part.clear(),
        }
    }
    found
}

fn queue_pair(qp: &rxe::QueuePair, note: &mut impl FnMut(bool, &'static str)) {
    let (requester, responder) = (qp.requester.as_ref().unwrap(), qp.responder.as_ref().unwrap());
    note(requester.current.is_some(), "local request");
    note(responder.receive.is_some(), "receive in use");
    let registers = |work: Option<&work::SendWr>| {
        work.is_some_and(|work| matches!(work.operation, Some(Operation::FastRegister(_))))
    };
    if let Some(rxe::Route::Wire(wire)) = &requester.route {
        let transport = wire.transport.as_ref().unwrap();
        note(transport.sent > 0, "unacknowledged packets");
        note(transport.rnr_wait > 0, "RNR wait");
        let begun = |request: &roce::Request| request.stage() != roce::Stage::Posted;
        note(transport.requests.iter().any(|request| !begun(request)), "request not begun");
        let registration = |request: &roce::Request| !begun(request) && registers(request.work.as_ref());
        note(transport.requests.iter().any(registration), "pending registration");
    }
    if let Some(transport) = responder.wire.as_ref().and_then(|wire| wire.transport.as_ref()) {
        note(transport.message.is_some(), "half a message");
        note(!transport.responses.is_empty(), "response owed");
        let is_atomic = |resource: &roce::Resource| matches!(resource.executed, Some(roce::Executed::Atomic(_)));
        note(transport.resources.iter().any(is_atomic), "repeatable atomic");
    }
}

/// Describes the objects of a device, without the adapter's part, of which the saved state tells more.
fn shown(test: &TestDevice<Rxe>) -> Vec<Value> {
    let kinds = ObjectKind::ALL.into_iter().filter(|&kind| kind != ObjectKind::Device);
    let mut shown: Vec<_> = kinds.map(|kind| test.device.inspect_objects(kind)).collect();
    for object in shown.iter_mut().filter_map(Value::as_array_mut).flatten().filter_map(Value::as_object_mut) {
        object.remove("adapter");
        // Pages that are memory belong to the VMM, and inferring is not saved.
        object.remove("doorbells");
        if object.get("state").is_some_and(|state| ["inferred", "armed", "not armed"].iter().any(|word| state == word))
        {
            object.remove("state");
        }
        // The path of a connection is looked up again.
        if let Some(progress) = object.get_mut("progress").and_then(Value::as_object_mut) {
            progress.remove("path");
        }
    }
    shown
}

/// Keeps the first state with this in progress if the environment names a folder for it: the corpus of `kept_states`.
fn keep(what: &str, host: u8, saved: &[u8]) {
    let Some(folder) = std::env::var_os("KEEP_STATES").filter(|_| host == 1) else { return };
    let path = std::path::Path::new(&folder).join(format!("{}.state", what.replace(' ', "-")));
    if !path.exists() {
        std::fs::write(path, saved).unwrap();
    }
}

/// One guest: its device, its objects, and the completions that it waits for.
struct Side {
    host: u8,
    adapter: Adapter,
    cable: Option<Arc<MemoryLink>>,
    /// Memory as the device sees it.
    space: Arc<DmaSpace>,
    test: TestDevice<Rxe>,
    function: Arc<MovingFunction>,
    /// Its doorbell pages, if they are memory.
    pages: Option<Arc<MappedPages>>,
    process: Process,
    qp: Qp,
    srq: Option<Srq>,
    buffer: Buffer,
    mr: Mr,
    /// Identifiers of the send requests that are to complete, in order.
    sends: VecDeque<u64>,
    /// Receives that the peer's requests need and that are not posted yet.
    to_post: VecDeque<(u64, usize, usize)>,
    /// Receives that are to complete, in order: identifier, bytes, and whether there is immediate data.
    receives: VecDeque<(u64, usize, bool)>,
    /// Number of requests so far, and sum of the numbers added to the peer's counter.
    requests: usize,
    added: u64,
    /// Expected content of the memory in the end: offset and bytes.
    expected: Vec<(usize, Vec<u8>)>,
    /// Regions for one fast registration each, if the guest's kernel has the QP.
    fast: Vec<FastMr>,
    /// Number of times that something was in progress when the device was saved.
    counts: BTreeMap<&'static str, u32>,
}

impl Side {
    /// `user`: the objects belong to a process. `shared`: the QP has a shared receive queue; without it, the process's
    /// doorbell page is memory.
    fn new(adapter: Adapter, host: u8, cable: Option<Arc<MemoryLink>>, (user, shared): (bool, bool)) -> Self {
        let memory = GuestMemory::new(16 << 20);
        let test = TestDevice::of_host(host, &adapter.rxe, TestDevice::<Rxe>::config(host), memory);
        let pages = (user && !shared).then(|| MappedPages::new(&test.device));
        let function = MovingFunction::new(pages.clone().map_or_else(|| test.function(), |pages| pages as _));
        let moving: Arc<dyn PciFunction> = Arc::<MovingFunction>::clone(&function);
        let driver = Driver::probe(moving, &test.memory, &test.irqs).unwrap();
        driver.bind_gid(0, gid(host)).unwrap();
        let process = Process::new(&driver, user, 256);
        let srq = shared.then(|| driver.create_srq(&process.pd, 64, 2, 0).unwrap());
        let qp = driver.create_qp(&QpInit { srq: srq.as_ref(), ..QpInit::rc(&process.pd, &process.cq) }).unwrap();
        let fast = (0..if user { 0 } else { 12 }).map(|_| driver.fast_mr(&process.pd, 4).unwrap()).collect();
        let buffer = driver.buffer(COUNTER + 8, 0, Placement::Scattered);
        let mr = driver.reg_mr(&process.pd, &buffer, access::ALL).unwrap();
        Self {
            host,
            adapter,
            cable,
            space: Arc::clone(test.memory.space()),
            test,
            function,
            pages,
            process,
            qp,
            srq,
            buffer,
            mr,
            sends: VecDeque::new(),
            to_post: VecDeque::new(),
            receives: VecDeque::new(),
            requests: 0,
            added: 0,
            expected: Vec::new(),
            fast,
            counts: BTreeMap::new(),
        }
    }

    fn connect(&mut self, peer: u8, qpn: u32) {
        // A device that has moved holds its packets until it has probed for its address. The retries last longer.
        let path = Path { dmac: [0x52, 0x54, 0, 0, 0, peer], timeout: 20, ..Path::to(gid(peer), qpn) };
        self.qp.connect(&path).unwrap();
    }

    /// Pauses the device and returns its state.
    fn save(&mut self) -> Vec<u8> {
        let mut saved = Vec::new();
        assert!(self.test.device.pause());
        self.test.device.save(&mut saved).unwrap();
        if self.pages.as_ref().is_some_and(|pages| pages.faults() > 0) {
            *self.counts.entry("mapped doorbell").or_default() += 1;
        }
        for what in in_progress(&saved) {
            *self.counts.entry(what).or_default() += 1;
            keep(what, self.host, &saved);
        }
        saved
    }

    /// Returns the requests that register a slot and write it with the new key to this address of the peer.
    fn registration(&mut self, id: u64, slot: usize, length: usize, (addr, rkey): (u64, u32)) -> Vec<SendWr> {
        let Some(fast) = self.fast.pop() else { return Vec::new() };
        let (key, iova) = (fast.mr.rkey ^ 0x55, 0x7000_0000 + slot as u64);
        let pages: Vec<u64> = (0..SLOT).step_by(4096).map(|at| self.buffer.bus(slot + at)).collect();
        let directory = fast.set_pages(&pages);
        let register = SendWr::fast_register(id, key, iova, directory, 3, u32::try_from(SLOT).unwrap(), 1);
        let local = Sge { addr: iova, length: u32::try_from(length).unwrap(), lkey: key };
        let write = SendWr::write(id, &[local], addr, rkey);
        vec![register, write, SendWr::local_invalidate(id, key)]
    }

    /// Restores the state in a device on another adapter, which stays paused. The first device is gone.
    fn restore(&mut self, adapter: Adapter, saved: &[u8]) {
        let before = shown(&self.test);
        self.adapter.cut.store(true, Ordering::SeqCst);
        let config = TestDevice::<Rxe>::config(self.host);
        self.space = self.test.memory.another_space();
        let next = self.successor(&adapter, config);
        next.device.restore(&mut &saved[..]).unwrap();
        next.device.finish_restore().unwrap();
        assert_eq!(before, shown(&next));
        let mut again = Vec::new();
        next.device.save(&mut again).unwrap();
        assert!(records(saved) == records(&again), "the state changes on its way");
        self.replace_with(next);
        self.adapter = adapter;
    }

    /// Creates the device that takes the place of the current one.
    fn successor(&mut self, adapter: &Adapter, config: DeviceConfig) -> TestDevice<Rxe> {
        let next = self.test.successor(&adapter.rxe, config, Arc::clone(&self.space));
        self.pages = self.pages.take().map(|pages| MappedPages::following(&next.device, &pages));
        next
    }

    /// Puts another device in the place of the current one.
    fn replace_with(&mut self, next: TestDevice<Rxe>) {
        let pages = self.pages.clone();
        self.function.move_to(pages.map_or_else(|| next.function(), |pages| pages as _));
        self.test = next;
    }

    /// Continues on another adapter, without the local peers of the first one, as a VMM does it.
    fn move_alone(&mut self, adapter: Adapter, saved: &[u8], leaves: bool) {
        self.arrive_alone(adapter, saved, leaves);
        assert!(self.test.device.resume());
    }

    /// Same, but the device stays paused.
    fn arrive_alone(&mut self, adapter: Adapter, saved: &[u8], leaves: bool) {
        self.space = self.test.memory.another_space();
        let config = TestDevice::<Rxe>::config(self.host);
        let next = self.successor(&adapter, config);
        next.device.restore_alone(&mut &saved[..]).unwrap();
        next.device.finish_restore().unwrap();
        if leaves {
            self.test.device.leave();
        }
        PciFunction::reset(&*self.test.device);
        assert!(self.test.device.resume());
        self.replace_with(next);
        self.adapter = adapter;
    }

    /// Posts a receive that the peer needs.
    fn post_receive(&mut self) {
        let Some((id, at, len)) = self.to_post.pop_front() else { return };
        let sges = if len == 0 { vec![] } else { vec![self.buffer.sge(&self.mr, at, len)] };
        let receive = [RecvWr::new(id, &sges)];
        match &mut self.srq {
            Some(srq) => srq.post(&receive).unwrap(),
            None => self.qp.post_recv(&receive).unwrap(),
        }
    }

    /// Takes completions and compares them.
    fn poll(&mut self) {
        match &self.pages {
            Some(pages) if self.requests.is_multiple_of(3) => _ = pages.idle(),
            Some(pages) => _ = pages.pass(),
            None => {}
        }
        while let Some(cqe) = self.process.cq.poll() {
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            if cqe.opcode >= 128 {
                let (id, length, immediate) = self.receives.pop_front().expect("a receive that was not posted");
                let has_immediate = cqe.wc_flags & wc_flag::WITH_IMM != 0;
                assert_eq!((cqe.wr_id, cqe.byte_len as usize, has_immediate), (id, length, immediate), "{cqe:?}");
            } else {
                assert_eq!(Some(cqe.wr_id), self.sends.pop_front(), "{cqe:?}");
            }
        }
    }

    fn is_done(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty() && self.to_post.is_empty()
    }

    /// Compares all memory that requests have changed.
    fn check_memory(&self) {
        for (at, bytes) in &self.expected {
            assert!(self.buffer.read(*at, bytes.len()) == *bytes, "{} bytes at {at}", bytes.len());
        }
    }
}

/// Two guests with a connection.
struct Pair {
    clock: Arc<ManualClock>,
    sides: [Side; 2],
}

impl Pair {
    /// Creates the pair: at a cable, or in one process.
    fn new(wire: bool, shared: bool) -> Self {
        let clock = Arc::new(ManualClock::default());
        // A cable that is full soon makes responses wait.
        let frames = if shared { 100_000 } else { 3 };
        let cables = wire.then(|| memory::pair(frames).unwrap()).map(|(a, b)| [Arc::new(a), Arc::new(b)]);
        let first = Adapter::new(&clock, 1, cables.as_ref().map(|cables| &cables[0]));
        let second = match &cables {
            Some(cables) => Adapter::new(&clock, 2, Some(&cables[1])),
            None => Adapter { rxe: first.rxe.clone(), cut: Arc::default(), _station: None },
        };
        let cable = |index: usize| cables.as_ref().map(|cables| Arc::clone(&cables[index]));
        let mut a = Side::new(first, 1, cable(0), (true, shared));
        let mut b = Side::new(second, 2, cable(1), (false, false));
        a.connect(2, b.qp.qpn);
        b.connect(1, a.qp.qpn);
        let pair = Self { clock, sides: [a, b] };
        pair.claim();
        pair
    }

    /// Creates the pair in one process, from which the first guest will move: to the other end of the cable of the
    /// second one.
    fn neighbours(shared: bool) -> Self {
        let clock = Arc::new(ManualClock::default());
        let (near, far) = memory::pair(100_000).unwrap();
        let (near, far) = (Arc::new(near), Arc::new(far));
        let second = Adapter::new(&clock, 2, Some(&near));
        let first = Adapter { rxe: second.rxe.clone(), cut: Arc::default(), _station: None };
        let mut a = Side::new(first, 1, Some(far), (true, shared));
        let mut b = Side::new(second, 2, Some(near), (false, false));
        a.connect(2, b.qp.qpn);
        b.connect(1, a.qp.qpn);
        let pair = Self { clock, sides: [a, b] };
        pair.claim();
        pair
    }

    /// Moves a guest away from the process that both share.
    fn part(&mut self, side: usize) {
        let adapter = self.adapter(side);
        let side = &mut self.sides[side];
        side.space.start_dirty_log(&[(0, 1 << 32)], &MemoryBudget::new(1 << 20)).unwrap();
        let saved = side.save();
        side.adapter.cut.store(true, Ordering::SeqCst);
        side.move_alone(adapter, &saved, true);
        self.claim();
    }

    /// Lets the adapters find out that no host has the addresses of the guests, which they do after each bind.
    fn claim(&self) {
        let waits = |side: &Side| side.test.device.inspect().backend["waiting_gids"] != Value::Array(Vec::new());
        while self.sides.iter().any(waits) {
            if self.sides.iter().map(|side| side.adapter.rxe.run_some(64)).sum::<usize>() == 0 {
                let deadline = self.sides.iter().filter_map(|side| side.adapter.rxe.next_deadline()).min();
                self.clock.advance(deadline.unwrap().saturating_sub(self.clock.now()));
            }
        }
    }

    fn adapter(&self, side: usize) -> Adapter {
        let Side { host, cable, .. } = &self.sides[side];
        Adapter::new(&self.clock, *host, cable.as_ref())
    }

    /// Moves a guest to another adapter.
    fn move_one(&mut self, side: usize) {
        let saved = self.sides[side].save();
        let adapter = self.adapter(side);
        self.sides[side].restore(adapter, &saved);
        assert!(self.sides[side].test.device.resume());
        self.claim();
    }

    /// Moves the second guest to the adapter of the first one. The cable then connects the two ports of the adapter.
    fn come_together(&mut self) {
        let saved = self.sides[1].save();
        let rxe = self.sides[0].adapter.rxe.clone();
        let adapter = Adapter::plug(rxe, self.sides[1].host, self.sides[1].cable.as_ref());
        self.sides[1].restore(adapter, &saved);
        assert!(self.sides[1].test.device.resume());
        self.claim();
    }

    /// Moves both guests at the same moment, to the same adapter if they were on one.
    fn move_both(&mut self) {
        let saved = [0, 1].map(|side| self.sides[side].save());
        let first = self.adapter(0);
        let second = match self.sides[1].cable {
            Some(_) => self.adapter(1),
            None => Adapter { rxe: first.rxe.clone(), cut: Arc::default(), _station: None },
        };
        self.sides[0].restore(first, &saved[0]);
        self.sides[1].restore(second, &saved[1]);
        self.sides.iter().for_each(|side| assert!(side.test.device.resume()));
        self.claim();
    }

    /// Posts a random request from one side to the other.
    fn post(&mut self, from: usize, random: &mut Random) {
        let [a, b] = &mut self.sides;
        let (near, far) = if from == 0 { (a, b) } else { (b, a) };
        let index = near.requests;
        if index == REQUESTS {
            return;
        }
        near.requests += 1;
        let (id, receive_id) = (index as u64, 1000 + index as u64);
        let (own, remote) = (index * SLOT, PEERS + index * SLOT);
        let length = [0, 1, 100, 1024, 3000, SLOT][random.below(6)];
        let data = Buffer::pattern(id + 77 * u64::from(near.host), length);
        let sges = if length == 0 { vec![] } else { vec![near.buffer.sge(&near.mr, own, length)] };
        let (addr, rkey) = (far.buffer.va() + remote as u64, far.mr.rkey);
        let kind = random.below(7);
        if kind == 6 {
            near.buffer.write(own, &data);
            let requests = near.registration(id, own, length, (addr, rkey));
            near.sends.extend(requests.iter().map(|_| id));
            if !requests.is_empty() {
                far.expected.push((remote, data));
                near.qp.post_send(&requests).unwrap();
            }
            return;
        }
        let request = match kind {
            0 | 1 => {
                near.buffer.write(own, &data);
                far.expected.push((remote, data));
                let write = SendWr::write(id, &sges, addr, rkey);
                if kind == 1 { write.immediate([1, 2, 3, 4]) } else { write }
            }
            2 | 3 => {
                near.buffer.write(own, &data);
                far.expected.push((remote, data));
                let send = SendWr::send(id, &sges);
                if kind == 3 { send.immediate([4, 3, 2, 1]) } else { send }
            }
            4 => {
                far.buffer.write(remote, &data);
                near.expected.push((own, data));
                SendWr::read(id, &sges, addr, rkey)
            }
            _ => {
                let operand = id * id + 1;
                near.expected.push((own, near.added.to_le_bytes().to_vec()));
                near.added += operand;
                let result = near.buffer.sge(&near.mr, own, 8);
                SendWr::fetch_add(id, result, far.buffer.va() + COUNTER as u64, rkey, operand)
            }
        };
        if matches!(kind, 1..=3) {
            let room = if kind == 1 { 0 } else { length };
            far.to_post.push_back((receive_id, remote, room));
            far.receives.push_back((receive_id, length, kind != 2));
        }
        near.sends.push_back(id);
        near.qp.post_send(&[request]).unwrap();
    }

    /// Does one random step, which moves no guest.
    fn step(&mut self, random: &mut Random) {
        let side = random.below(2);
        match random.below(12) {
            0..=2 => self.post(side, random),
            3 | 4 => self.sides[side].post_receive(),
            5 => self.sides[side].poll(),
            6 => self.sides[side].process.cq.arm(),
            7..=10 => {
                self.sides[side].adapter.rxe.run_some(1);
            }
            _ => self.clock.advance(Duration::from_micros(random.below(3000) as u64)),
        }
    }

    /// Waits until all requests have completed, and compares the memory with the expected content.
    fn finish(&mut self) {
        for _ in 0..20_000 {
            for side in &mut self.sides {
                side.post_receive();
                side.poll();
            }
            if self.sides.iter().all(Side::is_done) {
                break;
            }
            if self.sides.iter().map(|side| side.adapter.rxe.run_some(64)).sum::<usize>() > 0 {
                continue;
            }
            let deadline = self.sides.iter().filter_map(|side| side.adapter.rxe.next_deadline()).min();
            if let Some(deadline) = deadline {
                self.clock.advance(deadline.saturating_sub(self.clock.now()));
            }
        }
        for side in &mut self.sides {
            side.poll();
            assert!(side.is_done(), "sends {:?}, receives {:?}", side.sends, side.receives);
            side.check_memory();
        }
        let [a, b] = &self.sides;
        for (near, far) in [(a, b), (b, a)] {
            assert_eq!(far.buffer.read(COUNTER, 8), near.added.to_le_bytes());
        }
    }
}

/// Runs a random script; before each step, a side moves if `moves` returns it, or both for 2. Adds the operations
/// that were in progress at the moves to `counts`.
fn run(
    seed: u64,
    wire: bool,
    counts: &mut BTreeMap<&'static str, u32>,
    mut moves: impl FnMut(usize, &mut Random) -> Option<usize>,
) {
    let mut random = Random::new(seed);
    let mut pair = Pair::new(wire, seed.is_multiple_of(2));
    for step in 0..60 {
        match moves(step, &mut random) {
            Some(2) => pair.move_both(),
            Some(side) => pair.move_one(side),
            None => {}
        }
        pair.step(&mut random);
    }
    pair.finish();
    for (what, count) in pair.sides.iter().flat_map(|side| &side.counts) {
        *counts.entry(what).or_default() += count;
    }
}

/// Two guests of one process have a connection, and one moves to another host in the middle of it, where both may move
/// on.
#[test]
fn a_local_connection_continues_on_the_network() {
    let mut counts = BTreeMap::<_, u32>::new();
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut pair = Pair::neighbours(seed.is_multiple_of(2));
        let at = random.below(50);
        for step in 0..60 {
            if step == at {
                pair.part(0);
            } else if step > at && random.below(6) == 0 {
                pair.move_one(random.below(2));
            }
            pair.step(&mut random);
        }
        pair.finish();
        for (what, count) in pair.sides.iter().flat_map(|side| &side.counts) {
            *counts.entry(*what).or_default() += count;
        }
    }
    assert!(counts.get("local request").is_some_and(|&count| count >= 30), "{counts:?}");
}

/// A device leaves its peer's process, and the peer's first packet on the network arrives before the device runs. The
/// peer sends it again at once, although its timer has not fired.
#[test]
fn a_packet_that_came_too_early_is_sent_again_at_once() {
    let mut pair = Pair::neighbours(false);
    let adapter = pair.adapter(0);
    let [moving, peer] = &mut pair.sides;
    let mut write = |id, (address, rkey)| {
        peer.qp.post_send(&[SendWr::write(id, &[peer.buffer.sge(&peer.mr, 0, 64)], address, rkey)]).unwrap();
        peer.sends.push_back(id);
    };
    let place = (moving.buffer.va(), moving.mr.rkey);
    write(1, place);
    while moving.adapter.rxe.run_some(64) > 0 {}
    moving.space.start_dirty_log(&[(0, 1 << 32)], &MemoryBudget::new(1 << 20)).unwrap();
    let saved = moving.save();
    moving.adapter.cut.store(true, Ordering::SeqCst);
    write(2, place);
    moving.arrive_alone(adapter, &saved, true);
    let run = |moving: &Side| while moving.adapter.rxe.run_some(64) + peer.adapter.rxe.run_some(64) > 0 {};
    run(moving);
    assert!(moving.test.device.resume());
    run(moving);
    peer.poll();
    assert!(peer.is_done());
}

/// Two guests of different hosts have a connection, and one moves to the host of the other in the middle of it, and
/// away again.
#[test]
fn a_connection_on_the_network_continues_in_one_process() {
    let mut counts = BTreeMap::<_, u32>::new();
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut pair = Pair::new(true, seed.is_multiple_of(2));
        let (together, apart) = (10 + random.below(40), 60 + random.below(40));
        for step in 0..110 {
            if step == together {
                pair.come_together();
            } else if step == apart {
                pair.part(1);
            }
            pair.step(&mut random);
        }
        pair.finish();
        for (what, count) in pair.sides.iter().flat_map(|side| &side.counts) {
            *counts.entry(*what).or_default() += count;
        }
    }
    assert!(counts.values().all(|&count| count > 0) && counts.len() > 3, "{counts:?}");
}

/// The first request of a connection is still on the cable when the device of the peer comes to the same process.
#[test]
fn a_first_request_continues_in_one_process() {
    let (mut pair, mut random) = (Pair::new(true, true), Random::new(1));
    while pair.sides[0].sends.is_empty() {
        pair.post(0, &mut random);
    }
    while pair.sides[0].adapter.rxe.run_some(64) > 0 {}
    pair.come_together();
    pair.finish();
}

/// A device that ends without leaving takes its requests in progress along. Those of its peer end with "retry
/// exceeded".
#[test]
#[should_panic(expected = "status: 12")]
fn a_device_that_does_not_leave_takes_its_connections_along() {
    let mut pair = Pair::neighbours(false);
    let mut random = Random::new(1);
    let adapter = pair.adapter(0);
    // The peer has a request in flight, which gives the connection its name.
    while pair.sides[1].sends.is_empty() {
        pair.post(1, &mut random);
    }
    let side = &mut pair.sides[0];
    side.test.memory.space().start_dirty_log(&[(0, 1 << 32)], &MemoryBudget::new(1 << 20)).unwrap();
    let saved = side.save();
    side.move_alone(adapter, &saved, false);
    pair.claim();
    pair.finish();
}

/// A snapshot restored alone: the peer has continued, so the connection ends, and its requests flush. Everything else
/// continues.
#[test]
fn connections_of_a_snapshot_end() {
    let mut pair = Pair::new(true, false);
    let peer = pair.sides[1].qp.qpn;
    let side = &mut pair.sides[0];
    let (adapter, buffer) = (Adapter::new(&pair.clock, 1, side.cable.as_ref()), side.buffer.sge(&side.mr, 0, 100));
    let (address, rkey) = (side.buffer.va(), side.mr.rkey);
    side.qp.post_recv(&[RecvWr::new(7, &[])]).unwrap();
    side.qp.post_send(&[SendWr::write(5, &[buffer], address, rkey)]).unwrap();
    side.process.cq.arm();
    let saved = side.save();
    side.adapter.cut.store(true, Ordering::SeqCst);
    side.move_alone(adapter, &saved, false);
    while side.adapter.rxe.run_some(64) > 0 {}
    let completions: Vec<_> =
        std::iter::from_fn(|| side.process.cq.poll()).map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(completions, [(5, status::WR_FLUSH), (7, status::WR_FLUSH)]);
    let status = side.test.device.status();
    let ended = status.counters.iter().find(|counter| counter.name == "connections_not_restored").unwrap();
    assert_eq!(ended.value, 1);
    // The program connects again.
    side.qp.to_reset().unwrap();
    side.connect(2, peer);
}

/// Returns the frame with which a machine announces the address of a host from the MAC address of that host.
fn announcement(host: u8) -> Frames {
    let (mac, ip) = ([0x52, 0x54, 0, 0, 0, host], [10, 0, 0, host]);
    let mut frame = [&[0xff; 6][..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac, &ip, &[0; 6], &ip].concat();
    frame.resize(60, 0);
    let mut frames = Frames::default();
    frames.push(&frame);
    frames
}

/// A device whose state was saved resumes although the machine that restored it runs, too: that machine has the
/// connections.
#[test]
fn connections_of_a_device_with_a_twin_end() {
    for (saved, twin) in [(false, true), (true, false), (true, true)] {
        let pair = Pair::new(true, false);
        let [side, peer] = &pair.sides;
        let device = &side.test.device;
        assert!(device.pause());
        if saved {
            device.save(&mut Vec::new()).unwrap();
        }
        if twin {
            peer.cable.as_ref().unwrap().send(&announcement(1), 0);
        }
        while side.adapter.rxe.run_some(64) > 0 {}
        Migratable::resume(device.as_ref()).unwrap();
        let ended = device.status().counters.into_iter().find(|counter| counter.name == "connections_not_restored");
        assert_eq!(ended.unwrap().value, u64::from(saved && twin), "{saved} {twin}");
        // It is not told again at the next pause.
        assert!(device.pause());
        Migratable::resume(device.as_ref()).unwrap();
    }
}

/// The log has all pages that a device or its peer writes while its adapter runs. The driver writes to its memory only
/// between these runs.
#[test]
fn every_written_page_is_logged() {
    const BYTES: usize = 16 << 20;
    let mut written = 0;
    for (seed, wire) in (0..4).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut random = Random::new(seed);
        let mut pair = Pair::new(wire, seed.is_multiple_of(2));
        let memories = pair.sides.each_ref().map(|side| Arc::clone(&side.test.memory));
        for memory in &memories {
            memory.space().start_dirty_log(&[(MEMORY_BASE, BYTES as u64)], &MemoryBudget::new(1 << 20)).unwrap();
        }
        for _ in 0..10 {
            (0..6).for_each(|_| pair.step(&mut random));
            let before = memories.each_ref().map(|memory| memory.read_vec(MEMORY_BASE, BYTES));
            for memory in &memories {
                memory.space().report_dirty(MEMORY_BASE, BYTES as u64, 4096).unwrap();
            }
            pair.sides.iter().for_each(|side| _ = side.adapter.rxe.run_some(4));
            for (memory, before) in memories.iter().zip(&before) {
                let bits = memory.space().report_dirty(MEMORY_BASE, BYTES as u64, 4096).unwrap();
                let after = memory.read_vec(MEMORY_BASE, BYTES);
                for (page, (old, new)) in before.chunks(4096).zip(after.chunks(4096)).enumerate() {
                    if old != new {
                        written += 1;
                        assert!(bits[page / 64] >> (page % 64) & 1 != 0, "page {page} of seed {seed}");
                    }
                }
            }
        }
    }
    assert!(written > 50, "{written}");
}

/// Returns the number of random scripts.
fn seeds() -> u64 {
    std::env::var("SAVED_SEEDS").map_or(500, |seeds| seeds.parse().unwrap())
}

/// Checks that everything of a list was in progress often.
fn assert_often(counts: &BTreeMap<&'static str, u32>, all: &[&str]) {
    assert!(all.iter().all(|&what| counts.get(what).is_some_and(|&count| count >= 100)), "{counts:?}");
}

/// An idle connection moves, and works afterwards.
#[test]
fn an_idle_connection_moves() {
    for side in 0..3 {
        run(1, true, &mut BTreeMap::new(), |step, _| (step == 0).then_some(side));
    }
}

#[test]
fn scripts_at_a_cable() {
    let mut counts = BTreeMap::new();
    for seed in 0..seeds() {
        run(seed, true, &mut counts, |_, random| (random.below(4) == 0).then(|| random.below(3)));
    }
    let all = [
        "armed queue",
        "half a message",
        "mapped doorbell",
        "pending registration",
        "receive in use",
        "repeatable atomic",
        "request not begun",
        "response owed",
        "RNR wait",
        "unacknowledged packets",
    ];
    assert_often(&counts, &all);
}

/// Each step of a few scripts is the one before which a guest moves.
#[test]
fn a_move_at_each_step() {
    for seed in 0..2 {
        for at in 0..60 {
            run(seed, true, &mut BTreeMap::new(), |step, _| (step == at).then_some(at % 3));
        }
    }
}

/// Guests of one process move together, and stay local.
#[test]
fn scripts_in_one_process() {
    let mut counts = BTreeMap::new();
    for seed in 0..200 {
        run(seed, false, &mut counts, |_, random| (random.below(4) == 0).then_some(2));
    }
    assert_often(&counts, &["armed queue", "local request"]);
}
