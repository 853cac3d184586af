//! Datagrams, delivered locally.

use pvrdma_roce::datagram_traffic_class;
use pvrdma_verbs::{Access, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination, WcStatus};

use crate::counters::Tally;
use crate::gid::BoundGid;
use crate::qp::Qp;
use crate::qp::responder::ReceivedDatagram;
use crate::sg::{Memory, SgList, transfer};
use crate::ud_header::{HEADER_LEN, Header};

/// A datagram that has passed its local checks.
pub(crate) struct LocalDatagram<'a> {
    pub(crate) qp: &'a Qp,
    /// The sender's memory.
    pub(crate) own: Memory<'a>,
    pub(crate) work: &'a SendWr,
    pub(crate) to: &'a UdDestination,
    pub(crate) source: BoundGid,
    /// The QP's own key.
    pub(crate) qkey: u32,
}

impl LocalDatagram<'_> {
    /// Copies the datagram into a receive of `peer`, or drops it.
    ///
    /// # Errors
    /// The SGEs of the sender cannot be read.
    pub(crate) fn deliver(&self, peer: &Qp, memory: Memory<'_>, tally: &mut Tally) -> Result<(), WcStatus> {
        let SendOp::Send { data, .. } = self.work.op else { return Err(WcStatus::LocalQpOperation) };
        let payload_len = Sge::total_length(&self.work.sges);
        let immediate = if let SendData::Immediate(bytes) = data { Some(bytes) } else { None };
        let header = Header {
            kind: self.source.kind,
            source: self.source.gid,
            destination: self.to.dgid,
            traffic_class: datagram_traffic_class(self.source.kind, self.to.traffic_class),
            flow_label: self.to.flow_label,
            hop_limit: self.to.hop_limit,
            payload: u16::try_from(payload_len).unwrap_or(u16::MAX),
            immediate: immediate.is_some(),
        };
        let datagram = ReceivedDatagram {
            source: self.qp.qpn,
            // A Q_Key with its high bit set stands for the QP's own Q_Key (IBA 10.2.5).
            qkey: if self.to.qkey & 1 << 31 == 0 { self.to.qkey } else { self.qkey },
            immediate,
            solicited: self.work.flags.contains(SendFlags::SOLICITED),
            network: header.network(),
            service_level: self.to.service_level,
            header: header.bytes(),
            payload_len,
        };
        let from = SgList { memory: self.own, sges: &self.work.sges, pd: self.qp.pd, need: Access::empty() };
        let copy = |list: SgList<'_>| transfer((from, 0), (list, HEADER_LEN as u64), payload_len, false);
        let mut responder = peer.responder.lock();
        responder.receive_datagram(peer, memory, &datagram, tally, copy).map_err(|_| WcStatus::LocalProtection)
    }
}
