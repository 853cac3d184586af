//! Congestion notifications: sending them for marked packets, and obeying those that come for our queue pairs
//! (IBA annex A17.9).
//!
//! A QP that nobody complained about pays one load of a flag for each packet.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_verbs::{Qpn, UdDestination};

use super::rc;
use crate::hca::Adapter;
use crate::port::Port;
use crate::port::counters::PortCounters;
use crate::qp::Qp;
use pvrdma_ether_link::Frames;
use pvrdma_roce::wire::{Ecn, MAX_FRAME, Network, Operation, Packet};
use pvrdma_roce::{Congestion, Origin, Path, ReactionPoint, admit_notification};

/// What a QP remembers about congestion.
#[derive(Debug, Default)]
pub(crate) struct RateLimiter {
    /// `reaction` holds something.
    on: AtomicBool,
    /// Both halves send at this rate.
    reaction: Mutex<Option<Box<ReactionPoint>>>,
    /// The responder has something to send and waits for its turn.
    responder_waits: AtomicBool,
    /// When the last notification was sent for this QP, in nanoseconds. 0: never.
    notified: AtomicU64,
}

impl RateLimiter {
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// When the next packet may leave, if that is not now.
    #[inline]
    pub(crate) fn blocked_until(&self, port: &Port, now: Duration) -> Option<Duration> {
        if self.is_on() { self.ask(port, now) } else { None }
    }

    #[cold]
    fn ask(&self, port: &Port, now: Duration) -> Option<Duration> {
        let mut reaction = self.reaction.lock();
        let blocked = reaction.as_mut()?.blocked_until(now);
        if blocked.is_some() {
            PortCounters::bump(&port.counters.wire_paced);
        } else if reaction.as_ref().is_some_and(|point| point.has_recovered()) {
            *reaction = None;
            self.on.store(false, Ordering::Relaxed);
        }
        blocked
    }

    /// Packets have left.
    #[inline]
    pub(crate) fn sent(&self, now: Duration, bytes: u64) {
        if self.is_on()
            && let Some(point) = &mut *self.reaction.lock()
        {
            point.sent(now, bytes);
        }
    }

    /// Slows down. Whether the rate was cut.
    fn notify(&self, config: &Congestion, now: Duration) -> bool {
        let mut reaction = self.reaction.lock();
        let cut = reaction.get_or_insert_with(|| Box::new(ReactionPoint::new(config, now))).notify(now);
        self.on.store(true, Ordering::Relaxed);
        cut
    }

    /// Has [`Self::resume`] called by the next run of the QP.
    pub(crate) fn hold_responder(&self) {
        self.responder_waits.store(true, Ordering::Release);
    }

    /// Whether the responder waited for this run.
    #[inline]
    pub(crate) fn release_responder(&self) -> bool {
        self.responder_waits.load(Ordering::Relaxed) && self.responder_waits.swap(false, Ordering::AcqRel)
    }

    /// Whether a notification may be sent, which is then remembered. Only the port's thread asks.
    fn may_notify(&self, interval: Duration, now: Duration) -> bool {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1);
        let interval = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let last = self.notified.load(Ordering::Relaxed);
        let may = last == 0 || now >= last.saturating_add(interval);
        if may {
            self.notified.store(now, Ordering::Relaxed);
        }
        may
    }

    /// Forgets everything, with the QP's state.
    pub(crate) fn reset(&self) {
        *self.reaction.lock() = None;
        self.on.store(false, Ordering::Relaxed);
        self.notified.store(0, Ordering::Relaxed);
    }
}

/// A packet that a QP took was marked on its way: has its sender slow down.
pub(crate) fn marked(port: &Port, qp: &Qp, packet: &Packet<'_>, out: &mut Frames) {
    let header = &packet.header;
    if header.network.ecn() != Ecn::Congested || matches!(header.network, Network::V1(_)) {
        return;
    }
    PortCounters::bump(&port.counters.wire_marked);
    let Some(config) = port.congestion() else { return };
    let operation = header.bth.opcode.info().map(|info| info.operation);
    // What these confirm was sent long ago: they say nothing about the way that our packets take.
    let answer = matches!(operation, Some(Operation::Acknowledge | Operation::AtomicAcknowledge));
    if answer || !qp.brake.may_notify(config.cnp_interval, qp.adapter.shared.engine.now()) {
        return;
    }
    let target = match header.extension.deth() {
        Some(deth) => datagram_path(port, qp, packet, deth.source).map(|path| (path, deth.source)),
        None => rc::path(qp, operation == Some(Operation::ReadResponse)),
    };
    if let Some((path, remote)) = target
        && out.push_with(MAX_FRAME, |room| path.notification(remote, config, room))
    {
        PortCounters::bump(&port.counters.wire_cnps_sent);
    }
}

/// The way back to the sender of a datagram.
fn datagram_path(port: &Port, qp: &Qp, packet: &Packet<'_>, source: Qpn) -> Option<Path> {
    let header = &packet.header;
    let origin = Origin {
        mac: port.mac(),
        gid: header.network.destination(),
        kind: super::gid_kind(header.network.kind()),
        vlan: header.ethernet.vlan_id(),
        marks: port.marks(),
    };
    let (dgid, dmac) = (header.network.source(), header.ethernet.source);
    Path::datagram(&origin, &UdDestination { qpn: source, dgid, dmac, ..UdDestination::default() }, qp.qpn)
}

/// A notification came for one of our queue pairs.
pub(crate) fn notified(port: &Port, adapter: &Adapter, packet: &Packet<'_>) {
    let counters = &port.counters;
    PortCounters::bump(&counters.wire_cnps_received);
    let config = port.congestion().filter(|_| admit_notification(packet).is_ok());
    let qp = adapter.qp(packet.header.bth.destination);
    // Only the peer of a connection may slow it down. A datagram QP has many peers and no rate.
    match (config, qp) {
        (Some(config), Some(qp)) if is_from_peer(&qp, packet) => {
            let cut = qp.brake.notify(config, adapter.shared.engine.now());
            PortCounters::add(&counters.wire_rate_cuts, cut.into());
        }
        _ => PortCounters::bump(&counters.wire_cnps_ignored),
    }
}

fn is_from_peer(qp: &Qp, packet: &Packet<'_>) -> bool {
    if let Some((path, _)) = rc::path(qp, false) {
        return path.leads_back(packet);
    }
    let from_peer = rc::path(qp, true).is_some_and(|(path, _)| path.leads_back(packet));
    // Whoever found the requester busy with us relies on somebody running it.
    qp.kick();
    from_peer
}
