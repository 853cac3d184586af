//! Datagrams, delivered locally.

use std::sync::Arc;

use pvrdma_base::EndOnPanic;
use pvrdma_roce::datagram_traffic_class;
use pvrdma_verbs_types::{Access, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination, WcStatus};

use crate::counters::Tally;
use crate::gid::BoundGid;
use crate::path::directory::Generations;
use crate::qp::Qp;
use crate::qp::responder::ReceivedDatagram;
use crate::sg::{FaultyList, Memory, MemoryGuard, SgList, transfer};
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
        let datagram = self.received()?;
        let copy = |list: SgList<'_>| {
            transfer((self.payload().into(), 0), (list.into(), HEADER_LEN as u64), datagram.payload_len, false)
        };
        let mut responder = peer.responder.lock();
        responder.receive_datagram(peer, memory, &datagram, tally, copy).map_err(|_| WcStatus::LocalProtection)
    }

    /// Lets the thread of a device whose memory is slow deliver the datagram to `peer`, which was found in this
    /// generation of the directory. Returns `false` if the datagram is lost.
    ///
    /// # Errors
    /// The SGEs of the sender cannot be read.
    pub(crate) fn deliver_apart(
        &self,
        peer: &Arc<Qp>,
        (found, generations): (u64, Generations),
    ) -> Result<bool, WcStatus> {
        let datagram = self.received()?;
        let mut bytes = vec![0; usize::try_from(datagram.payload_len).map_err(|_| WcStatus::LocalLength)?];
        self.payload().read(0, &mut bytes).map_err(|_| WcStatus::LocalProtection)?;
        let (sender, counted, to) = (&self.qp.adapter, Arc::clone(&self.qp.adapter), Arc::clone(peer));
        let thread = if peer.adapter.memory.is_slow() { &peer.adapter.own_thread } else { &sender.own_thread };
        Ok(thread.give_datagram(&sender.engine.threadless, move || {
            let _guard = EndOnPanic::new("the data path");
            let guard = MemoryGuard::open(&to.adapter, None);
            // An unbind or a pause since then: the receiver may not have the address any more.
            if generations() != found {
                return;
            }
            let copy = |list: SgList<'_>| list.write(HEADER_LEN as u64, &bytes).map_err(|_| FaultyList::Target);
            let mut tally = Tally::default();
            // Only the sender's list could be invalid.
            let _ = to.responder.lock().receive_datagram(&to, guard.own(), &datagram, &mut tally, copy);
            counted.counters.fold(&mut tally);
        }))
    }

    /// Returns the payload in the sender's memory.
    fn payload(&self) -> SgList<'_> {
        SgList { memory: self.own, sges: &self.work.sges, pd: self.qp.pd, need: Access::empty() }
    }

    /// Returns the datagram as the receiver sees it, without its payload.
    fn received(&self) -> Result<ReceivedDatagram, WcStatus> {
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
        Ok(ReceivedDatagram {
            source: self.qp.qpn,
            // A Q_Key with its high bit set stands for the QP's own Q_Key (IBA 10.2.5).
            qkey: if self.to.qkey & 1 << 31 == 0 { self.to.qkey } else { self.qkey },
            immediate,
            solicited: self.work.flags.contains(SendFlags::SOLICITED),
            network: header.network(),
            service_level: self.to.service_level,
            header: header.bytes(),
            payload_len,
        })
    }
}
