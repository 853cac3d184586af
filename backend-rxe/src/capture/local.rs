//! Local deliveries as packets.

use pvrdma_verbs::{Access, QpAttrs, SendWr, UdDestination};

use super::{Direction, Interface, Point};
use crate::counters::Tally;
use crate::hca::{Adapter, BoundGid};
use crate::path::wire::hooks::RequesterHooks;
use crate::qp::Qp;
use crate::qp::requester::{Progress, Requester};
use crate::qp::responder::{Nak, Responder};
use crate::sg::{Memory, SgList};
use pvrdma_roce::wire::{MAX_FRAME, NakCode, Syndrome};
use pvrdma_roce::{DatagramSender, Origin, Outcome, Path, PathPair, Step, SyntheticTrace, Way};

/// What a requester holds while it is watched, and until its QP is reset.
#[derive(Debug)]
pub(crate) enum Notes {
    Connected(SyntheticTrace),
    Datagrams(DatagramSender),
}

/// The requester's part of an exchange.
pub(crate) struct Sender<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) own: Memory<'a>,
    pub(crate) attrs: &'a QpAttrs,
    pub(crate) source: BoundGid,
    pub(crate) notes: &'a mut Option<Box<Notes>>,
}

impl From<Nak> for Outcome {
    fn from(nak: Nak) -> Self {
        Self::Refused(match nak {
            Nak::Silence => return Self::Silence,
            Nak::NotReady(timer) => Syndrome::RnrNak { timer },
            Nak::InvalidRequest => Syndrome::Nak(NakCode::InvalidRequest),
            Nak::RemoteAccess => Syndrome::Nak(NakCode::RemoteAccess),
            Nak::RemoteOperation => Syndrome::Nak(NakCode::RemoteOperation),
        })
    }
}

fn origin(adapter: &Adapter, source: BoundGid) -> Origin {
    let BoundGid { gid, kind, vlan } = source;
    let marks = adapter.port.as_ref().map(|port| port.marks()).unwrap_or_default();
    Origin { mac: adapter.point.mac, gid, kind, vlan, marks }
}

/// Shows a frame to those who watch either device. Between two QPs of one device it is shown once.
fn show(own: &Point, peer: Option<&Point>, way: Way, frame: &[u8]) {
    let (from_own, from_peer) = match way {
        Way::There => (Direction::Outbound, Direction::Inbound),
        Way::Back => (Direction::Inbound, Direction::Outbound),
    };
    let peer = peer.filter(|peer| peer.mac != own.mac);
    if own.is_on() {
        own.record(Interface::Local, if peer.is_some() { from_own } else { Direction::Outbound }, frame);
    }
    if let Some(peer) = peer.filter(|peer| peer.is_on()) {
        peer.record(Interface::Local, from_peer, frame);
    }
}

impl Sender<'_> {
    /// Writes a step of a request down that began with `before` bytes moved.
    #[cold]
    #[inline(never)]
    pub(crate) fn step(
        &mut self,
        work: &SendWr,
        progress: &Progress,
        before: u64,
        outcome: Outcome,
        answering: Option<(&Qp, &Responder)>,
    ) {
        let (qp, own, av) = (self.qp, self.own, &self.attrs.av);
        let peer_point = answering.map(|(peer, _)| &*peer.adapter.point);
        if !qp.adapter.point.is_on() && !peer_point.is_some_and(Point::is_on) {
            return;
        }
        let there = Path::connected(&origin(&qp.adapter, self.source), av, qp.qpn, self.attrs.dest_qpn);
        let back = answering.and_then(|(peer, responder)| {
            let from = origin(&peer.adapter, responder.own_address()?);
            Path::connected(&from, &responder.attrs.av, peer.qpn, qp.qpn)
        });
        // Nobody answers on a path that is not there.
        let Some(there) = there else { return };
        let back = back.unwrap_or(there);
        let ends = PathPair { there, back, local: qp.qpn, remote: self.attrs.dest_qpn, mtu: self.attrs.path_mtu };
        let notes =
            self.notes.get_or_insert_with(|| Box::new(Notes::Connected(SyntheticTrace::new(self.attrs.sq_psn))));
        let Notes::Connected(transcript) = &mut **notes else { return };
        let list = SgList { memory: own, sges: &work.sges, pd: qp.pd, need: Access::empty() };
        let length = u32::try_from(progress.length).unwrap_or(u32::MAX);
        transcript.write(
            &ends,
            &Step { work, length, before, done: progress.done, outcome },
            |offset, out| list.read(offset, out).is_ok(),
            |way, frame| show(&qp.adapter.point, peer_point, way, frame),
        );
    }
}

/// Writes a datagram down that has left, for `peer` if there is one.
#[cold]
#[inline(never)]
pub(crate) fn datagram(
    qp: &Qp,
    requester: &mut Requester,
    (to, source): (&UdDestination, BoundGid),
    memory: Memory<'_>,
    peer: Option<&Qp>,
) {
    let peer = peer.map(|peer| &*peer.adapter.point);
    if !qp.adapter.point.is_on() && !peer.is_some_and(Point::is_on) {
        return;
    }
    let Some(path) = Path::datagram(&origin(&qp.adapter, source), to, qp.qpn) else { return };
    let QpAttrs { qkey, sq_psn, .. } = requester.attrs;
    let mut sender = match requester.notes.as_deref() {
        Some(Notes::Datagrams(sender)) => *sender,
        _ => DatagramSender::new(qp.qpn, qkey, sq_psn),
    };
    let mut work = std::mem::take(&mut requester.work);
    let mut out = [0; MAX_FRAME];
    let mut host = RequesterHooks { qp, requester, memory, tally: &mut Tally::default() };
    if let Ok(length) = sender.send(&mut work, &path, crate::hca::PORT_MTU.bytes(), &mut host, &mut out) {
        show(&qp.adapter.point, peer, Way::There, out.get(..length).unwrap_or_default());
    }
    requester.work = work;
    match requester.notes.as_deref_mut() {
        Some(Notes::Datagrams(kept)) => *kept = sender,
        _ => requester.notes = Some(Box::new(Notes::Datagrams(sender))),
    }
}
