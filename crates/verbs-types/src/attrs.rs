//! Attributes of a queue pair.

use bitflags::bitflags;
use pvrdma_packet::MacAddr;
use serde::Serialize;

use crate::types::{Access, Gid, Mtu, Psn, QpState, Qpn};

bitflags! {
    /// Mask of the attributes that a modify request sets (`ibv_qp_attr_mask`).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct QpAttrMask: u32 {
        /// The attribute of this name.
        const STATE = 1 << 0;
        /// The attribute of this name.
        const CUR_STATE = 1 << 1;
        /// The attribute of this name.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// The attribute of this name.
        const ACCESS_FLAGS = 1 << 3;
        /// The attribute of this name.
        const PKEY_INDEX = 1 << 4;
        /// The attribute of this name.
        const PORT = 1 << 5;
        /// The attribute of this name.
        const QKEY = 1 << 6;
        /// The attribute of this name.
        const AV = 1 << 7;
        /// The attribute of this name.
        const PATH_MTU = 1 << 8;
        /// The attribute of this name.
        const TIMEOUT = 1 << 9;
        /// The attribute of this name.
        const RETRY_CNT = 1 << 10;
        /// The attribute of this name.
        const RNR_RETRY = 1 << 11;
        /// The attribute of this name.
        const RQ_PSN = 1 << 12;
        /// The attribute of this name.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// The attribute of this name.
        const ALT_PATH = 1 << 14;
        /// The attribute of this name.
        const MIN_RNR_TIMER = 1 << 15;
        /// The attribute of this name.
        const SQ_PSN = 1 << 16;
        /// The attribute of this name.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// The attribute of this name.
        const PATH_MIG_STATE = 1 << 18;
        /// The attribute of this name.
        const CAP = 1 << 19;
        /// The attribute of this name.
        const DEST_QPN = 1 << 20;
    }
}

/// Sizes with which a QP was created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct QpCaps {
    /// Send ring size in requests.
    pub max_send_wr: u32,
    /// Receive ring size in requests.
    pub max_recv_wr: u32,
    /// SGEs per send request.
    pub max_send_sge: u32,
    /// SGEs per receive request.
    pub max_recv_sge: u32,
}

/// Path to the peer of a connected QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct AddressVector {
    /// Destination GID.
    pub dgid: Gid,
    /// Source GID: index into the port's table.
    pub sgid_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Destination MAC, resolved by the guest.
    pub dmac: MacAddr,
}

/// Attributes of a queue pair. In a modify request, only the fields named by the mask are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct QpAttrs {
    /// State to reach, or current state in a query.
    pub state: QpState,
    /// State the caller believes the QP to be in.
    pub cur_state: QpState,
    /// Path MTU.
    pub path_mtu: Mtu,
    /// Q_Key. It is never displayed, because a sender needs no other secret.
    #[serde(skip)]
    pub qkey: u32,
    /// Next PSN expected.
    pub rq_psn: Psn,
    /// Next PSN to send.
    pub sq_psn: Psn,
    /// QPN of the peer.
    pub dest_qpn: Qpn,
    /// Operations that the peer may request.
    pub access: Access,
    /// P_Key table index.
    pub pkey_index: u16,
    /// Request for an event when SQD is reached.
    pub en_sqd_async_notify: bool,
    /// Query only: `true` in SQD while requests are outstanding.
    pub sq_draining: bool,
    /// Maximum number of RDMA reads and atomics outstanding as requester.
    pub max_rd_atomic: u8,
    /// Maximum number of RDMA reads and atomics outstanding as responder.
    pub max_dest_rd_atomic: u8,
    /// Encoded RNR NAK timer, 0..=31: the time for which a sender must wait.
    pub min_rnr_timer: u8,
    /// Port number, always 1.
    pub port_num: u8,
    /// Local ACK timeout: 4.096 µs × 2^timeout, 0 disables it.
    pub timeout: u8,
    /// Retransmissions before the QP gives up, 0..=7.
    pub retry_cnt: u8,
    /// Retransmissions after an RNR NAK, 0..=6; 7 means no limit.
    pub rnr_retry: u8,
    /// Path migration state: stored for queries only, alternate paths are not supported.
    pub path_mig_state: u32,
    /// Path to the peer.
    pub av: AddressVector,
}

impl Default for QpAttrs {
    fn default() -> Self {
        Self {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            path_mtu: Mtu::M1024,
            qkey: 0,
            rq_psn: Psn::default(),
            sq_psn: Psn::default(),
            dest_qpn: Qpn::default(),
            access: Access::empty(),
            pkey_index: 0,
            en_sqd_async_notify: false,
            sq_draining: false,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port_num: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            path_mig_state: 0,
            av: AddressVector::default(),
        }
    }
}

impl QpAttrs {
    /// Copies the attributes that `mask` names from `new`, except for the state.
    pub fn merge(&mut self, new: &Self, mask: QpAttrMask) {
        let has = |bit| mask.contains(bit);
        if has(QpAttrMask::EN_SQD_ASYNC_NOTIFY) {
            self.en_sqd_async_notify = new.en_sqd_async_notify;
        }
        if has(QpAttrMask::ACCESS_FLAGS) {
            self.access = new.access;
        }
        if has(QpAttrMask::PKEY_INDEX) {
            self.pkey_index = new.pkey_index;
        }
        if has(QpAttrMask::PORT) {
            self.port_num = new.port_num;
        }
        if has(QpAttrMask::QKEY) {
            self.qkey = new.qkey;
        }
        if has(QpAttrMask::AV) {
            self.av = new.av;
        }
        if has(QpAttrMask::PATH_MTU) {
            self.path_mtu = new.path_mtu;
        }
        if has(QpAttrMask::TIMEOUT) {
            self.timeout = new.timeout;
        }
        if has(QpAttrMask::RETRY_CNT) {
            self.retry_cnt = new.retry_cnt;
        }
        if has(QpAttrMask::RNR_RETRY) {
            self.rnr_retry = new.rnr_retry;
        }
        if has(QpAttrMask::RQ_PSN) {
            self.rq_psn = new.rq_psn;
        }
        if has(QpAttrMask::SQ_PSN) {
            self.sq_psn = new.sq_psn;
        }
        if has(QpAttrMask::MAX_QP_RD_ATOMIC) {
            self.max_rd_atomic = new.max_rd_atomic;
        }
        if has(QpAttrMask::MAX_DEST_RD_ATOMIC) {
            self.max_dest_rd_atomic = new.max_dest_rd_atomic;
        }
        if has(QpAttrMask::MIN_RNR_TIMER) {
            self.min_rnr_timer = new.min_rnr_timer;
        }
        if has(QpAttrMask::PATH_MIG_STATE) {
            self.path_mig_state = new.path_mig_state;
        }
        if has(QpAttrMask::DEST_QPN) {
            self.dest_qpn = new.dest_qpn;
        }
    }
}
