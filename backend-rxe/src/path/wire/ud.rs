//! Datagrams over the wire.

use pvrdma_link::Frames;
use pvrdma_roce::{
    Datagram, DatagramSender, Path,
    wire::{MAX_FRAME, Packet},
};
use pvrdma_verbs_types::{SendWr, UdDestination, WcStatus};

use crate::counters::Tally;
use crate::gid::BoundGid;
use crate::port::Port;
use crate::port::counters::PortCounters;
use crate::qp::Qp;
use crate::qp::payload::CheckedPayload;
use crate::qp::responder::ReceivedDatagram;
use crate::sg::{FaultyList, Memory, MemoryGuard, SgList};
use crate::ud_header::HEADER_LEN;

/// A datagram that has passed its local checks.
pub(crate) struct OutgoingDatagram<'a> {
    pub(crate) qp: &'a Qp,
    pub(crate) port: &'a Port,
    pub(crate) to: &'a UdDestination,
    pub(crate) source: BoundGid,
    /// The sender's memory.
    pub(crate) memory: Memory<'a>,
}

impl OutgoingDatagram<'_> {
    /// Builds the packet of the request in flight.
    ///
    /// # Errors
    /// The status that the request ends with.
    #[inline(never)]
    pub(crate) fn build(
        &self,
        sender: &mut DatagramSender,
        work: &mut SendWr,
        frames: &mut Frames,
        tally: &mut Tally,
    ) -> Result<(), WcStatus> {
        let &Self { qp, port, to, source, memory } = self;
        let Some(path) = Path::datagram(&qp.adapter.origin(source), to, qp.qpn) else {
            // One address is IPv4 and the other is not, so that no host can be reached.
            if to.dgid.is_multicast() {
                let from = source.gid;
                qp.adapter
                    .log
                    .warn(module_path!(), format_args!("a datagram to group {} cannot come from {from}", to.dgid));
            }
            tally.ud_dropped_no_route += 1;
            return Ok(());
        };
        let mtu = port.path_mtu().bytes();
        let mut payload = CheckedPayload { qp, memory };
        let mut result = Err(WcStatus::General);
        frames.push_with(MAX_FRAME, |room| {
            result = sender.send(work, &path, mtu, &mut payload, room);
            result.ok()
        });
        result.map(|_| ())
    }
}

/// Copies an accepted datagram into a receive, or drops it.
pub(crate) fn deliver(port: &Port, qp: &Qp, packet: &Packet<'_>) {
    let Some(datagram) = Datagram::new(packet) else {
        return PortCounters::bump(&port.counters.wire_dropped_malformed);
    };
    let received = ReceivedDatagram {
        source: datagram.source,
        qkey: datagram.qkey,
        immediate: datagram.immediate,
        solicited: datagram.solicited,
        network: datagram.network,
        service_level: datagram.service_level,
        header: datagram.header,
        payload_len: datagram.payload.len() as u64,
    };
    let copy = |list: SgList<'_>| list.write(HEADER_LEN as u64, datagram.payload).map_err(|_| FaultyList::Target);
    let mut tally = Tally::default();
    let guard = MemoryGuard::open(&qp.adapter, None);
    // The error is ignored because it only concerns the source, which is the packet here and can always be read.
    let _ = qp.responder.lock().receive_datagram(qp, guard.own(), &received, &mut tally, copy);
    qp.adapter.counters.fold(&mut tally);
}
