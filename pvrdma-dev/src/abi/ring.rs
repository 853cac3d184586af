//! Rings and event entries in guest memory (spec §5, §6, §9.5, §10).

/// Entries per directory or table page (spec §5.1).
pub(crate) const TABLE_ENTRIES: u32 = 512;

/// Maximum number of pages of a directory (spec §5.1).
pub(crate) const MAX_PAGES: u32 = 262_144;

/// Bytes of the ring-state page in front of the elements (spec §6.2).
pub(crate) const STATE_PAGE: u64 = 4096;

/// Offset in the ring-state page of the producer index of a send queue: `tx.prod_tail` (spec §6.2).
pub(crate) const TX_PROD_TAIL: u64 = 0;

/// `tx.cons_head` (spec §6.2).
pub(crate) const TX_CONS_HEAD: u64 = 4;

/// Offset of the producer index of every other ring: `rx.prod_tail` (spec §6.2).
pub(crate) const RX_PROD_TAIL: u64 = 8;

/// `rx.cons_head` (spec §6.2).
pub(crate) const RX_CONS_HEAD: u64 = 12;

/// Bytes from the producer index of a ring to its consumer index.
pub(crate) const PROD_TO_CONS: u64 = TX_CONS_HEAD - TX_PROD_TAIL;
const _: () = assert!(PROD_TO_CONS == RX_CONS_HEAD - RX_PROD_TAIL);

/// Bytes of an asynchronous event entry, `pvrdma_eqe` (spec §10).
pub(crate) const EQE_SIZE: usize = 8;

/// Bytes of a CQ notification, `pvrdma_cqne` (spec §9.5).
pub(crate) const CQNE_SIZE: usize = 4;

/// Kinds of asynchronous events (spec §10).
pub(crate) mod eqe {
    /// CQ error; info is the CQ handle.
    pub(crate) const CQ_ERR: u32 = 0;
    /// The QP cannot continue. `info` is the QP handle, as for all of 1..=7 and 16.
    pub(crate) const QP_FATAL: u32 = 1;
    /// The responder received an invalid request.
    pub(crate) const QP_REQ_ERR: u32 = 2;
    /// The responder detected an access violation.
    pub(crate) const QP_ACCESS_ERR: u32 = 3;
    /// First packet while in RTR.
    pub(crate) const COMM_EST: u32 = 4;
    /// SQD reached.
    pub(crate) const SQ_DRAINED: u32 = 5;
    /// The device has failed.
    pub(crate) const DEVICE_FATAL: u32 = 8;
    /// Port came up; info is the port.
    pub(crate) const PORT_ACTIVE: u32 = 9;
    /// Port went down; info is the port.
    pub(crate) const PORT_ERR: u32 = 10;
    /// The GID table of a port has changed; info is the port.
    pub(crate) const GID_CHANGE: u32 = 18;
    /// SRQ broken; info is the SRQ handle.
    pub(crate) const SRQ_ERR: u32 = 14;
    /// SRQ limit reached; info is the SRQ handle.
    pub(crate) const SRQ_LIMIT_REACHED: u32 = 15;
    /// QP takes no more receives from its SRQ.
    pub(crate) const QP_LAST_WQE_REACHED: u32 = 16;

    /// Kind of the object that an event names.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Subject {
        Cq,
        Qp,
        Srq,
        Port,
    }

    /// Returns the kind of the object that an event of this kind names. `None`: there is no such event.
    pub(crate) const fn subject(kind: u32) -> Option<Subject> {
        Some(match kind {
            CQ_ERR => Subject::Cq,
            QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR | COMM_EST | SQ_DRAINED | QP_LAST_WQE_REACHED => Subject::Qp,
            PORT_ACTIVE | PORT_ERR | GID_CHANGE => Subject::Port,
            SRQ_ERR | SRQ_LIMIT_REACHED => Subject::Srq,
            _ => return None,
        })
    }
}

/// An asynchronous event entry (spec §10).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Eqe {
    /// One of [`eqe`].
    pub(crate) kind: u32,
    /// Handle or port.
    pub(crate) info: u32,
}

impl Eqe {
    /// Encodes the entry for the ring.
    pub(crate) const fn to_bytes(self) -> [u8; EQE_SIZE] {
        let ([k0, k1, k2, k3], [i0, i1, i2, i3]) = (self.kind.to_le_bytes(), self.info.to_le_bytes());
        [k0, k1, k2, k3, i0, i1, i2, i3]
    }
}
