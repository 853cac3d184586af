//! Setup of the fuzz target for packet sequences: a device with queue pairs on a cable, on one thread and in virtual
//! time, so that the same input always has the same effect.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_link::{Clock, Frames, Link, ManualClock, memory};
use pvrdma_roce::{
    Congestion,
    wire::{Extension, NakCode, Operation, Packet, Syndrome},
};
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeHca, RxeStation, VlanMode};
use pvrdma_verbs::{
    Hca, MemoryRegion, QueuePair,
    testing::{Buffer, Completions, End, Node, gid, mac},
};
use pvrdma_verbs_types::{
    Access, AddressVector, GidType, Mtu, Psn, QpAttrMask, QpAttrs, QpState, QpType, Qpn, RecvWr, SendWr,
};

/// Number of queue pairs: two connected ones with all rights, one with few rights, and one for datagrams.
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
/// Maximum number of runs that one step may cause. Rings and cable hold far less work.
const MAX_RUNS: usize = 3000;
const PAGES: u64 = 16;
/// Pages that a peer may change.
const OPEN: Range<usize> = 4..8;
/// Pages that a peer may only read.
const READABLE: Range<usize> = 10..11;

/// The number of a queue pair of the device.
pub fn qpn(index: usize) -> Qpn {
    Qpn::new(0x100 + index as u32)
}

/// The number of its peer.
pub fn peer_qpn(index: usize) -> Qpn {
    Qpn::new(0x200 + index as u32)
}

/// The requests of a queue.
#[derive(Default)]
struct Progress {
    posted: u64,
    completed: u64,
}

impl Progress {
    /// The name of the next request.
    fn post(&mut self) -> u64 {
        self.posted += 1;
        self.posted - 1
    }

    /// Checks the new completions: each request completes once and in order.
    fn check(&mut self, completions: &Completions) {
        for completion in completions.poll() {
            assert_eq!(completion.wr_id, self.completed, "completions come in the order of the requests");
            self.completed += 1;
            assert!(self.completed <= self.posted, "a request completed that was not posted");
        }
    }
}

/// A queue pair, and the state of its peer.
struct Connection {
    end: End<RxeHca>,
    sends: Progress,
    receives: Progress,
    /// The PSN that the device expects next, as known to the peer.
    peer_psn: Psn,
    /// The operation in the middle of which the peer is: a WRITE, or a SEND.
    message: Option<bool>,
}

impl Connection {
    fn check(&mut self) {
        self.sends.check(&self.end.scq);
        self.receives.check(&self.end.rcq);
    }
}

/// A device and the cable to its peer, which is the input.
pub struct Device {
    rxe: Rxe,
    clock: Arc<ManualClock>,
    cable: memory::MemoryLink,
    connections: Vec<Connection>,
    /// Memory of all rights, and memory for reading only.
    regions: [Buffer<RxeHca>; 2],
    /// Memory around these, and theirs.
    memory: Buffer<RxeHca>,
    node: Node<RxeHca>,
    _station: RxeStation,
    /// Requests of the device that the peer has not answered.
    pub asked: VecDeque<Vec<u8>>,
    /// Number of frames given to the device, and a selection of them.
    given: u64,
    recent: VecDeque<Vec<u8>>,
    /// The peer does not read the device's frames.
    pub deaf: bool,
}

impl Default for Device {
    fn default() -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = RxeConfig::default()
            .with_workers(0)
            // Small limits, so that even small transfers need several runs.
            .with_inline_bytes(2000)
            .with_inline_requests(3)
            .with_worker_bytes(2000)
            .with_worker_requests(3)
            .with_clock(Arc::clone(&clock) as Arc<dyn Clock>)
            // The address moves from one VLAN to another.
            .with_vlan(VlanMode::Trunk);
        let rxe = Rxe::new(config).unwrap();
        let (ours, cable) = memory::pair(CABLE).unwrap();
        // A probe for the address would get no answer, and the clock would have to advance until its end, so there is
        // none.
        let rules =
            PortRules::default().with_alone(true).with_congestion(Some(Congestion::default())).with_negotiate(true);
        let port = PortConfig::new(Arc::new(ours), 1500).with_rules(rules);
        let station = rxe.station(mac(1));
        station.plug(port).unwrap();
        let node = Node::new(&rxe, 1);
        let pages = node.pages(PAGES);
        let region = |range: Range<usize>, access| {
            let bytes = range.len() as u64 * PAGE;
            node.register(&node.pd, &pages[range], 0, bytes, access)
        };
        let memory = region(0..pages.len(), Access::LOCAL_WRITE);
        for page in 0..PAGES {
            memory.write(page * PAGE, &[page as u8 | 0xa0; PAGE as usize]);
        }
        let regions = [region(OPEN, Access::all()), region(READABLE, Access::LOCAL_WRITE | Access::REMOTE_READ)];
        let connections = (0..QPS).map(|index| Connection::new(&node, index)).collect();
        let (asked, recent) = (VecDeque::new(), VecDeque::new());
        let mut device = Self {
            rxe,
            clock,
            cable,
            connections,
            regions,
            memory,
            node,
            _station: station,
            asked,
            given: 0,
            recent,
            deaf: false,
        };
        (0..QPS).for_each(|index| device.connect(index));
        device
    }
}

impl Connection {
    fn new(node: &Node<RxeHca>, index: usize) -> Self {
        let kind = if index == DATAGRAMS { QpType::Ud } else { QpType::Rc };
        let end = node.qp_with(kind, None, |init| {
            init.qpn = qpn(index);
            // Nothing ends without a word.
            init.signal_all = true;
        });
        let (sends, receives) = (Progress::default(), Progress::default());
        Self { end, sends, receives, peer_psn: Psn::new(0), message: None }
    }
}

impl Device {
    /// From RESET to RTS, whatever was before.
    pub fn connect(&mut self, index: usize) {
        use QpAttrMask as M;
        let connection = &mut self.connections[index];
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
            connection.end.qp.modify(&attrs, mask | M::STATE).expect("a queue pair can be connected again");
            if state == QpState::Reset {
                connection.check();
                // RESET discards all posted requests.
                connection.sends.completed = connection.sends.posted;
                connection.receives.completed = connection.receives.posted;
            }
        }
        (connection.peer_psn, connection.message) = (attrs.rq_psn, None);
    }

    /// Makes a queue pair fail, or finish its work.
    pub fn modify(&self, index: usize, state: QpState) {
        let attrs = QpAttrs { state, ..QpAttrs::default() };
        let _ = self.connections[index].end.qp.modify(&attrs, QpAttrMask::STATE);
    }

    /// Returns the key and the first address of the region with all rights, or of the one for reading.
    pub fn region(&self, readable: bool) -> (u32, u64) {
        let region = &self.regions[usize::from(readable)];
        (region.mr.rkey(), region.start)
    }

    /// Bytes of the region of all rights.
    pub const REGION: u64 = (OPEN.end - OPEN.start) as u64 * PAGE;

    /// Binds the device's address anew.
    pub fn bind(&self, vlan: Option<u16>) {
        self.node.hca.bind_gid_in_vlan(0, gid(1), GidType::RoceV2, vlan).unwrap();
    }

    /// Takes the device's address away.
    pub fn unbind(&self) {
        self.node.hca.unbind_gid(0);
    }

    /// Posts a request.
    pub fn post(&mut self, index: usize, mut work: SendWr) {
        let Connection { end, sends, .. } = &mut self.connections[index];
        work.wr_id = sends.post();
        end.sends.posted.lock().push_back(work);
        end.qp.notify_send();
    }

    /// Posts a receive.
    pub fn receive(&mut self, index: usize, mut work: RecvWr) {
        let Connection { end, receives, .. } = &mut self.connections[index];
        work.wr_id = receives.post();
        end.receives.posted.lock().push_back(work);
        end.qp.notify_recv();
    }

    /// Returns the operation in the middle of which the peer is: a WRITE, or a SEND.
    pub fn message(&mut self, index: usize) -> &mut Option<bool> {
        &mut self.connections[index].message
    }

    /// Connects a queue pair that has failed.
    pub fn revive(&mut self, index: usize) {
        if !matches!(self.connections[index].end.state(), QpState::Rts | QpState::Sqd) {
            self.connect(index);
        }
    }

    /// A frame that was given before.
    pub fn recent(&self, which: u8) -> Option<Vec<u8>> {
        self.recent.get(usize::from(which) % self.recent.len().max(1)).cloned()
    }

    /// The PSN of the peer's next request.
    pub fn psn(&mut self, index: usize) -> &mut Psn {
        &mut self.connections[index].peer_psn
    }

    /// Gives the device a frame, and runs everything that follows from it.
    pub fn give(&mut self, frame: &[u8]) {
        let mut frames = Frames::default();
        frames.push(frame);
        assert_eq!(self.cable.send(&frames, 0), 1, "the device takes each frame");
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
        let counted = self.node.counter("wire_frames_received") + self.node.counter("passed_dropped");
        assert_eq!(counted, self.given, "every frame is counted");
        self.connections.iter_mut().for_each(Connection::check);
    }

    /// Advances time to the next timer, at most by `at_most`.
    pub fn pass(&mut self, at_most: Duration) {
        let now = self.clock.now();
        let next = self.rxe.next_deadline().map_or(now, |deadline| deadline.max(now));
        self.clock.advance((next - now).min(at_most));
        self.settle();
    }

    /// Takes the packets that the device sent, checks them, and remembers the requests.
    pub fn take(&mut self) {
        let mut frames = Frames::default();
        self.cable.receive(&mut frames, usize::MAX);
        for frame in frames.iter() {
            let packet = Packet::parse(frame).expect("the device sends well-formed packets");
            packet.verify().expect("the device sends packets with a valid ICRC");
            let header = packet.header;
            assert_eq!((header.ethernet.source, header.network.source()), (mac(1), gid(1)));
            // The sender of a marked datagram gets its notification at its own address.
            let operation = header.bth.opcode.info().expect("a known opcode").operation;
            if operation != Operation::CongestionNotification {
                assert_eq!((header.ethernet.destination, header.network.destination()), (mac(2), gid(2)));
            }
            let index = header.bth.destination.get().wrapping_sub(0x200) as usize;
            if let (Extension::Aeth(aeth), Some(connection)) = (header.extension, self.connections.get_mut(index))
                && matches!(aeth.syndrome, Syndrome::Nak(NakCode::SequenceError) | Syndrome::RnrNak { .. })
            {
                // A retransmitted request starts a message, whether or not the peer expects one.
                (connection.peer_psn, connection.message) = (header.bth.psn, None);
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

    /// Checks that the device still works: a queue pair that is connected again executes requests of the peer. Memory
    /// to which the peer has no right is unchanged.
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
        for page in (0..PAGES).filter(|page| !OPEN.contains(&(*page as usize))) {
            let bytes = self.memory.read(page * PAGE, PAGE);
            assert!(bytes.iter().all(|&byte| byte == page as u8 | 0xa0), "page {page} was changed");
        }
        for connection in &self.connections {
            connection.end.qp.destroy();
        }
        self.pass(Duration::from_secs(60));
    }
}
