//! Attributes of queue pairs, as bytes of `pvrdma_qp_attr` (spec §11).

use pvrdma_verbs_types::Gid;

/// QP states (spec §11.1).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod state {
    pub const RESET: u32 = 0;
    pub const INIT: u32 = 1;
    pub const RTR: u32 = 2;
    pub const RTS: u32 = 3;
    pub const SQD: u32 = 4;
    pub const SQE: u32 = 5;
    pub const ERR: u32 = 6;
}

/// Bits of the attribute mask (spec §11.2).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod mask {
    pub const STATE: u32 = 1 << 0;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
}

/// Attributes with a mask of those that are set. The others hold garbage, as they do in the driver.
#[derive(Clone, Debug)]
pub struct QpAttr {
    /// `pvrdma_qp_attr`.
    pub bytes: [u8; 160],
    /// Mask of the attributes that are set.
    pub mask: u32,
}

impl Default for QpAttr {
    fn default() -> Self {
        Self { bytes: [0xa5; 160], mask: 0 }
    }
}

impl QpAttr {
    /// Creates attributes, none of which is set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a change to a state.
    pub fn to_state(state: u32) -> Self {
        Self::new().state(state)
    }

    /// Sets bytes and mask bits.
    #[must_use]
    pub fn set(mut self, at: usize, value: &[u8], mask: u32) -> Self {
        self.bytes[at..at + value.len()].copy_from_slice(value);
        self.mask |= mask;
        self
    }

    /// Sets the state.
    #[must_use]
    pub fn state(self, state: u32) -> Self {
        self.set(0, &state.to_le_bytes(), mask::STATE)
    }

    /// Sets the state in which the driver assumes the QP to be.
    #[must_use]
    pub fn cur_state(self, state: u32) -> Self {
        self.set(4, &state.to_le_bytes(), mask::CUR_STATE)
    }

    /// Sets P_Key index 0 and port 1.
    #[must_use]
    pub fn port(self) -> Self {
        self.set(36, &[0; 2], mask::PKEY_INDEX).set(45, &[1], mask::PORT)
    }

    /// Sets the access rights of peers.
    #[must_use]
    pub fn access(self, access: u32) -> Self {
        self.set(32, &access.to_le_bytes(), mask::ACCESS_FLAGS)
    }

    /// Sets the Q_Key.
    #[must_use]
    pub fn qkey(self, qkey: u32) -> Self {
        self.set(16, &qkey.to_le_bytes(), mask::QKEY)
    }

    /// Sets the attributes that a connection needs to move to RTR.
    #[must_use]
    pub fn receive_path(self, path: &Path) -> Self {
        let mut av = [0; 40];
        av[..16].copy_from_slice(&path.dgid.0);
        av[20] = path.sgid_index;
        av[21] = 64;
        av[31] = 1;
        av[32] = 1;
        av[33..39].copy_from_slice(&path.dmac);
        self.set(80, &av, mask::AV)
            .set(8, &path.mtu.to_le_bytes(), mask::PATH_MTU)
            .set(28, &path.dest_qpn.to_le_bytes(), mask::DEST_QPN)
            .set(20, &path.rq_psn.to_le_bytes(), mask::RQ_PSN)
            .set(43, &[path.max_dest_rd_atomic], mask::MAX_DEST_RD_ATOMIC)
            .set(44, &[path.min_rnr_timer], mask::MIN_RNR_TIMER)
    }

    /// Sets the attributes that a connection needs to move to RTS.
    #[must_use]
    pub fn send_path(self, path: &Path) -> Self {
        self.set(46, &[path.timeout], mask::TIMEOUT)
            .set(47, &[path.retry_cnt], mask::RETRY_CNT)
            .set(48, &[path.rnr_retry], mask::RNR_RETRY)
            .set(24, &path.sq_psn.to_le_bytes(), mask::SQ_PSN)
            .set(42, &[path.max_rd_atomic], mask::MAX_QP_RD_ATOMIC)
    }

    /// Returns the number at an offset.
    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the state.
    pub fn get_state(&self) -> u32 {
        self.u32(0)
    }
}

/// Path of a connection to its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names of the specification")]
pub struct Path {
    pub dgid: Gid,
    pub dmac: [u8; 6],
    pub dest_qpn: u32,
    pub sgid_index: u8,
    pub mtu: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    /// Access rights of the peer.
    pub access: u32,
}

impl Path {
    /// Returns a path to a QP at a GID, with the values that test programs use.
    pub const fn to(dgid: Gid, dest_qpn: u32) -> Self {
        Self {
            dgid,
            dmac: [0x52, 0x54, 0, 0, 0, 0xfe],
            dest_qpn,
            sgid_index: 0,
            mtu: 3,
            rq_psn: 0x1234,
            sq_psn: 0x1234,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            access: 0xe,
        }
    }
}
