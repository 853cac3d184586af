//! Local deliveries shown as packets.

use pvrdma_roce::{
    DatagramSender, Path,
    wire::{MAX_FRAME, NakCode, Syndrome},
};
use pvrdma_verbs_types::{Access, NakReason, QpAttrs, Qpn, SendWr, UdDestination};

use super::point::Point;
use super::seen::{Direction, Interface};
use super::synthetic_trace::{PathPair, StepOutcome, SyntheticTrace, Toward, TraceStep};
use crate::gid::BoundGid;
use crate::limits::PORT_MTU;
use crate::qp::Qp;
use crate::qp::payload::CheckedPayload;
use crate::qp::requester::Progress;
use crate::qp::responder::Responder;
use crate::sg::{Memory, SgList};

/// The requester's part of an exchange.
pub(crate) struct ConnectionTrace<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) own: Memory<'a>,
    pub(crate) attrs: &'a QpAttrs,
    pub(crate) source: BoundGid,
    /// Created when a capture begins.
    pub(crate) trace: &'a mut Option<Box<SyntheticTrace>>,
}

/// The responder's part of an exchange.
pub(crate) struct Answering<'a> {
    pub(crate) point: &'a Point,
    /// Path of its responses. `None`: it has no address.
    pub(crate) back: Option<Path>,
}

impl<'a> Answering<'a> {
    /// Describes the responder of `peer`, to which the queue pair `requester` is connected.
    #[cold]
    #[inline(never)]
    pub(crate) fn of(peer: &'a Qp, responder: &Responder, requester: Qpn) -> Self {
        let from = responder.own_address().map(|address| peer.adapter.origin(address));
        let back = from.and_then(|from| Path::connected(&from, &responder.attrs.av, peer.qpn, requester));
        Self { point: &peer.adapter.point, back }
    }
}

/// Returns the response that a refusal would cause on the wire.
pub(crate) const fn refusal(nak: NakReason) -> StepOutcome {
    StepOutcome::Refused(match nak {
        NakReason::Silence => return StepOutcome::NoResponse,
        NakReason::NotReady(timer) => Syndrome::RnrNak { timer },
        NakReason::InvalidRequest => Syndrome::Nak(NakCode::InvalidRequest),
        NakReason::RemoteAccess => Syndrome::Nak(NakCode::RemoteAccess),
        NakReason::RemoteOperation => Syndrome::Nak(NakCode::RemoteOperation),
    })
}

/// Shows a frame to the captures of both devices, and only once if both QPs belong to one device.
fn show(own: &Point, peer: Option<&Point>, toward: Toward, frame: &[u8]) {
    let (from_own, from_peer) = match toward {
        Toward::Responder => (Direction::Outbound, Direction::Inbound),
        Toward::Requester => (Direction::Inbound, Direction::Outbound),
    };
    let peer = peer.filter(|peer| peer.mac != own.mac);
    if own.is_on() {
        own.record(Interface::Local, if peer.is_some() { from_own } else { Direction::Outbound }, frame);
    }
    if let Some(peer) = peer.filter(|peer| peer.is_on()) {
        peer.record(Interface::Local, from_peer, frame);
    }
}

impl ConnectionTrace<'_> {
    /// Traces a step of a request that began with `before` bytes moved.
    #[cold]
    #[inline(never)]
    pub(crate) fn step(
        &mut self,
        work: &SendWr,
        progress: &Progress,
        before: u64,
        outcome: StepOutcome,
        answering: Option<Answering<'_>>,
    ) {
        let (qp, own, av) = (self.qp, self.own, &self.attrs.av);
        let (peer_point, back) = answering.map(|Answering { point, back }| (point, back)).unzip();
        if !qp.adapter.point.is_on() && !peer_point.is_some_and(Point::is_on) {
            return;
        }
        let there = Path::connected(&qp.adapter.origin(self.source), av, qp.qpn, self.attrs.dest_qpn);
        // Without a path to the peer there are no packets to show.
        let Some(there) = there else { return };
        let back = back.flatten().unwrap_or(there);
        let paths = PathPair {
            to_responder: there,
            to_requester: back,
            requester: qp.qpn,
            responder: self.attrs.dest_qpn,
            mtu: self.attrs.path_mtu,
        };
        let trace = self.trace.get_or_insert_with(|| Box::new(SyntheticTrace::new(self.attrs.sq_psn)));
        let list = SgList { memory: own, sges: &work.sges, pd: qp.pd, need: Access::empty() };
        let length = u32::try_from(progress.length).unwrap_or(u32::MAX);
        trace.record(
            &paths,
            &TraceStep { wr: work, length, before, done: progress.done, outcome },
            |offset, out| list.read(offset, out).is_ok(),
            |toward, frame| show(&qp.adapter.point, peer_point, toward, frame),
        );
    }
}

/// Traces a datagram that was sent, to `peer` if it was delivered.
#[cold]
#[inline(never)]
pub(crate) fn datagram(
    qp: &Qp,
    sender: &mut DatagramSender,
    work: &mut SendWr,
    (to, source): (&UdDestination, BoundGid),
    own: Memory<'_>,
    peer: Option<&Qp>,
) {
    let peer = peer.map(|peer| &*peer.adapter.point);
    if !qp.adapter.point.is_on() && !peer.is_some_and(Point::is_on) {
        return;
    }
    let Some(path) = Path::datagram(&qp.adapter.origin(source), to, qp.qpn) else { return };
    let mut out = [0; MAX_FRAME];
    if let Ok(length) = sender.send(work, &path, PORT_MTU.bytes(), &mut CheckedPayload { qp, memory: own }, &mut out) {
        show(&qp.adapter.point, peer, Toward::Responder, out.get(..length).unwrap_or_default());
    }
}
