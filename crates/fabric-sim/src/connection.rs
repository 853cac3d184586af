//! The two ends of a connection: a requester that writes, and the responder.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::Frames;
use pvrdma_pacing::{Pacer, PeerWindows, RateLimiter, Runner, WindowShare};
use pvrdma_packet::MacAddr;
use pvrdma_roce::{
    Congestion, EgressMarking, Handled, IcrcRule, Origin, Path, ReorderBuffer, Requester, Responder, Tuning,
    wire::{Ecn, MAX_FRAME, Packet},
};
use pvrdma_verbs_types::{
    Access, AccessError, AddressVector, AtomicChange, Gid, GidType, NakReason, Psn, QpAttrs, QpState, Qpn, Received,
    RemoteAddress, RequesterOps, ResponderOps, SendFlags, SendOp, SendWr, Sge, WcStatus,
};

use crate::plan::{MTU, Transport};

/// First number of requesters, and of responders.
const REQUESTERS: u32 = 0x100;
const RESPONDERS: u32 = 0x80_0000;
/// Packets that a connection builds in a batch, as in `backend-rxe`.
const BATCH: usize = 32;

/// Wakes a connection whose turn in the window to its peer has come.
#[derive(Debug)]
pub(crate) struct Wake {
    index: usize,
    woken: Arc<Mutex<Vec<usize>>>,
}

impl Runner for Wake {
    fn schedule(self: &Arc<Self>) {
        self.woken.lock().push(self.index);
    }
}

/// State that the connections of a host share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    windows: PeerWindows<Wake>,
    /// Connections whose turn has come.
    pub(crate) woken: Arc<Mutex<Vec<usize>>>,
}

/// Parameters of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) index: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) transport: Transport,
    pub(crate) congestion: Option<Congestion>,
    pub(crate) psn: u32,
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Returns the end that a frame for this queue pair goes to: `true` for the responder, with the connection's index.
pub(crate) fn end_of(qpn: Qpn) -> (bool, usize) {
    let responder = qpn.get() >= RESPONDERS;
    let index = qpn.get().wrapping_sub(if responder { RESPONDERS } else { REQUESTERS });
    (responder, usize::try_from(index).unwrap_or(usize::MAX))
}

fn address(host: usize) -> (MacAddr, Gid) {
    let [.., high, low] = number(host).to_be_bytes();
    let mut gid = Gid::default();
    gid.0[10..].copy_from_slice(&[0xff, 0xff, 10, 0, high, low]);
    (MacAddr([2, 0, 0, 0, high, low]), gid)
}

/// Returns the attributes and the path of one end.
fn end(setup: &Setup, [own, peer]: [usize; 2], [qpn, dest_qpn]: [Qpn; 2]) -> (QpAttrs, Option<Path>) {
    let ((mac, gid), (dmac, dgid)) = (address(own), address(peer));
    let marks = EgressMarking { ecn: setup.congestion.is_some(), ..EgressMarking::default() };
    let origin = Origin { mac, gid, kind: GidType::RoceV2, vlan: None, marks, icrc: IcrcRule::Always };
    let av = AddressVector { dgid, dmac, hop_limit: 64, ..AddressVector::default() };
    let attrs = QpAttrs {
        state: QpState::Rts,
        path_mtu: MTU,
        rq_psn: Psn::new(setup.psn),
        sq_psn: Psn::new(setup.psn),
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        dest_qpn,
        av,
        ..QpAttrs::default()
    };
    (attrs, Path::connected(&origin, &av, qpn, dest_qpn))
}

/// Consumer of a requester, with memory that has no content.
#[derive(Debug, Default)]
struct Consumer {
    finished: u32,
    failed: bool,
}

impl RequesterOps for Consumer {
    fn begin(&mut self, _: &mut SendWr) -> Result<(), WcStatus> {
        Ok(())
    }

    fn gather(&mut self, _: &[Sge], _: u64, _: &mut [u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn scatter(&mut self, _: &[Sge], _: u64, _: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn finish(&mut self, _: &SendWr, status: WcStatus, _: u32) {
        self.finished += u32::from(status == WcStatus::Success);
    }

    fn failed(&mut self) {
        self.failed = true;
    }
}

/// Consumer of a responder, which counts the bytes that were written.
#[derive(Debug, Default)]
struct Target {
    written: u64,
}

impl ResponderOps for Target {
    fn request_arrived(&mut self) {}

    fn take_receive(&mut self) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    fn fill_receive(&mut self, _: u64, _: &[u8]) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    fn complete_receive(&mut self, _: Received) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    fn invalidate(&mut self, _: u32) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    fn check_enabled(&mut self, _: Access) -> Result<(), NakReason> {
        Ok(())
    }

    fn check_remote(&mut self, _: RemoteAddress, _: u64, _: Access) -> Result<(), AccessError> {
        Ok(())
    }

    fn write(&mut self, _: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        self.written += data.len() as u64;
        Ok(())
    }

    fn read(&mut self, _: RemoteAddress, _: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn update(&mut self, _: RemoteAddress, _: AtomicChange) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn refuse(&mut self, _: NakReason) {}

    fn refuse_immediate(&mut self) {}
}

/// The end that writes.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) host: usize,
    pub(crate) transport: Requester,
    pacer: Pacer<Wake>,
    pub(crate) rate: RateLimiter,
    consumer: Consumer,
    /// It is on the ready queue of its host.
    pub(crate) ready: bool,
    /// Timer that is set, in nanoseconds.
    pub(crate) armed: Option<u64>,
}

/// Result of a turn of a sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// There may be more to send.
    More,
    /// There is nothing to send before this time, or before the next response.
    Idle(Option<Duration>),
}

impl Sender {
    /// Builds a batch of packets.
    pub(crate) fn run(&mut self, now: Duration, frames: &mut Frames) -> Turn {
        let Self { transport, pacer, rate, consumer, .. } = self;
        if transport.poll_timeout().is_some_and(|deadline| deadline <= now) {
            pacer.handle_timeout(now, transport, consumer);
        }
        pacer.begin(now, transport);
        let built = pacer.build(now, (transport, rate), consumer, (frames, BATCH), |_| true);
        if built.any {
            return Turn::More;
        }
        pacer.pause(transport.in_flight());
        Turn::Idle(transport.poll_timeout().into_iter().chain(pacer.deadline()).min())
    }

    /// Posts a message.
    pub(crate) fn post(&mut self, bytes: u32) {
        let mut work = self.transport.spare();
        work.op = SendOp::Write { remote: RemoteAddress { addr: 0, rkey: 1 }, immediate: None };
        work.flags = SendFlags::SIGNALED;
        work.sges.clear();
        work.sges.push(Sge { addr: 0, length: bytes, lkey: 1 });
        self.transport.post(work, &mut self.consumer);
    }

    /// Handles a response.
    pub(crate) fn take_response(&mut self, now: Duration, packet: &Packet<'_>) {
        self.transport.handle_packet(now, packet, &mut self.consumer);
        self.pacer.acked(&self.transport);
    }

    /// Handles a congestion notification.
    pub(crate) fn take_notification(&self, config: &Congestion, now: Duration, seed: u64, port: Option<u16>) {
        self.rate.notify(config, now, seed, port);
    }

    /// Returns the number of messages that were finished since the last call.
    pub(crate) const fn take_finished(&mut self) -> u32 {
        std::mem::replace(&mut self.consumer.finished, 0)
    }

    /// Returns `true` if the connection was lost.
    pub(crate) const fn has_failed(&self) -> bool {
        self.consumer.failed
    }
}

/// The end that is written to.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) host: usize,
    pub(crate) transport: Responder,
    rate: RateLimiter,
    target: Target,
    /// It keeps packets behind a missing one.
    keeps: bool,
    reorder: ReorderBuffer<Vec<u8>>,
    remote: Qpn,
    /// It owes responses.
    pub(crate) owes: bool,
}

impl Receiver {
    /// Bytes that were written.
    pub(crate) const fn written(&self) -> u64 {
        self.target.written
    }

    /// Handles a request.
    pub(crate) fn take_request(&mut self, packet: &Packet<'_>, frame: &[u8]) {
        match self.transport.handle_packet(packet, &mut self.target) {
            Handled::OutOfOrder if self.keeps => {
                let expected = self.transport.expected_psn();
                self.reorder.insert(expected, packet.header.bth.psn, || Some(frame.to_vec()));
            }
            // Only requests that wait for responses with data defer others, and there are none of them.
            Handled::OutOfOrder | Handled::Deferred => {}
            Handled::Done | Handled::Dropped => self.catch_up(),
        }
    }

    fn catch_up(&mut self) {
        while let Some(frame) = self.reorder.pop_expected(self.transport.expected_psn()) {
            if let Ok(packet) = Packet::parse(&frame) {
                self.transport.handle_packet(&packet, &mut self.target);
            }
        }
        if !self.reorder.is_empty() {
            self.transport.nak_expected();
        }
    }

    /// Adds a notification about a marked packet, if one is due.
    pub(crate) fn notify(&self, packet: &Packet<'_>, config: &Congestion, now: Duration, frames: &mut Frames) {
        if packet.header.network.ecn() == Ecn::Congested && self.rate.is_notification_due(packet, config, now) {
            frames.push_with(MAX_FRAME, |room| self.transport.path_of(packet).notification(self.remote, config, room));
        }
    }

    /// Builds all responses.
    pub(crate) fn respond(&mut self, frames: &mut Frames) {
        if let Some(missing) = self.transport.wants_received() {
            self.transport.set_received(self.reorder.received(missing));
        }
        while frames.push_with(MAX_FRAME, |room| self.transport.poll_transmit(&mut self.target, room)) {}
    }
}

/// Creates a connection. `None`: the addresses have no path.
pub(crate) fn connect(setup: &Setup, shared: &Shared) -> Option<(Sender, Receiver)> {
    let qpns = [REQUESTERS, RESPONDERS].map(|first| Qpn::new(first + number(setup.index)));
    let (attrs, path) = end(setup, [setup.from, setup.to], qpns);
    let negotiate = setup.transport != Transport::Plain;
    let multipath = setup.transport == Transport::Multipath;
    let tuning = Tuning::default().with_negotiate(negotiate).with_multipath(multipath);
    let transport = Requester::new(&attrs, path?, tuning);
    let wake = Arc::new(Wake { index: setup.index, woken: Arc::clone(&shared.woken) });
    let pacer = Pacer::new(WindowShare::new(&shared.windows, attrs.av.dgid, &wake, 1));
    let consumer = Consumer::default();
    let (host, rate) = (setup.from, RateLimiter::default());
    let sender = Sender { host, transport, pacer, rate, consumer, ready: false, armed: None };

    let (attrs, path) = end(setup, [setup.to, setup.from], [qpns[1], qpns[0]]);
    let transport = Responder::new(&attrs, path?);
    let transport = if multipath { transport.following_paths() } else { transport };
    let receiver = Receiver {
        host: setup.to,
        transport: if negotiate { transport.accepting_offers() } else { transport },
        rate: RateLimiter::default(),
        target: Target::default(),
        keeps: negotiate,
        reorder: ReorderBuffer::new(),
        remote: qpns[0],
        owes: false,
    };
    Some((sender, receiver))
}
