//! Datagram QPs: each request has its own path. A send completes as soon as it has been sent; delivery is not
//! confirmed.

use std::sync::{Arc, Weak};

use pvrdma_ib_cm::MAD_LEN;
use pvrdma_link::Frames;
use pvrdma_roce::DatagramSender;
use pvrdma_saved_state::rxe as saved;
use pvrdma_verbs_types::{Access, Psn, QpAttrs, QpState, QpType, Qpn, SendData, SendOp, UdDestination, WcStatus};

use super::directory::Generations;
use super::local::ud::LocalDatagram;
use super::wire;
use crate::adapter::Adapter;
use crate::budget::Budget;
use crate::capture;
use crate::counters::Tally;
use crate::flows::Road;
use crate::gid::BoundGid;
use crate::iwarp::meeting::{GuestDatagram, Meeting};
use crate::limits::PORT_MTU;
use crate::port::{BATCH, Port};
use crate::qp::Qp;
use crate::qp::requester::{Progress, Requester, check_request};
use crate::qp::send_gate::SendGate;
use crate::sg::{Memory, MemoryGuard, SgList};
use crate::task::Run;

/// Destination of a datagram.
pub(crate) enum Destination {
    /// A QP in this process.
    Peer(Arc<Qp>),
    /// A host on the network: no device in this process owns the address.
    Wire,
    /// An iWARP peer, whose connections the manager of this device makes.
    Iwarp(Arc<Meeting>),
    /// A QP of this adapter, which is paused.
    Paused(Arc<Adapter>),
    /// Unknown: the datagram is dropped.
    Nowhere,
}

/// State of a datagram QP that is kept from request to request.
#[derive(Debug, Default)]
pub(crate) struct DatagramRoute {
    /// Receiver of the last datagram to a QP in this process.
    last: Option<LastPeer>,
    /// Builds packets for the wire.
    sender: Option<Box<DatagramSender>>,
    /// Builds packets of local delivery for captures.
    trace: Option<Box<DatagramSender>>,
}

#[derive(Debug)]
struct LastPeer {
    /// Generation of the directory at the lookup.
    generation: u64,
    source: BoundGid,
    qpn: Qpn,
    /// Address of the receiver. It is on the same network as `source`.
    to: BoundGid,
    peer: Weak<Qp>,
}

impl DatagramRoute {
    /// Saves the route. Receivers are looked up again.
    pub(crate) fn save(&self) -> saved::Datagrams {
        let Self { last: _, sender, trace: _ } = self;
        saved::Datagrams { psn: sender.as_ref().map(|sender| sender.psn().get()) }
    }

    /// Restores the route of a QP with this number and Q_Key. `None`: the PSN is not valid.
    pub(crate) fn restore(qpn: Qpn, qkey: u32, state: saved::Datagrams) -> Option<Self> {
        let saved::Datagrams { psn } = state;
        let sender = match psn {
            None => None,
            Some(psn) if psn >> 24 > 0 => return None,
            Some(psn) => Some(Box::new(DatagramSender::new(qpn, qkey, Psn::new(psn)))),
        };
        Some(Self { sender, ..Self::default() })
    }

    /// Returns the cached receiver, if the last datagram had the same destination.
    fn last(&self, generation: u64, source: BoundGid, to: BoundGid, qpn: Qpn) -> Option<Arc<Qp>> {
        let last = self.last.as_ref()?;
        if last.generation != generation || last.source != source || last.to != to || last.qpn != qpn {
            return None;
        }
        last.peer.upgrade().filter(|peer| !peer.state.is_dead())
    }
}

/// Lookup of the destinations of datagrams.
pub(crate) trait Resolver {
    /// Changes whenever results of [`Self::find`] may change.
    fn generation(&self) -> u64;

    /// Returns a function that returns [`Self::generation`].
    fn generations(&self) -> Generations;

    /// Finds the destination of a datagram from `source` to the QP of this number at this address. Counts drops.
    fn find(&self, source: BoundGid, to: BoundGid, qpn: Qpn, tally: &mut Tally) -> Destination;
}

/// Requests of a datagram QP.
pub(crate) struct DatagramBatch<'a, R> {
    pub(crate) qp: &'a Qp,
    pub(crate) requester: &'a mut Requester,
    pub(crate) route: &'a mut DatagramRoute,
    pub(crate) port: Option<&'a Port>,
    pub(crate) resolver: &'a R,
    pub(crate) budget: &'a mut Budget,
    pub(crate) tally: &'a mut Tally,
}

/// Reason why a batch ended.
enum BatchEnd {
    Run(Run),
    /// The request in flight is for an adapter whose memory is not held.
    Other(Arc<Qp>),
    /// Enough frames were built.
    Built,
}

/// Result of sending a datagram.
enum Sent {
    /// It has been sent, whether it was received or not.
    Gone,
    /// The memory of another adapter has to be held first.
    Elsewhere(Arc<Qp>),
    /// The link is full, the receiver is paused, or a probe for the source address is still running. The queue pair is
    /// woken when that changes.
    NoRoom,
}

/// Reason why a datagram is not sent.
enum Unsent {
    /// The request fails.
    Failed(WcStatus),
    /// The source address cannot be used yet: the datagram waits, or is lost.
    Early(Sent),
}

/// Runs requests of a datagram QP.
#[inline(never)]
pub(crate) fn run<R: Resolver>(mut batch: DatagramBatch<'_, R>) -> Run {
    // The receiver is known only after the request was taken from the ring. The guard therefore starts with the memory
    // of the last datagram's receiver, and is opened again if this one goes to another adapter.
    let mut receiver: Option<Arc<Qp>> = None;
    let mut frames = Frames::default();
    loop {
        let end = batch.run(receiver.as_deref().map(|peer| &*peer.adapter), &mut frames);
        if let Some(port) = batch.port.filter(|_| !frames.is_empty()) {
            // Guest memory has been released, but the requester stays locked so that no later packets of the QP
            // overtake these.
            port.send(std::mem::take(&mut frames));
        }
        match end {
            BatchEnd::Run(run) => return run,
            BatchEnd::Other(peer) => receiver = Some(peer),
            BatchEnd::Built => {}
        }
    }
}

impl<R: Resolver> DatagramBatch<'_, R> {
    /// Runs requests to the QP's own adapter and to one other.
    fn run(&mut self, other: Option<&Adapter>, frames: &mut Frames) -> BatchEnd {
        let qp = self.qp;
        let guard = MemoryGuard::open(&qp.adapter, other);
        let own = guard.own();
        loop {
            let state = qp.state();
            if !matches!(state, QpState::Rts | QpState::Sqd) {
                return BatchEnd::Run(Run::Again);
            }
            if self.budget.spent() {
                return BatchEnd::Run(Run::More);
            }
            if frames.len() >= BATCH {
                return BatchEnd::Built;
            }
            if self.requester.current.is_none() {
                if state == QpState::Sqd {
                    return BatchEnd::Run(Run::Idle);
                }
                match self.requester.next_of_many(own.view) {
                    Ok(true) => self.budget.take_request(),
                    Ok(false) => return BatchEnd::Run(Run::Idle),
                    Err(error) => {
                        qp.fail_ring(own.view, error);
                        return BatchEnd::Run(Run::Again);
                    }
                }
            }
            match self.send(&guard, other, frames) {
                Ok(Sent::Gone) => self.succeed(own),
                Ok(Sent::Elsewhere(peer)) => return BatchEnd::Other(peer),
                Ok(Sent::NoRoom) => {
                    self.requester.set_gate(Some(SendGate::LinkFull));
                    return BatchEnd::Run(Run::Idle);
                }
                Err(status) => {
                    qp.fail_request(self.requester, own.view, status);
                    return BatchEnd::Run(Run::Again);
                }
            }
        }
    }

    /// Completes the request in flight, which has been sent.
    fn succeed(&mut self, own: Memory<'_>) {
        let length = self.requester.current.map_or(0, |progress| progress.length);
        self.budget.take_bytes(length);
        self.tally.ud_sends += 1;
        self.tally.ud_send_bytes += length;
        self.requester.end_with_success(self.qp, own.view, 0);
        self.requester.publish(self.qp, own.view, None);
        if self.qp.state() == QpState::Sqd {
            self.requester.drained(self.qp, own.view);
        }
    }

    fn send(
        &mut self,
        guard: &MemoryGuard<'_>,
        other: Option<&Adapter>,
        frames: &mut Frames,
    ) -> Result<Sent, WcStatus> {
        let (qp, own) = (self.qp, guard.own());
        let (to, source) = match self.check(own) {
            Ok(checked) => checked,
            Err(Unsent::Early(sent)) => return Ok(sent),
            Err(Unsent::Failed(status)) => return Err(status),
        };
        let peer = match self.find(&to, source) {
            Destination::Peer(peer) if qp.adapter.is_apart_from(&peer.adapter) => {
                return self.send_apart(&to, source, own, &peer);
            }
            Destination::Peer(peer) => peer,
            Destination::Paused(adapter) => return Ok(self.wait_for_resume(&adapter)),
            Destination::Wire => return self.send_on_wire(&to, source, own, frames),
            Destination::Iwarp(meeting) => return self.send_to_manager(&meeting, &to, source, own),
            Destination::Nowhere => {
                self.capture(&to, source, own, None);
                return Ok(Sent::Gone);
            }
        };
        let memory = if peer.adapter.id == qp.adapter.id {
            own
        } else if other.is_some_and(|other| other.id == peer.adapter.id) {
            guard.peer()
        } else {
            return Ok(Sent::Elsewhere(peer));
        };
        let (work, qkey) = (&self.requester.work, self.requester.attrs.qkey);
        LocalDatagram { qp, own, work, to: &to, source, qkey }.deliver(&peer, memory, self.tally)?;
        self.requester.count_datagram(qp, to.dgid, Road::Local);
        self.capture(&to, source, own, Some(&peer));
        Ok(Sent::Gone)
    }

    /// Copies a datagram to a receiver, if the memory of one of the two devices is slow. Another thread delivers it, so
    /// that this device's memory is not held when that of the receiver is accessed.
    #[cold]
    fn send_apart(
        &mut self,
        to: &UdDestination,
        source: BoundGid,
        own: Memory<'_>,
        peer: &Arc<Qp>,
    ) -> Result<Sent, WcStatus> {
        let found = self.resolver.generation();
        // Datagrams may be lost, as this one is if an address has just changed.
        if self.route.last(found, source, source.beside(to.dgid), to.qpn).is_some() {
            let (work, qkey) = (&self.requester.work, self.requester.attrs.qkey);
            let datagram = LocalDatagram { qp: self.qp, own, work, to, source, qkey };
            if datagram.deliver_apart(peer, (found, self.resolver.generations()))? {
                self.requester.count_datagram(self.qp, to.dgid, Road::Local);
                self.capture(to, source, own, Some(peer));
            }
        }
        Ok(Sent::Gone)
    }

    /// Lets a datagram wait for the end of a pause, or loses it if the pause takes long.
    #[cold]
    fn wait_for_resume(&mut self, adapter: &Adapter) -> Sent {
        let until = adapter.paused.datagrams_wait_until();
        if self.qp.adapter.engine.now() >= until {
            self.tally.ud_dropped_paused += 1;
            return Sent::Gone;
        }
        if adapter.paused.wait(self.qp.task()) {
            self.requester.arm(self.qp, until);
        } else {
            self.qp.task().schedule();
        }
        Sent::NoRoom
    }

    /// Handles a datagram whose source index has no usable GID. If the guest has bound an address there and a probe for
    /// it is running, the datagram waits. Otherwise it is dropped, as are all datagrams from addresses that the guest
    /// does not own.
    #[cold]
    fn without_source(&self, index: u8) -> Unsent {
        let gids = &self.qp.adapter.gids;
        match gids.source(index) {
            None => Unsent::Failed(WcStatus::LocalQpOperation),
            Some(source) if gids.holds(source) => Unsent::Early(Sent::NoRoom),
            Some(_) => Unsent::Early(Sent::Gone),
        }
    }

    /// Performs local checks. Returns the destination and the source GID.
    fn check(&mut self, own: Memory<'_>) -> Result<(UdDestination, BoundGid), Unsent> {
        let SendOp::Send { data, to: Some(to) } = self.requester.work.op else {
            return Err(Unsent::Failed(WcStatus::LocalQpOperation));
        };
        if matches!(data, SendData::Invalidate(_)) {
            return Err(Unsent::Failed(WcStatus::LocalQpOperation));
        }
        let Some(source) = self.qp.adapter.gids.get(to.sgid_index) else {
            return Err(self.without_source(to.sgid_index));
        };
        let Requester { work, attrs, current, .. } = &mut *self.requester;
        // The limit is the same for local and remote receivers.
        let most = self.port.map_or(PORT_MTU, Port::path_mtu).bytes();
        let length = check_request(work, own, self.qp.pd, attrs, most).map_err(Unsent::Failed)?.length;
        *current = Some(Progress { checked: true, length, ..Progress::default() });
        Ok((to, source))
    }

    /// Finds the receiver, unless a requested fault cuts off one of the two devices.
    fn find(&mut self, to: &UdDestination, source: BoundGid) -> Destination {
        if self.qp.adapter.faults.is_cut(source.gid) {
            return Destination::Nowhere;
        }
        match self.look_up(to, source) {
            Destination::Peer(peer) if peer.adapter.faults.is_cut(to.dgid) => Destination::Nowhere,
            found => found,
        }
    }

    /// Finds the receiver, which is usually that of the last datagram.
    fn look_up(&mut self, to: &UdDestination, source: BoundGid) -> Destination {
        let (generation, address) = (self.resolver.generation(), source.beside(to.dgid));
        if let Some(peer) = self.route.last(generation, source, address, to.qpn) {
            return Destination::Peer(peer);
        }
        let found = if self.qp.adapter.is_link_up() {
            self.resolver.find(source, address, to.qpn, self.tally)
        } else {
            self.tally.dropped_link_down += 1;
            Destination::Nowhere
        };
        self.route.last = match &found {
            Destination::Peer(peer) => {
                let peer = Arc::downgrade(peer);
                Some(LastPeer { generation, source, qpn: to.qpn, to: address, peer })
            }
            Destination::Wire | Destination::Iwarp(_) | Destination::Paused(_) | Destination::Nowhere => None,
        };
        found
    }

    fn send_on_wire(
        &mut self,
        to: &UdDestination,
        source: BoundGid,
        own: Memory<'_>,
        frames: &mut Frames,
    ) -> Result<Sent, WcStatus> {
        let Some(port) = self.port else { return Err(WcStatus::General) };
        if port.uplink.wait_for_room(self.qp.task()) {
            return Ok(Sent::NoRoom);
        }
        let sender = self.route.sender.get_or_insert_with(|| new_sender(self.qp, &self.requester.attrs));
        let packet = wire::ud::OutgoingDatagram { qp: self.qp, port, to, source, memory: own };
        packet.build(sender, &mut self.requester.work, frames, self.tally)?;
        self.requester.count_datagram(self.qp, to.dgid, Road::Wire);
        Ok(Sent::Gone)
    }

    /// Passes a management datagram to the manager of the device's iWARP connections. All others are lost: iWARP has no
    /// datagrams.
    #[cold]
    fn send_to_manager(
        &mut self,
        meeting: &Meeting,
        to: &UdDestination,
        source: BoundGid,
        own: Memory<'_>,
    ) -> Result<Sent, WcStatus> {
        let Requester { work, current, .. } = &*self.requester;
        let length = current.map_or(0, |progress| progress.length);
        let mut payload = vec![0; MAD_LEN];
        let is_management = self.qp.qp_type == QpType::Gsi && to.qpn == Qpn::GSI && length == MAD_LEN as u64;
        let taken = is_management && {
            let list = SgList { memory: own, sges: &work.sges, pd: self.qp.pd, need: Access::empty() };
            list.read(0, &mut payload).map_err(|_| WcStatus::LocalProtection)?;
            meeting.submit(GuestDatagram { own: source, peer: to.dgid, payload })
        };
        if !taken {
            self.tally.iwarp_datagrams_dropped += 1;
        }
        Ok(Sent::Gone)
    }

    /// Shows a datagram to captures, as it would have been on the wire.
    #[inline]
    fn capture(&mut self, to: &UdDestination, source: BoundGid, own: Memory<'_>, peer: Option<&Qp>) {
        if self.qp.adapter.captures.is_active() {
            let sender = self.route.trace.get_or_insert_with(|| new_sender(self.qp, &self.requester.attrs));
            capture::local::datagram(self.qp, sender, &mut self.requester.work, (to, source), own, peer);
        }
    }
}

fn new_sender(qp: &Qp, &QpAttrs { qkey, sq_psn, .. }: &QpAttrs) -> Box<DatagramSender> {
    Box::new(DatagramSender::new(qp.qpn, qkey, sq_psn))
}
