//! A port: the links of a device and the threads that serve them.

mod announcement;
mod announcer;
mod arrivals;
mod at_once;
mod classify;
pub(crate) mod config;
mod control;
pub(crate) mod counters;
mod helpers;
mod inspect;
pub(crate) mod kept;
#[cfg(test)]
mod leaving;
mod nic;
mod outgoing;
pub(crate) mod policy;
mod prober;
mod receive;
mod receive_queue;
pub(crate) mod registry;
pub(crate) mod rules;
mod source_guard;
mod stations;
mod threads;
mod tx_queue;
pub(crate) mod uplink;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::{Count, Counter, LogLimit};
use pvrdma_handover::Waker;
use pvrdma_link::{Bell, Frames, GsoLink, Link};
use pvrdma_packet::MacAddr;
use pvrdma_roce::Congestion;
use pvrdma_verbs_types::{Mtu, Qpn};

use crate::addresses::Addresses;
use crate::budget::Budget;
use crate::capture::{CaptureLink, Point};
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use announcer::Announcer;
use arrivals::Batches;
use config::PortConfig;
use counters::{PortCounters, address_conflicts, passed_lost_in_link, wire_lost_in_link};
use helpers::Helpers;
use policy::Policy;
use prober::Prober;
use receive_queue::{ReceiveQueue, ReceiveQueues};
use rules::{HeldRequests, PacketRules, Violation, VlanMode};
use tx_queue::TxQueue;

pub(crate) use announcer::Function;
pub(crate) use arrivals::{Arrival, KeptPacket};
pub(crate) use inspect::PortInspect;
pub(crate) use tx_queue::Room;

/// Maximum number of frames that a path builds while it holds guest memory.
pub(crate) const BATCH: usize = 32;
/// Bytes before the network header that are part of a frame but not of the MTU.
const ETHERNET_LEN: usize = 18;
/// Bytes that queue pairs may send between two reads of the link. Frames that arrive meanwhile must fit into the
/// socket's buffer.
pub(crate) const PASS_BYTES: u64 = 256 << 10;
/// Bytes for RoCE headers beside the payload: GRH or IP with UDP, BTH and the longest extension headers, ICRC.
const OVERHEAD: u32 = 96;
/// Maximum number of frames read from a link at a time.
const RECEIVE: usize = 64;
/// Number of buffers that are kept for reuse.
const SPARE: usize = 8;
/// A link's timeout below this counts as busy: a loop that does not sleep should call it again.
const SOON: Duration = Duration::from_millis(1);

/// Receiver of the RoCE frames of a receive queue.
pub(crate) trait RoceReceiver: Send + std::fmt::Debug {
    /// Handles frames, in this order.
    fn receive<'p>(&mut self, port: &Port, arrivals: &mut dyn Iterator<Item = Arrival<'p>>);

    /// Sends READ data that is owed. Returns `true` if some is left for lack of budget or room.
    fn send_data(&mut self, port: &Port, budget: &mut Budget) -> bool;

    /// Sends about `most` bytes of responses after a batch, also of `resumed` QPs. Returns `true` if there is more.
    fn respond(&mut self, port: &Port, resumed: Vec<Qpn>, most: u64) -> bool;

    /// Returns `true` if only threads of the device may access the guest's memory, because that may block for long.
    fn is_slow(&self) -> bool;
}

/// Environment of a port.
#[derive(Debug)]
pub(crate) struct PortPlace {
    pub(crate) vlan: VlanMode,
    pub(crate) point: Arc<Point>,
    pub(crate) addresses: Arc<Addresses>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) share: Arc<Share>,
    /// Room on its link.
    pub(crate) room: Arc<Room>,
    /// Number of threads that serve it, at least one.
    pub(crate) threads: usize,
}

/// The port of a device.
#[derive(Debug)]
pub(crate) struct Port {
    mac: MacAddr,
    /// The configured MTU.
    mtu: u32,
    /// The current MTU of the uplink, if it is less.
    carried: AtomicU32,
    policy: Policy,
    /// Ownership of addresses.
    addresses: Arc<Addresses>,
    pub(crate) uplink: TxQueue,
    nic: Option<TxQueue>,
    /// Shows the frames of the uplink to captures.
    point: Arc<Point>,
    pub(crate) counters: PortCounters,
    /// The RDMA function behind the port, which is recreated whenever the guest's driver starts.
    function: Mutex<Option<Weak<dyn Function>>>,
    /// Held by the thread that reads received frames, so that they stay in order.
    reading: Mutex<()>,
    /// Received frames for queue pairs.
    queues: ReceiveQueues<dyn RoceReceiver>,
    helpers: Helpers,
    /// Held by the thread that reads frames of the network function, so that they stay in order.
    reading_nic: Mutex<()>,
    spare: Mutex<Vec<Frames>>,
    /// Received frames.
    arrivals: Batches,
    /// Number of batches that were read.
    batches: AtomicU64,
    waker: Waker<Bell>,
    /// Makes the port's thread send READ data when it is the device's turn.
    task: Arc<Task>,
    may_send_data: AtomicBool,
    /// Probes hosts beyond the uplink for addresses that the device claims.
    prober: Arc<Prober>,
    /// Repeats announcements.
    announcer: Arc<Announcer>,
    engine: Arc<Engine>,
    pub(crate) share: Arc<Share>,
    stopping: AtomicBool,
    link_down: AtomicBool,
    log: LogLimit,
}

/// Wraps a link: applies offloads that it cannot do, and shows its frames at `point`.
fn capturing(link: Arc<dyn Link>, point: &Arc<Point>) -> Arc<dyn Link> {
    Arc::new(GsoLink::new(Arc::new(CaptureLink::new(link, Arc::clone(point)))))
}

impl Port {
    /// Returns the state of the port for inspection.
    pub(crate) fn inspect(&self) -> PortInspect {
        PortInspect {
            mtu: self.carried(),
            path_mtu: self.path_mtu(),
            vlan: self.vlan(),
            batches: self.batches(),
            helper_calls: self.helpers.calls(),
            uplink: self.uplink.inspect(),
            nic: self.nic.as_ref().map(TxQueue::inspect),
        }
    }

    pub(crate) fn new(mac: MacAddr, config: PortConfig, place: PortPlace) -> io::Result<Arc<Self>> {
        let PortPlace { vlan, point, addresses, engine, share, room, threads } = place;
        let waker = Waker::new(Bell::new()?);
        Ok(Arc::new_cyclic(|me: &Weak<Self>| Self {
            mac,
            mtu: config.mtu,
            carried: AtomicU32::new(u32::MAX),
            policy: Policy { mac, vlan, rules: config.rules },
            prober: Prober::new(mac, me.clone() as _, &addresses, &engine, &share),
            addresses,
            uplink: TxQueue::new(capturing(config.uplink, &point), room),
            nic: config.nic.map(|nic| TxQueue::new(Arc::new(GsoLink::new(nic)), Arc::default())),
            point,
            counters: PortCounters::default(),
            function: Mutex::default(),
            reading: Mutex::default(),
            queues: ReceiveQueues::new(threads),
            helpers: Helpers::default(),
            reading_nic: Mutex::default(),
            spare: Mutex::default(),
            arrivals: Batches::default(),
            batches: AtomicU64::new(0),
            waker,
            task: Task::new(engine.ready_queue(), &share, me.clone() as _),
            may_send_data: AtomicBool::new(false),
            announcer: Announcer::new(me.clone() as _, &engine, &share),
            engine,
            share,
            stopping: AtomicBool::new(false),
            link_down: AtomicBool::new(false),
            log: LogLimit::new(),
        }))
    }

    /// Registers the device with the addresses of its network. Until [`Self::leave`] it must be the only port of the
    /// device, because the table knows one rule and one prober for each device.
    fn join(&self) {
        if let Some(rule) = &self.policy.rules.addresses {
            self.addresses.join(self.mac, rule);
        }
        // A device that is alone claims addresses unprobed.
        self.prober.enable(!self.policy.rules.alone);
    }

    /// Ends the probes of the device, whose addresses are kept for a while.
    fn leave(&self) {
        self.prober.stop();
        if self.policy.rules.addresses.is_some() {
            self.addresses.leave(self.mac);
        }
    }

    /// Returns the maximum number of bytes in batches and queues of the port.
    pub(crate) fn most_bytes(&self) -> u64 {
        let frame = (self.mtu as usize).saturating_add(ETHERNET_LEN);
        let batch = frame.saturating_mul(RECEIVE).max(arrivals::MAX_BYTES);
        // A single queue is empty before the next batch is read.
        let queues = if self.queues.are_many() { self.queues.len() } else { 0 };
        let waiting = queues.saturating_mul(receive_queue::MAX_WAITING);
        let batches = batch.saturating_mul(SPARE.saturating_add(waiting));
        let transmit = self.ends().count().saturating_mul(tx_queue::MAX_WAITING);
        batches.saturating_add(transmit).saturating_add(arrivals::MOST) as u64
    }

    /// Returns the VLAN of all traffic of the port, if it is an access port.
    const fn vlan(&self) -> Option<u16> {
        self.policy.vlan.access()
    }

    /// Returns the rules for packets of queue pairs.
    pub(crate) fn packet_rules(&self) -> PacketRules {
        self.policy.packet_rules()
    }

    /// Returns the parameters of congestion control, if it is on.
    pub(crate) const fn congestion(&self) -> Option<&Congestion> {
        self.policy.rules.congestion.as_ref()
    }

    /// Returns `true` if connections negotiate selective acknowledgements with peers that also use this engine.
    pub(crate) const fn negotiates(&self) -> bool {
        self.policy.rules.negotiate
    }

    /// Returns `true` if connections that negotiated it can use several paths.
    pub(crate) const fn takes_paths(&self) -> bool {
        self.policy.rules.multipath
    }

    /// Returns the requests that get an RNR NAK while the device is paused.
    pub(crate) const fn held_requests(&self) -> HeldRequests {
        self.policy.rules.held
    }

    /// Lets a responder that waited send its responses.
    pub(crate) fn resume(&self, qpn: Qpn) {
        self.queues.of(qpn).resume(qpn);
        self.wake();
    }

    /// Attaches the RDMA function, with a receiver for each queue.
    pub(crate) fn attach(&self, function: Weak<dyn Function>, mut receiver: impl FnMut() -> Box<dyn RoceReceiver>) {
        self.queues.iter().for_each(|queue| queue.attach(receiver()));
        *self.function.lock() = Some(function);
        // The port's thread installs new receivers in the queues. It may have checked this queue before the receiver
        // was set.
        self.wake();
    }

    /// Returns the current MTU of the network: bytes of an IP packet.
    fn carried(&self) -> u32 {
        self.mtu.min(self.carried.load(Ordering::Relaxed))
    }

    /// Sets the MTU of the uplink. `None` restores the configured MTU. Returns `true` if the path MTU changes.
    pub(crate) fn set_uplink_mtu(&self, bytes: Option<u32>) -> bool {
        let before = self.path_mtu();
        self.carried.store(bytes.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.path_mtu() != before
    }

    /// Returns the largest path MTU whose packets the network carries.
    pub(crate) fn path_mtu(&self) -> Mtu {
        let carried = self.carried();
        [Mtu::M4096, Mtu::M2048, Mtu::M1024, Mtu::M512]
            .into_iter()
            .find(|mtu| mtu.bytes() + OVERHEAD <= carried)
            .unwrap_or(Mtu::M256)
    }

    /// Returns an empty batch.
    pub(crate) fn buffer(&self) -> Frames {
        self.spare.lock().pop().unwrap_or_default()
    }

    /// Sends frames of queue pairs and takes the batch back.
    pub(crate) fn send(&self, mut frames: Frames) {
        if !frames.is_empty() {
            self.send_batch(&frames);
        }
        frames.clear();
        let mut spare = self.spare.lock();
        if spare.len() < SPARE {
            spare.push(frames);
        }
    }

    /// Sets the link state. Once this has returned from setting it down, no frame leaves or arrives.
    pub(crate) fn set_link(&self, up: bool) {
        self.link_down.store(!up, Ordering::Release);
        let dropped = self.ends().map(|end| end.set_closed(!up)).sum();
        self.counters.frames_dropped_link_down.add(dropped);
        // Threads that service the port may have read frames before the state changed. Taking their locks waits until
        // they are done with those.
        drop(self.reading.lock());
        self.queues.iter().for_each(ReceiveQueue::wait);
        drop(self.reading_nic.lock());
        self.wake();
    }

    /// Waits until no thread handles packets of the paused device. The port's thread drops those left to this one.
    pub(crate) fn pause(&self) {
        self.queues.iter().for_each(ReceiveQueue::wait);
        self.wake();
    }

    /// Locks the receive queue of a queue pair, as a thread that empties it does.
    #[cfg(test)]
    pub(crate) fn hold_receiver(&self, qpn: Qpn) -> Option<impl Drop + '_> {
        self.queues.of(qpn).try_receiver()
    }

    fn is_link_down(&self) -> bool {
        self.link_down.load(Ordering::Acquire)
    }

    /// Drops frames that were read while the link is down.
    fn drop_if_down(&self, frames: &mut Frames) {
        if self.is_link_down() {
            self.counters.frames_dropped_link_down.add(frames.len() as u64);
            frames.clear();
        }
    }

    /// Sends frames in front of those that wait for the uplink. They must not belong to a flow of the waiting frames.
    pub(crate) fn send_urgent(&self, frames: &Frames) {
        self.send_with(frames, TxQueue::send_urgent);
    }

    fn send_batch(&self, frames: &Frames) {
        self.send_with(frames, TxQueue::send);
    }

    fn send_with(&self, frames: &Frames, send: fn(&TxQueue, &Frames) -> u64) {
        if self.is_link_down() {
            return self.counters.frames_dropped_link_down.add(frames.len() as u64);
        }
        let limit = (self.carried() as usize).saturating_add(ETHERNET_LEN);
        let (mut fitting, mut batch) = (Frames::default(), frames);
        if frames.iter().any(|frame| frame.len() > limit) {
            // The frame was built for a path MTU that the port does not have, or no longer has.
            for frame in frames.iter().filter(|frame| frame.len() <= limit) {
                fitting.push(frame);
            }
            PortCounters::add(&self.counters.wire_dropped_too_long, (frames.len() - fitting.len()) as u64);
            batch = &fitting;
        }
        let dropped = send(&self.uplink, batch);
        PortCounters::add(&self.counters.wire_dropped_no_room, dropped);
        PortCounters::add(&self.counters.wire_frames_sent, (batch.len() as u64).saturating_sub(dropped));
        PortCounters::add(&self.counters.wire_sent_bytes, batch.bytes() as u64);
        if self.uplink.is_blocked() {
            self.wake();
        }
    }

    /// Wakes the thread, which then checks all its work again.
    fn wake(&self) {
        self.waker.wake();
    }

    pub(crate) fn now(&self) -> Duration {
        self.engine.now()
    }

    /// Returns `true` if the port can send READ data now. Otherwise its thread is woken when it can.
    pub(crate) fn may_send_data(&self) -> bool {
        if self.uplink.is_full() {
            // If frames wait in this queue, the thread flushes it itself and notices when there is room.
            return self.uplink.is_blocked() || !self.wait_for_room();
        }
        let its_turn = self.may_send_data.load(Ordering::Acquire) && self.may_send_data.swap(false, Ordering::AcqRel);
        let may = its_turn
            || self.share.may_run_elsewhere(&self.engine.ready_queue().contention)
                && self.share.throttled_until(|| self.now()).is_none();
        if !may {
            self.task.schedule();
        }
        may
    }

    /// Returns `false` if the uplink has room. Otherwise the thread is woken when it has.
    pub(crate) fn wait_for_room(&self) -> bool {
        self.uplink.wait_for_room(&self.task)
    }

    /// Accounts for bytes of READ data that the port has sent.
    pub(crate) fn has_sent_data(&self, bytes: u64) {
        self.share.spend(bytes, bytes);
        self.share.ran_elsewhere(&self.engine.ready_queue().contention, bytes, true);
    }

    /// Returns the number of batches that were read.
    fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Returns how often a queue pair was given its received frames.
    pub(crate) fn passes(&self, qpn: Qpn) -> u64 {
        self.queues.of(qpn).passes()
    }

    fn count_violation(&self, passed: Result<(), Violation>) {
        match passed {
            Ok(()) => {}
            Err(Violation::Forged) => PortCounters::bump(&self.counters.passed_dropped_forged),
            Err(Violation::Vlan) => PortCounters::bump(&self.counters.passed_dropped_vlan),
            Err(Violation::Roce) => PortCounters::bump(&self.counters.passed_dropped_roce),
            Err(Violation::Address) => PortCounters::bump(&self.counters.passed_dropped_address),
            Err(Violation::Source) => PortCounters::bump(&self.counters.passed_dropped_source),
            Err(Violation::Server) => PortCounters::bump(&self.counters.passed_dropped_server),
            Err(Violation::Control) => PortCounters::bump(&self.counters.passed_dropped_control),
            Err(Violation::Offload) => PortCounters::bump(&self.counters.passed_dropped_offload),
        }
    }

    fn pass(&self, queue: &TxQueue, frames: &Frames, counter: &Count) {
        if !frames.is_empty() {
            let dropped = queue.send(frames);
            PortCounters::add(&self.counters.passed_dropped, dropped);
            PortCounters::add(counter, (frames.len() as u64).saturating_sub(dropped));
            if queue.is_blocked() {
                self.wake();
            }
        }
    }

    /// Returns the counters of the port and of its links.
    pub(crate) fn counts(&self) -> Vec<Counter> {
        let mut counts = self.counters.list();
        counts.push(address_conflicts(self.addresses.conflicts(self.mac)));
        counts.push(wire_lost_in_link(self.uplink.link.lost()));
        if let Some(nic) = &self.nic {
            counts.push(passed_lost_in_link(nic.link.lost()));
        }
        counts.extend(self.uplink.link.counters());
        counts
    }

    /// Iterates over the queues that the port sends through.
    fn ends(&self) -> impl Iterator<Item = &TxQueue> {
        [Some(&self.uplink), self.nic.as_ref()].into_iter().flatten()
    }

    /// Returns `true` if the uplink holds frames that will arrive without another event.
    pub(crate) fn is_holding(&self) -> bool {
        self.uplink.link.readiness().wait.is_some_and(|wait| wait <= SOON)
    }
}

impl Runnable for Port {
    fn run(&self, budget: &mut Budget) -> bool {
        let mut more = false;
        for queue in self.queues.in_turns() {
            let mut receiver = queue.try_receiver();
            let Some(receiver) = receiver.as_mut().and_then(|it| it.as_mut()).filter(|it| !it.is_slow()) else {
                // The thread that holds the receiver is about to check this flag, or else the port's thread is.
                self.may_send_data.store(true, Ordering::Release);
                continue;
            };
            more |= receiver.send_data(self, budget);
        }
        // The port's thread may have found a queue locked by this one.
        self.wake();
        more && !self.wait_for_room()
    }
}
