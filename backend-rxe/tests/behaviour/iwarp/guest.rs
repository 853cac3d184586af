//! The connection manager of a guest, which the test plays.

use std::sync::atomic::{AtomicU32, Ordering};

use pvrdma_ib_cm::{
    Drep, Dreq, IpAddresses, Mad, Message, MessageKind, PORT_SPACE_TCP, Rej, RejectReason, Rep, Req, Rtu,
};
use pvrdma_verbs::{Hca, MemoryRegion, MrRequest};
use pvrdma_verbs_types::{Access, Gid, QpType, Qpn, SendData, SendOp, Sge, UdDestination, WcStatus};

use crate::world::{End, Node, gid};

const QKEY: u32 = 0x8001_0000;
/// Bytes of a receive: the network header and a datagram.
const RECEIVE: u64 = 40 + 256;
/// Number of receives of QP 1.
const RECEIVES: u64 = 8;

/// A guest with its QP 1.
pub(crate) struct CmGuest {
    // Dropped before the node.
    gsi: End,
    key: <pvrdma_rxe::RxeHca as Hca>::Mr,
    page: u64,
    next_id: AtomicU32,
    pub(crate) node: Node,
    /// Completions of QP 1 that were not looked at.
    pending: parking_lot::Mutex<std::collections::VecDeque<u64>>,
}

impl CmGuest {
    pub(crate) fn new(node: Node) -> Self {
        let key = node.hca.register_mr(&node.pd, MrRequest::Dma { access: Access::LOCAL_WRITE }).unwrap();
        let page = node.pages(1)[0];
        let gsi = node.qp(QpType::Gsi);
        gsi.start_datagrams(QKEY);
        let pending = parking_lot::Mutex::default();
        let guest = Self { gsi, key, page, next_id: AtomicU32::new(0x6001), node, pending };
        (0..RECEIVES).for_each(|slot| guest.post(slot));
        guest
    }

    fn slot(&self, slot: u64) -> u64 {
        self.page + 512 + slot * RECEIVE
    }

    fn post(&self, slot: u64) {
        let length = u32::try_from(RECEIVE).unwrap();
        self.gsi.recv(slot, &[Sge { addr: self.slot(slot), length, lkey: self.key.lkey() }]);
    }

    /// Sends a message to QP 1 of a peer.
    pub(crate) fn send(&self, peer: Gid, message: Message) {
        self.send_bytes(peer, &Mad { transaction: 0x77, message }.to_bytes());
    }

    /// Sends a datagram to QP 1 of a peer.
    pub(crate) fn send_bytes(&self, peer: Gid, bytes: &[u8]) {
        self.node.memory.view().write(self.page, bytes).unwrap();
        let to = UdDestination { qpn: Qpn::GSI, dgid: peer, hop_limit: 64, ..UdDestination::default() };
        let length = u32::try_from(bytes.len()).unwrap();
        let sge = Sge { addr: self.page, length, lkey: self.key.lkey() };
        self.gsi.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[sge]);
        assert_eq!(self.gsi.scq.one().status, WcStatus::Success);
    }

    /// Returns `true` if there is a message that was not taken.
    pub(crate) fn has_message(&self) -> bool {
        let mut pending = self.pending.lock();
        for completion in self.gsi.rcq.poll() {
            assert_eq!((completion.status, completion.byte_len), (WcStatus::Success, 296));
            pending.push_back(completion.wr_id);
        }
        !pending.is_empty()
    }

    /// Takes the next message.
    pub(crate) fn take_message(&self) -> Message {
        let slot = self.pending.lock().pop_front().unwrap();
        let mut bytes = [0; 256];
        self.node.memory.view().read(self.slot(slot) + 40, &mut bytes).unwrap();
        self.post(slot);
        Mad::parse(&bytes).unwrap().message
    }

    // Messages.

    /// REQ to a port of a peer.
    pub(crate) fn request(&self, peer: Gid, port: u16, qpn: Qpn) -> Req {
        let addresses =
            IpAddresses { source: gid(self.node.number).into(), source_port: 1234, destination: peer.into() };
        let mut private_data = [7; 92];
        private_data[..IpAddresses::LEN].copy_from_slice(&addresses.to_bytes().unwrap());
        Req {
            local_id: self.next_id.fetch_add(1, Ordering::Relaxed),
            service_id: PORT_SPACE_TCP + u64::from(port),
            qpn,
            responder_resources: 128,
            initiator_depth: 128,
            retry_count: 7,
            rnr_retry: 7,
            private_data,
            ..Req::default()
        }
    }

    /// REP to a REQ.
    pub(crate) fn accept(&self, req: &Req, qpn: Qpn) -> Rep {
        Rep {
            local_id: self.next_id.fetch_add(1, Ordering::Relaxed),
            remote_id: req.local_id,
            qpn,
            responder_resources: 128,
            initiator_depth: 128,
            private_data: [6; 196],
            ..Rep::default()
        }
    }

    /// REJ of a program to a REQ.
    pub(crate) fn reject(req: &Req, private: u8) -> Message {
        Message::Rej(Rej {
            local_id: 0,
            remote_id: req.local_id,
            rejected: MessageKind::Req,
            reason: RejectReason::CONSUMER,
            info_len: 0,
            info: [0; 72],
            private_data: [private; 148],
        })
    }

    /// RTU to a REP.
    pub(crate) fn rtu(&self, rep: &Rep) -> Message {
        Message::Rtu(Rtu { local_id: rep.remote_id, remote_id: rep.local_id, private_data: [0; 224] })
    }

    /// DREP to a DREQ.
    pub(crate) fn drep(&self, dreq: &Dreq) -> Message {
        Message::Drep(Drep { local_id: dreq.remote_id, remote_id: dreq.local_id, private_data: [0; 224] })
    }

    /// DREQ of an end with this communication ID, to the peer's ID and invented QP.
    pub(crate) fn dreq(local_id: u32, remote_id: u32, remote_qpn: Qpn) -> Message {
        Message::Dreq(Dreq { local_id, remote_id, remote_qpn, private_data: [0; 220] })
    }
}
