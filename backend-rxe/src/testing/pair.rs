//! A queue pair with what belongs to it, and two of them connected.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_verbs::{
    AddressVector, Mtu, Psn, QpAttrMask, QpAttrs, QpState, QpType, Qpn, QueuePair, RecvWr, SendFlags, SendOp, SendWr,
    Sge,
};

use super::{ALL, Completions, Node, Ring, SEND, World, gid, mac, run_all};
use crate::{Rxe, RxeCq, RxeQp};

/// A QP with everything that belongs to it.
pub(crate) struct End {
    pub(crate) node: u8,
    pub(crate) qp: RxeQp,
    pub(crate) sends: Arc<Ring<SendWr>>,
    pub(crate) receives: Arc<Ring<RecvWr>>,
    pub(crate) scq: Arc<Completions>,
    pub(crate) rcq: Arc<Completions>,
    pub(crate) cookie: u32,
    pub(super) wire: Vec<Rxe>,
    pub(super) _cqs: (RxeCq, RxeCq),
}

impl End {
    /// Posts a signaled request without a doorbell.
    pub(crate) fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let work = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: sges.to_vec() };
        self.sends.posted.lock().push_back(work);
    }

    /// Posts a signaled request.
    pub(crate) fn submit(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post(wr_id, op, sges);
        self.qp.notify_send();
        // Local delivery is done by now.
        if !self.wire.is_empty() {
            run_all(&self.wire);
        }
    }

    pub(crate) fn send(&self, wr_id: u64, sges: &[Sge]) {
        self.submit(wr_id, SEND, sges);
    }

    pub(crate) fn recv(&self, wr_id: u64, sges: &[Sge]) {
        self.receives.posted.lock().push_back(RecvWr { wr_id, sges: sges.to_vec(), malformed: false });
        self.qp.notify_recv();
    }

    pub(crate) fn state(&self) -> QpState {
        self.qp.query().state
    }

    pub(crate) fn to(&self, state: QpState) {
        self.change(state, |_| {}, QpAttrMask::empty());
    }

    pub(crate) fn change(&self, state: QpState, set: impl FnOnce(&mut QpAttrs), mask: QpAttrMask) {
        let mut attrs = QpAttrs { state, ..QpAttrs::default() };
        set(&mut attrs);
        self.qp.modify(&attrs, mask | QpAttrMask::STATE).unwrap();
    }

    /// Brings a connected QP to RTR.
    pub(crate) fn rtr(&self, peer: &Self, set: impl Fn(&mut QpAttrs)) {
        use QpAttrMask as M;
        let mut attrs = peer_attrs(peer);
        set(&mut attrs);
        let set = |a: &mut QpAttrs, state| *a = QpAttrs { state, ..attrs };
        self.change(QpState::Init, |a| set(a, QpState::Init), M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS);
        self.change(
            QpState::Rtr,
            |a| set(a, QpState::Rtr),
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        );
    }

    /// Brings a connected QP to RTS.
    pub(crate) fn connect(&self, peer: &Self, set: impl Fn(&mut QpAttrs)) {
        use QpAttrMask as M;
        self.rtr(peer, &set);
        let mut attrs = peer_attrs(peer);
        set(&mut attrs);
        self.change(
            QpState::Rts,
            |a| *a = QpAttrs { state: QpState::Rts, ..attrs },
            M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
        );
    }

    /// Brings a datagram QP to RTS.
    pub(crate) fn start_datagrams(&self, qkey: u32) {
        use QpAttrMask as M;
        let port = if self.qp.qpn() == Qpn::GSI { M::empty() } else { M::PORT };
        let set = |a: &mut QpAttrs| (a.qkey, a.port_num) = (qkey, 1);
        self.change(QpState::Init, set, M::PKEY_INDEX | M::QKEY | port);
        self.to(QpState::Rtr);
        self.change(QpState::Rts, |_| {}, M::SQ_PSN);
    }
}

fn peer_attrs(peer: &End) -> QpAttrs {
    QpAttrs {
        dest_qpn: peer.qp.qpn(),
        av: AddressVector { dgid: gid(peer.node), dmac: mac(peer.node), hop_limit: 64, ..AddressVector::default() },
        access: ALL,
        path_mtu: Mtu::M1024,
        rq_psn: Psn::new(5),
        sq_psn: Psn::new(5),
        max_dest_rd_atomic: 16,
        max_rd_atomic: 16,
        min_rnr_timer: 12,
        port_num: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttrs::default()
    }
}

/// Two devices with a connected QP each.
pub(crate) struct Pair {
    pub(crate) world: World,
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) left: End,
    pub(crate) right: End,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(World::new(), |_| {}, |_| {})
    }

    /// `left` and `right` change the attributes of the two QPs.
    pub(crate) fn with(world: World, left: impl Fn(&mut QpAttrs), right: impl Fn(&mut QpAttrs)) -> Self {
        let (a, b) = (world.node(1), world.node(2));
        let pair = Self { left: a.qp(QpType::Rc), right: b.qp(QpType::Rc), world, a, b };
        pair.left.connect(&pair.right, left);
        pair.right.connect(&pair.left, right);
        pair
    }

    /// Runs everything to its end on virtual time.
    pub(crate) fn settle(&self) -> Duration {
        self.world.settle()
    }
}
