//! Datagrams over the wire.

use pvrdma_verbs::{QpAttrs, SendWr, UdDestination, WcFlags, WcOpcode, WcStatus};

use super::origin;
use crate::counters::Tally;
use crate::hca::BoundGid;
use crate::path::wire::hooks::RequesterHooks;
use crate::port::Port;
use crate::port::counters::PortCounters;
use crate::qp::Qp;
use crate::qp::requester::Requester;
use crate::qp::responder::Nak;
use crate::sg::Memory;
use crate::sg::MemoryGuard;
use crate::ud_header::HEADER_LEN;
use pvrdma_ether_link::Frames;
use pvrdma_roce::wire::{MAX_FRAME, Packet};
use pvrdma_roce::{Datagram, DatagramSender, Path};

/// Builds the packet of the request under way, which was checked. `false`: the link is full, and the QP
/// runs again when it is not. An error is the status that the request ends with.
#[inline(never)]
pub(crate) fn send(
    qp: &Qp,
    requester: &mut Requester,
    (to, source): (&UdDestination, BoundGid),
    memory: Memory<'_>,
    frames: &mut Frames,
    tally: &mut Tally,
) -> Result<bool, WcStatus> {
    let Some(port) = &qp.adapter.port else { return Err(WcStatus::General) };
    if port.uplink.wait_for_room(qp) {
        return Ok(false);
    }
    let path = origin(&qp.adapter, source).and_then(|origin| Path::datagram(&origin, to, qp.qpn));
    let Some(path) = path else {
        // One address is IPv4 and the other is not: nothing is there.
        tally.ud_dropped_no_route += 1;
        return Ok(true);
    };
    let QpAttrs { qkey, sq_psn, .. } = requester.attrs;
    let mut sender = **requester.datagrams.get_or_insert_with(|| Box::new(DatagramSender::new(qp.qpn, qkey, sq_psn)));
    let mut work: SendWr = std::mem::take(&mut requester.work);
    let mtu = port.path_mtu().bytes();
    let mut result = Err(WcStatus::General);
    frames.push_with(MAX_FRAME, |room| {
        let mut host = RequesterHooks { qp, requester, memory, tally };
        result = sender.send(&mut work, &path, mtu, &mut host, room);
        result.ok()
    });
    requester.work = work;
    if let Some(kept) = &mut requester.datagrams {
        **kept = sender;
    }
    result.map(|_| true)
}

/// Puts a datagram that was let through into a receive, or drops it, as local delivery does.
pub(crate) fn deliver(port: &Port, qp: &Qp, packet: &Packet<'_>) {
    let counters = &qp.adapter.counters;
    let mut tally = Tally::default();
    match Datagram::new(packet) {
        Some(datagram) => {
            let held = MemoryGuard::open(&qp.adapter, None);
            fill(qp, held.own(), &datagram, &mut tally);
        }
        None => PortCounters::bump(&port.counters.wire_dropped_malformed),
    }
    counters.fold(&mut tally);
}

fn fill(qp: &Qp, memory: Memory<'_>, datagram: &Datagram<'_>, tally: &mut Tally) {
    let mut responder = qp.responder.lock();
    let length = (datagram.payload.len() as u64).saturating_add(HEADER_LEN as u64);
    if !responder.take_datagram(qp, memory.view, datagram.qkey, length, tally) {
        return;
    }
    let list = responder.receive_list(qp, memory);
    let copied = list.allowed()
        && list.write(0, &datagram.header).and_then(|()| list.write(HEADER_LEN as u64, datagram.payload)).is_ok();
    if !copied {
        responder.fail_receive(qp, memory.view, WcStatus::LocalProtection, Nak::RemoteOperation);
        return;
    }
    let _ = responder.complete_receive(qp, memory.view, WcOpcode::Recv, |completion| {
        completion.byte_len = u32::try_from(length).unwrap_or(u32::MAX);
        completion.flags = WcFlags::GRH;
        completion.src_qpn = datagram.source;
        completion.network = Some(datagram.network);
        completion.service_level = datagram.service_level;
        completion.solicited = datagram.solicited;
        if let Some(bytes) = datagram.immediate {
            completion.flags |= WcFlags::IMMEDIATE;
            completion.immediate = bytes;
        }
    });
    tally.ud_delivered += 1;
}
