//! Datagrams, delivered locally: a send completes when it has left, whether anybody took it or not.

use std::sync::{Arc, Weak};

use pvrdma_verbs::{Access, QpState, SendData, SendFlags, SendOp, SendWr, UdDestination, WcFlags, WcOpcode, WcStatus};

use crate::capture;
use crate::counters::Tally;
use crate::hca::{Adapter, BoundGid, PORT_MTU};
use crate::path::wire;
use crate::qp::requester::{Progress, Requester, Route, check_request};
use crate::qp::responder::{Nak, Responder};
use crate::qp::{Budget, Qp, Run};
use crate::sg::MemoryGuard;
use crate::sg::{self, Fault, Memory, SgList, transfer};
use crate::ud_header::{HEADER_LEN, Header};
use pvrdma_ether_link::Frames;

/// Runs requests of a datagram QP.
#[inline(never)]
pub(crate) fn run(qp: &Qp, requester: &mut Requester, budget: &mut Budget, tally: &mut Tally) -> Run {
    // The receiver is known only when the request was taken from the ring, so memory is held for the receiver of the
    // last datagram and opened again when another adapter's turn comes.
    let mut receiver: Option<Arc<Qp>> = None;
    let mut frames = Frames::default();
    loop {
        let ended = batch(qp, requester, receiver.as_deref().map(|peer| &*peer.adapter), &mut frames, budget, tally);
        if let Some(port) = qp.adapter.port.as_ref().filter(|_| !frames.is_empty()) {
            // Memory is given back, and the requester is still ours: nobody overtakes these.
            port.send(std::mem::take(&mut frames));
        }
        match ended {
            Batch::Ended(run) => return run,
            Batch::Other(peer) => receiver = Some(peer),
            Batch::Built => {}
        }
    }
}

/// Why a batch ended.
enum Batch {
    Ended(Run),
    /// The request under way goes to an adapter whose memory is not held.
    Other(Arc<Qp>),
    /// Enough frames were built.
    Built,
}

/// What became of a datagram.
enum Sent {
    /// It has left, whether anybody took it or not.
    Gone,
    /// It goes to another adapter first.
    Elsewhere(Arc<Qp>),
    /// The link is full. We are woken when it is not.
    NoRoom,
}

impl From<bool> for Sent {
    fn from(sent: bool) -> Self {
        if sent { Self::Gone } else { Self::NoRoom }
    }
}

/// Where a datagram goes.
enum Found {
    Peer(Arc<Qp>),
    /// To the network: nobody here has the address.
    Wire,
    /// To nobody.
    Nowhere,
}

/// Runs requests to our own adapter and one other.
fn batch(
    qp: &Qp,
    requester: &mut Requester,
    other: Option<&Adapter>,
    frames: &mut Frames,
    budget: &mut Budget,
    tally: &mut Tally,
) -> Batch {
    let held = MemoryGuard::open(&qp.adapter, other);
    let own = held.own();
    let capturing = qp.adapter.shared.captures.is_active();
    loop {
        let state = qp.state();
        if !matches!(state, QpState::Rts | QpState::Sqd) {
            return Batch::Ended(Run::Again);
        }
        if budget.spent() {
            return Batch::Ended(Run::More);
        }
        if frames.len() >= wire::BATCH {
            return Batch::Built;
        }
        if requester.current.is_none() {
            if state == QpState::Sqd {
                return Batch::Ended(Run::Idle);
            }
            match requester.next(own.view) {
                Ok(true) => budget.take_request(),
                Ok(false) => return Batch::Ended(Run::Idle),
                Err(error) => {
                    qp.fail_ring(own.view, error);
                    return Batch::Ended(Run::Again);
                }
            }
        }
        let sent = check(qp, requester, own).and_then(|(to, source)| {
            let peer = match resolve(qp, requester, &to, source, tally) {
                Found::Peer(peer) => peer,
                Found::Wire => {
                    return wire::ud::send(qp, requester, (&to, source), own, frames, tally).map(Sent::from);
                }
                Found::Nowhere => {
                    if capturing {
                        capture::local::datagram(qp, requester, (&to, source), own, None);
                    }
                    return Ok(Sent::Gone);
                }
            };
            let memory = if peer.adapter.id == qp.adapter.id {
                own
            } else if other.is_some_and(|other| other.id == peer.adapter.id) {
                held.peer()
            } else {
                return Ok(Sent::Elsewhere(peer));
            };
            let datagram = Datagram { qp, own, work: &requester.work, to: &to, source, qkey: requester.attrs.qkey };
            datagram.deliver(&peer, memory, tally)?;
            if capturing {
                capture::local::datagram(qp, requester, (&to, source), own, Some(&peer));
            }
            Ok(Sent::Gone)
        });
        match sent {
            Ok(Sent::Gone) => {}
            Ok(Sent::Elsewhere(peer)) => return Batch::Other(peer),
            Ok(Sent::NoRoom) => return Batch::Ended(Run::Idle),
            Err(status) => {
                qp.fail_request(requester, own.view, status);
                return Batch::Ended(Run::Again);
            }
        }
        let length = requester.current.map_or(0, |progress| progress.length);
        budget.take_bytes(length);
        tally.ud_sends += 1;
        tally.ud_send_bytes += length;
        requester.succeed(qp, own.view, 0);
    }
}

/// Local checks. Gives the destination and the address that we send from.
fn check(qp: &Qp, requester: &mut Requester, own: Memory<'_>) -> Result<(UdDestination, BoundGid), WcStatus> {
    let SendOp::Send { data, to: Some(to) } = requester.work.op else { return Err(WcStatus::LocalQpOperation) };
    if matches!(data, SendData::Invalidate(_)) {
        return Err(WcStatus::LocalQpOperation);
    }
    let source = qp.adapter.gid(to.sgid_index).ok_or(WcStatus::LocalQpOperation)?;
    let length = check_request(&requester.work, own, qp.pd, &requester.attrs, PORT_MTU.bytes())?;
    requester.current = Some(Progress { checked: true, length, ..Progress::default() });
    Ok((to, source))
}

/// Finds the receiver, which is most often that of the last datagram.
fn resolve(qp: &Qp, requester: &mut Requester, to: &UdDestination, source: BoundGid, tally: &mut Tally) -> Found {
    let fabric = &qp.adapter.shared.fabric;
    let generation = fabric.generation();
    let key = &mut requester.attrs;
    if requester.route.generation == generation
        && key.dest_qpn == to.qpn
        && key.av.dgid == to.dgid
        && requester.route.source == Some(source)
        && let Some(peer) = requester.route.peer.upgrade()
        && !peer.is_dead()
    {
        return Found::Peer(peer);
    }
    // Datagram QPs have no address of their own: the last destination is kept where connected QPs keep their peer.
    key.dest_qpn = to.qpn;
    key.av.dgid = to.dgid;
    requester.route = Route { generation, source: Some(source), peer: Weak::new() };
    let address = source.beside(to.dgid);
    let owner = fabric.find(address);
    if owner.is_none() && qp.adapter.port.is_some() {
        return Found::Wire;
    }
    let Some(adapter) = owner.filter(|adapter| adapter.has_gid(address)) else {
        tally.ud_dropped_no_route += 1;
        return Found::Nowhere;
    };
    let Some(peer) = adapter.qp(to.qpn).filter(|peer| peer.qp_type.is_datagram()) else {
        tally.ud_dropped_no_qp += 1;
        return Found::Nowhere;
    };
    requester.route.peer = Arc::downgrade(&peer);
    Found::Peer(peer)
}

/// A datagram that meets its receiver.
struct Datagram<'a> {
    qp: &'a Qp,
    own: Memory<'a>,
    work: &'a SendWr,
    to: &'a UdDestination,
    source: BoundGid,
    /// The QP's own key.
    qkey: u32,
}

impl Datagram<'_> {
    /// Copies the datagram into a receive, or drops it. An error concerns the sender.
    fn deliver(&self, peer: &Qp, memory: Memory<'_>, tally: &mut Tally) -> Result<(), WcStatus> {
        // A privileged key in the request stands for the QP's own.
        let qkey = if self.to.qkey & 1 << 31 == 0 { self.to.qkey } else { self.qkey };
        let payload = sg::total(&self.work.sges);
        let mut responder = peer.responder.lock();
        if !responder.take_datagram(peer, memory.view, qkey, payload + HEADER_LEN as u64, tally) {
            return Ok(());
        }
        self.fill(peer, &mut responder, memory, tally)
    }

    fn fill(
        &self,
        peer: &Qp,
        responder: &mut Responder,
        memory: Memory<'_>,
        tally: &mut Tally,
    ) -> Result<(), WcStatus> {
        let payload = sg::total(&self.work.sges);
        let length = payload + HEADER_LEN as u64;
        let SendOp::Send { data, .. } = self.work.op else { return Err(WcStatus::LocalQpOperation) };
        let header = Header {
            kind: self.source.kind,
            source: self.source.gid,
            destination: self.to.dgid,
            traffic_class: self.to.traffic_class,
            flow_label: self.to.flow_label,
            hop_limit: self.to.hop_limit,
            payload: u16::try_from(payload).unwrap_or(u16::MAX),
            immediate: matches!(data, SendData::Immediate(_)),
        };
        let list = responder.receive_list(peer, memory);
        let from = SgList { memory: self.own, sges: &self.work.sges, pd: self.qp.pd, need: Access::empty() };
        let copied = if list.allowed() {
            list.write(0, &header.bytes()).and_then(|()| transfer((from, 0), (list, HEADER_LEN as u64), payload, false))
        } else {
            Err(Fault::Target)
        };
        match copied {
            Ok(()) => {}
            Err(Fault::Source) => return Err(WcStatus::LocalProtection),
            Err(Fault::Target) => {
                responder.fail_receive(peer, memory.view, WcStatus::LocalProtection, Nak::RemoteOperation);
                return Ok(());
            }
        }
        let _ = responder.complete_receive(peer, memory.view, WcOpcode::Recv, |completion| {
            completion.byte_len = u32::try_from(length).unwrap_or(u32::MAX);
            completion.flags = WcFlags::GRH;
            completion.src_qpn = self.qp.qpn;
            completion.network = Some(header.network());
            completion.service_level = self.to.service_level;
            completion.solicited = self.work.flags.contains(SendFlags::SOLICITED);
            if let SendData::Immediate(bytes) = data {
                completion.flags |= WcFlags::IMMEDIATE;
                completion.immediate = bytes;
            }
        });
        tally.ud_delivered += 1;
        Ok(())
    }
}
