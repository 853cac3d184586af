//! Work requests and completions, as values copied out of the guest's rings.

use alloc::boxed::Box;
use alloc::vec::Vec;

use bitflags::bitflags;
use pvrdma_packet::MacAddr;
use pvrdma_pages::PageList;

use crate::types::{Access, Gid, NetworkType, Qpn};

/// One piece of a scatter/gather list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// Address in the memory region that `lkey` names.
    pub addr: u64,
    /// Bytes; 0 means nothing.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

impl Sge {
    /// Bytes that a list names.
    pub fn total_length(list: &[Self]) -> u64 {
        list.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// Longest message in bytes (IBA 9.7.7.1.1).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// Memory at the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteAddress {
    /// Address in the peer's memory region.
    pub addr: u64,
    /// The peer's key.
    pub rkey: u32,
}

bitflags! {
    /// Flags of a send request.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SendFlags: u8 {
        /// Start only after all earlier RDMA reads and atomics of this QP have ended.
        const FENCE = 0x1;
        /// Report success with a completion.
        const SIGNALED = 0x2;
        /// Ask for a solicited event at the receiver.
        const SOLICITED = 0x4;
    }
}

/// What a SEND carries beside its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SendData {
    /// Nothing.
    #[default]
    None,
    /// Four bytes in the order of the consumer's memory.
    Immediate([u8; 4]),
    /// A key to invalidate at the receiver.
    Invalidate(u32),
}

/// Destination of a datagram, from the address vector of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UdDestination {
    /// Destination QP.
    pub qpn: Qpn,
    /// Q_Key as the request gives it. With bit 31 set the QP's own key is sent instead.
    pub qkey: u32,
    /// Source GID: index into the port's table.
    pub sgid_index: u8,
    /// Destination GID.
    pub dgid: Gid,
    /// Destination MAC, resolved by the guest.
    pub dmac: MacAddr,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
}

/// Parameters of a fast registration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FastRegister {
    /// The new key: bits 31:8 name the region, 7:0 are the new key byte.
    pub key: u32,
    /// Address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Rights of the region.
    pub access: Access,
    /// The pages, copied when the request was taken from the ring; `None` if the list was not valid.
    pub pages: Option<PageList>,
}

/// Parameters of a local invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidate {
    /// Key of the region.
    pub key: u32,
}

/// What a send request asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// Two-sided message.
    Send {
        /// Immediate data or key to invalidate.
        data: SendData,
        /// Where to, on datagram QPs only.
        to: Option<UdDestination>,
    },
    /// RDMA write.
    Write {
        /// Where to.
        remote: RemoteAddress,
        /// Immediate data, which consumes a receive at the peer.
        immediate: Option<[u8; 4]>,
    },
    /// RDMA read.
    Read {
        /// Where from.
        remote: RemoteAddress,
    },
    /// Atomic compare and swap of eight bytes.
    CompareSwap {
        /// Where.
        remote: RemoteAddress,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Atomic fetch and add of eight bytes.
    FetchAdd {
        /// Where.
        remote: RemoteAddress,
        /// Addend.
        add: u64,
    },
    /// Makes a fast-registered region invalid.
    LocalInvalidate(Invalidate),
    /// Registers pages under a key.
    FastRegister(Box<FastRegister>),
    /// Not an operation of this QP: completes with a local QP operation error.
    Unsupported {
        /// The number in the request.
        opcode: u32,
    },
    /// The request cannot be executed as it stands (for example more SGEs than the QP allows).
    Malformed,
}

impl SendOp {
    /// Whether it uses up a receive of the peer.
    pub const fn takes_receive(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { immediate: Some(_), .. })
    }

    /// Whether the peer answers with data for local memory: a READ or an atomic.
    pub const fn has_result(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Opcode that the request's own completion carries.
    pub const fn completion_opcode(&self) -> WcOpcode {
        match self {
            Self::Send { .. } | Self::Unsupported { .. } | Self::Malformed => WcOpcode::Send,
            Self::Write { .. } => WcOpcode::RdmaWrite,
            Self::Read { .. } => WcOpcode::RdmaRead,
            Self::CompareSwap { .. } => WcOpcode::CompareSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::LocalInvalidate(_) => WcOpcode::LocalInvalidate,
            Self::FastRegister(_) => WcOpcode::FastRegister,
        }
    }
}

/// A send request. The scatter/gather buffer is meant to be reused from request to request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendWr {
    /// The consumer's name for it.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// How.
    pub flags: SendFlags,
    /// Local memory.
    pub sges: Vec<Sge>,
}

impl Default for SendWr {
    fn default() -> Self {
        Self { wr_id: 0, op: SendOp::Malformed, flags: SendFlags::empty(), sges: Vec::new() }
    }
}

/// A receive request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecvWr {
    /// The consumer's name for it.
    pub wr_id: u64,
    /// Where to put the message.
    pub sges: Vec<Sge>,
    /// More SGEs than the queue allows: completes with a local QP operation error when it is used.
    pub malformed: bool,
}

/// Outcome of a request (`ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
#[expect(missing_docs, reason = "the names are the InfiniBand specification's, section 11.6.2")]
pub enum WcStatus {
    Success = 0,
    LocalLength = 1,
    LocalQpOperation = 2,
    LocalProtection = 4,
    Flushed = 5,
    MwBind = 6,
    BadResponse = 7,
    LocalAccess = 8,
    RemoteInvalidRequest = 9,
    RemoteAccess = 10,
    RemoteOperation = 11,
    RetryExceeded = 12,
    RnrRetryExceeded = 13,
    RemoteAborted = 16,
    Fatal = 19,
    ResponseTimeout = 20,
    General = 21,
}

/// What completed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "each is the operation of the same name")]
pub enum WcOpcode {
    Send,
    RdmaWrite,
    RdmaRead,
    CompareSwap,
    FetchAdd,
    LocalInvalidate,
    FastRegister,
    Recv,
    RecvRdmaWithImmediate,
}

bitflags! {
    /// Which fields of a completion hold something.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct WcFlags: u8 {
        /// The first 40 bytes of the buffer are a network header.
        const GRH = 0x1;
        /// `immediate` holds the peer's four bytes.
        const IMMEDIATE = 0x2;
        /// `invalidated_key` holds the key that was made invalid.
        const INVALIDATED = 0x4;
    }
}

/// One entry for a completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// From the request.
    pub wr_id: u64,
    /// The number that the consumer gave the QP when it made it (its cookie).
    pub qp: u32,
    /// What completed.
    pub opcode: WcOpcode,
    /// How it went.
    pub status: WcStatus,
    /// Bytes received or read; datagrams count their 40-byte header.
    pub byte_len: u32,
    /// Which of the following fields are valid.
    pub flags: WcFlags,
    /// The peer's immediate data, unchanged.
    pub immediate: [u8; 4],
    /// Key that a send-with-invalidate named.
    pub invalidated_key: u32,
    /// Sender of a datagram.
    pub src_qpn: Qpn,
    /// Header of a datagram.
    pub network: Option<NetworkType>,
    /// Service level of a datagram.
    pub service_level: u8,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
}

impl Completion {
    /// A completion with every optional field empty.
    pub const fn new(qp: u32, wr_id: u64, opcode: WcOpcode, status: WcStatus) -> Self {
        Self {
            wr_id,
            qp,
            opcode,
            status,
            byte_len: 0,
            flags: WcFlags::empty(),
            immediate: [0; 4],
            invalidated_key: 0,
            src_qpn: Qpn::new(0),
            network: None,
            service_level: 0,
            solicited: false,
        }
    }
}
