//! What the fuzz target for sequences attacks: a device with queue pairs on a cable, on one thread and on virtual time,
//! so that the same input does the same thing each time.

mod queues;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arbitrary::{Arbitrary, Unstructured};
use pvrdma_dev::testing::{GuestMemory, MEMORY_BASE};
use pvrdma_ether_link::{Frames, Link, memory};
use pvrdma_guest_memory::PageListBuilder;
use pvrdma_roce::Congestion;
use pvrdma_roce::wire::{Extension, NakCode, Operation, Packet, Syndrome};
use pvrdma_rxe::{Clock, ManualClock, PortConfig, PortRules, Rxe, RxeConfig, RxeHca, RxeMr, RxePd, RxeQp, Uplink};
use pvrdma_verbs::{
    Access, AddressVector, Backend, CompletionSink, DeviceContext, Gid, GidType, Hca, MacAddr, MrRequest, Mtu, Psn,
    QpAttrMask, QpAttrs, QpCaps, QpInit, QpState, QpType, Qpn, QueuePair, RecvWr, SendWr,
};

use queues::{Consumer, Log, NoEvents, Ring, lock, name};

/// Queue pairs: two connected ones with all rights, one that lets its peer do little, one for datagrams.
pub const QPS: usize = 4;
/// The one for datagrams.
pub const DATAGRAMS: usize = 3;
/// Key of the datagram queue pair.
pub const QKEY: u32 = 0x1234;
/// Bytes in a page.
pub const PAGE: u64 = 4096;
/// Path MTU of the connections.
pub const MTU: u32 = 256;
/// Frames that the cable holds in each direction.
const CABLE: usize = 64;
/// Most runs that one step may cause. What stands in the rings and on the cable is far less.
const MAX_RUNS: usize = 3000;
const PAGES: u64 = 16;
/// Pages that a peer may change.
const OPEN: Range<u64> = 4..8;
/// Pages that a peer may only read.
const READABLE: Range<u64> = 10..11;

/// The Ethernet address of an end: 1 is the device, 2 the peer.
pub const fn mac(end: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, end])
}

/// An IPv4-mapped GID.
pub const fn gid(end: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, end])
}

/// The number of a queue pair of the device.
pub fn qpn(index: usize) -> Qpn {
    Qpn::new(0x100 + index as u32)
}

/// The number of its peer.
pub fn peer_qpn(index: usize) -> Qpn {
    Qpn::new(0x200 + index as u32)
}

/// A queue pair with its queues.
struct End {
    qp: RxeQp,
    sends: Arc<Mutex<Ring<SendWr>>>,
    receives: Arc<Mutex<Ring<RecvWr>>>,
    /// Of sends and of receives.
    logs: [Arc<Log>; 2],
    /// The PSN that the device expects from the peer, as far as the peer knows.
    peer_psn: Psn,
    /// The peer is in the middle of a message: of a WRITE, or of a SEND.
    pub message: Option<bool>,
}

/// A device and the cable to its peer, which is the input.
pub struct Bed {
    rxe: Rxe,
    clock: Arc<ManualClock>,
    cable: memory::MemoryLink,
    ends: Vec<End>,
    /// Memory of all rights, and memory for reading only.
    regions: [RxeMr; 2],
    hca: RxeHca,
    _pd: RxePd,
    _uplink: Uplink,
    memory: Arc<GuestMemory>,
    /// Requests of the device that the peer has not answered.
    pub asked: VecDeque<Vec<u8>>,
    /// What was given to the device, and some of it.
    given: u64,
    recent: VecDeque<Vec<u8>>,
    /// The peer does not take what the device sends.
    pub deaf: bool,
}

impl Default for Bed {
    fn default() -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = RxeConfig {
            workers: 0,
            // Small, so that transfers already go on from run to run.
            inline_bytes: 2000,
            inline_requests: 3,
            worker_bytes: 2000,
            worker_requests: 3,
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
        };
        let rxe = Rxe::new(config).unwrap();
        let (ours, cable) = memory::pair(CABLE).unwrap();
        let rules = PortRules { congestion: Some(Congestion::default()), ..PortRules::default() };
        let port = PortConfig { uplink: Arc::new(ours), nic: None, mtu: 1500, rules };
        let uplink = rxe.plug(mac(1), port).unwrap();
        let memory = GuestMemory::new((PAGES * PAGE) as usize);
        for page in 0..PAGES {
            memory.write(MEMORY_BASE + page * PAGE, &[page as u8 | 0xa0; PAGE as usize]);
        }
        let context = DeviceContext {
            name: "fuzz".to_owned(),
            mac: mac(1),
            roce: GidType::RoceV2,
            memory: Arc::clone(memory.space()),
            events: Arc::new(NoEvents),
        };
        let hca = rxe.attach(context).unwrap();
        hca.bind_gid(0, gid(1), GidType::RoceV2).unwrap();
        let pd = hca.create_pd().unwrap();
        let region = |pages: Range<u64>, access| {
            let mut list = PageListBuilder::default();
            pages.clone().for_each(|page| list.push(MEMORY_BASE + page * PAGE).unwrap());
            let length = (pages.end - pages.start) * PAGE;
            let request = MrRequest::User { start: start(&pages), length, pages: list.finish(), access };
            hca.register_mr(&pd, request).unwrap()
        };
        let regions = [region(OPEN, Access::all()), region(READABLE, Access::LOCAL_WRITE | Access::REMOTE_READ)];
        let ends = (0..QPS).map(|index| End::new(&hca, &pd, index)).collect();
        let (asked, recent) = (VecDeque::new(), VecDeque::new());
        let mut bed = Self {
            rxe,
            clock,
            cable,
            ends,
            regions,
            hca,
            _pd: pd,
            _uplink: uplink,
            memory,
            asked,
            given: 0,
            recent,
            deaf: false,
        };
        (0..QPS).for_each(|index| bed.connect(index));
        bed
    }
}

/// Virtual address of a region.
const fn start(pages: &Range<u64>) -> u64 {
    0x7f00_0000_0000 + pages.start * PAGE
}

impl End {
    fn new(hca: &RxeHca, pd: &RxePd, index: usize) -> Self {
        fn ring<T>() -> Arc<Mutex<Ring<T>>> {
            Arc::new(Mutex::new(Ring::new()))
        }
        let (sends, receives, logs) = (ring(), ring(), [(); 2].map(|()| Arc::<Log>::default()));
        let cqs = logs.each_ref().map(|log| hca.create_cq(Arc::clone(log) as Arc<dyn CompletionSink>).unwrap());
        let qp = hca.create_qp(QpInit {
            cookie: index as u32,
            qpn: qpn(index),
            qp_type: if index == DATAGRAMS { QpType::Ud } else { QpType::Rc },
            pd,
            send_cq: &cqs[0],
            recv_cq: &cqs[1],
            srq: None,
            send_queue: Box::new(Consumer(Arc::clone(&sends))),
            recv_queue: Some(Box::new(Consumer(Arc::clone(&receives)))),
            caps: QpCaps::default(),
            // Nothing ends without a word.
            signal_all: true,
        });
        Self { qp: qp.unwrap(), sends, receives, logs, peer_psn: Psn::new(0), message: None }
    }
}

impl Bed {
    /// From RESET to RTS, whatever was before.
    pub fn connect(&mut self, index: usize) {
        use QpAttrMask as M;
        let end = &mut self.ends[index];
        let mut attrs = QpAttrs {
            dest_qpn: peer_qpn(index),
            av: AddressVector { dgid: gid(2), dmac: mac(2), hop_limit: 64, ..AddressVector::default() },
            access: if index == 2 { Access::REMOTE_READ } else { Access::all() },
            path_mtu: Mtu::M256,
            // Close to where they wrap.
            rq_psn: Psn::new(0x00ff_fffa),
            sq_psn: Psn::new(0x00ff_fffd),
            max_dest_rd_atomic: 2,
            max_rd_atomic: 2,
            min_rnr_timer: 5,
            port_num: 1,
            timeout: 8,
            retry_cnt: 3,
            rnr_retry: 3,
            qkey: QKEY,
            ..QpAttrs::default()
        };
        let (init, rtr, rts) = if index == DATAGRAMS {
            (M::PKEY_INDEX | M::PORT | M::QKEY, M::empty(), M::SQ_PSN)
        } else {
            (
                M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS,
                M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
            )
        };
        let states = [(QpState::Reset, M::empty()), (QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)];
        for (state, mask) in states {
            attrs.state = state;
            end.qp.modify(&attrs, mask | M::STATE).expect("a queue pair can be connected again");
            if state == QpState::Reset {
                for log in &end.logs {
                    let (next, posted) = &mut *lock(&log.names);
                    *next = *posted;
                }
            }
        }
        (end.peer_psn, end.message) = (attrs.rq_psn, None);
    }

    /// Has a queue pair fail or finish what it does.
    pub fn modify(&self, index: usize, state: QpState) {
        let attrs = QpAttrs { state, ..QpAttrs::default() };
        let _ = self.ends[index].qp.modify(&attrs, QpAttrMask::STATE);
    }

    /// Keys and first address of the region of all rights, or of the one for reading.
    pub fn region(&self, readable: bool) -> (u32, u64) {
        use pvrdma_verbs::MemoryRegion;
        let region = if readable { (&self.regions[1], READABLE) } else { (&self.regions[0], OPEN) };
        (region.0.rkey(), start(&region.1))
    }

    /// Bytes of the region of all rights.
    pub const REGION: u64 = (OPEN.end - OPEN.start) * PAGE;

    /// Binds the device's address anew.
    pub fn bind(&self, vlan: Option<u16>) {
        self.hca.bind_gid_in_vlan(0, gid(1), GidType::RoceV2, vlan).unwrap();
    }

    /// Takes the device's address away.
    pub fn unbind(&self) {
        self.hca.unbind_gid(0);
    }

    /// Posts a request.
    pub fn post(&self, index: usize, mut work: SendWr) {
        let end = &self.ends[index];
        work.wr_id = name(&end.logs[0]);
        lock(&end.sends).posted.push_back(work);
        end.qp.notify_send();
    }

    /// Posts a receive.
    pub fn receive(&self, index: usize, mut work: RecvWr) {
        let end = &self.ends[index];
        work.wr_id = name(&end.logs[1]);
        lock(&end.receives).posted.push_back(work);
        end.qp.notify_recv();
    }

    /// Whether the peer is in the middle of a message, see [`End`].
    pub fn message(&mut self, index: usize) -> &mut Option<bool> {
        &mut self.ends[index].message
    }

    /// Connects a queue pair that has failed.
    pub fn revive(&mut self, index: usize) {
        if !matches!(self.ends[index].qp.query().state, QpState::Rts | QpState::Sqd) {
            self.connect(index);
        }
    }

    /// A frame that was given before.
    pub fn recent(&self, which: u8) -> Option<Vec<u8>> {
        self.recent.get(usize::from(which) % self.recent.len().max(1)).cloned()
    }

    /// The PSN of the peer's next request.
    pub fn psn(&mut self, index: usize) -> &mut Psn {
        &mut self.ends[index].peer_psn
    }

    /// Gives the device a frame and has it do everything that follows.
    pub fn give(&mut self, frame: &[u8]) {
        let mut frames = Frames::default();
        frames.push(frame);
        assert_eq!(self.cable.send(&frames, 0), 1, "the device takes what comes");
        self.given += 1;
        self.recent.push_back(frame.to_vec());
        if self.recent.len() > 8 {
            self.recent.pop_front();
        }
        self.settle();
        if !self.deaf {
            self.take();
        }
    }

    /// Runs everything there is to do.
    pub fn settle(&mut self) {
        let runs = self.rxe.run_ready();
        assert!(runs < MAX_RUNS, "{runs} runs for one step");
        let counted = self.counter("wire_frames_received") + self.counter("passed_dropped");
        assert_eq!(counted, self.given, "every frame is counted");
    }

    /// A figure of the device.
    pub fn counter(&self, name: &str) -> u64 {
        self.hca.counters().into_iter().find(|counter| counter.name == name).expect("a counter of this name").value
    }

    /// Moves time on to where the next timer fires, at most so far.
    pub fn pass(&mut self, at_most: Duration) {
        let now = self.clock.now();
        let next = self.rxe.next_deadline().map_or(now, |deadline| deadline.max(now));
        self.clock.advance((next - now).min(at_most));
        self.settle();
    }

    /// Takes what the device sent, checks it, and remembers the requests.
    pub fn take(&mut self) {
        let mut frames = Frames::default();
        self.cable.receive(&mut frames, usize::MAX);
        for frame in frames.iter() {
            let packet = Packet::parse(frame).expect("what the device sends is correct");
            packet.verify().expect("and says so");
            let header = packet.header;
            assert_eq!((header.ethernet.source, header.network.source()), (mac(1), gid(1)));
            // Whoever sent a marked datagram is told so where it came from.
            let operation = header.bth.opcode.info().expect("a known opcode").operation;
            if operation != Operation::CongestionNotification {
                assert_eq!((header.ethernet.destination, header.network.destination()), (mac(2), gid(2)));
            }
            let index = header.bth.destination.get().wrapping_sub(0x200) as usize;
            if let (Extension::Aeth(aeth), Some(end)) = (header.extension, self.ends.get_mut(index))
                && matches!(aeth.syndrome, Syndrome::Nak(NakCode::SequenceError) | Syndrome::RnrNak { .. })
            {
                // What is resent begins a message, right or wrong.
                (end.peer_psn, end.message) = (header.bth.psn, None);
            }
            if !operation.is_response() && index < DATAGRAMS {
                self.asked.push_back(frame.to_vec());
            }
        }
        while self.asked.len() > 16 {
            self.asked.pop_front();
        }
        self.settle();
    }

    /// The device is alive: a queue pair that is connected again executes what its peer asks for. Nothing was changed
    /// that the peer has no right to.
    pub fn end(mut self, request: impl FnOnce(&mut Self) -> Vec<u8>) {
        self.bind(None);
        self.deaf = false;
        for _ in 0..64 {
            self.take();
        }
        self.connect(0);
        let frame = request(&mut self);
        self.deaf = true;
        self.give(&frame);
        let mut frames = Frames::default();
        self.cable.receive(&mut frames, usize::MAX);
        let answered = frames.iter().any(|frame| {
            let header = Packet::parse(frame).expect("checked above").header;
            header.bth.destination == peer_qpn(0)
                && matches!(header.extension, Extension::Aeth(aeth) if matches!(aeth.syndrome, Syndrome::Ack { .. }))
        });
        assert!(answered, "a good request is answered");
        for page in (0..PAGES).filter(|page| !OPEN.contains(page)) {
            let bytes = self.memory.read_vec(MEMORY_BASE + page * PAGE, PAGE as usize);
            assert!(bytes.iter().all(|&byte| byte == page as u8 | 0xa0), "page {page} was changed");
        }
        for end in &self.ends {
            end.qp.destroy();
        }
        self.pass(Duration::from_secs(60));
    }
}

/// Most steps of one input.
const MAX_STEPS: usize = 120;

/// As many steps as the input has bytes for.
#[derive(Debug)]
pub struct Steps<T>(pub Vec<T>);

impl<'a, T: Arbitrary<'a>> Arbitrary<'a> for Steps<T> {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let mut steps = Vec::new();
        while !input.is_empty() && steps.len() < MAX_STEPS {
            steps.push(input.arbitrary()?);
        }
        Ok(Self(steps))
    }
}
