//! Work requests and completions, as values copied from the guest's rings.

use alloc::boxed::Box;
use alloc::vec::Vec;

use bitflags::bitflags;
use pvrdma_packet::MacAddr;
use pvrdma_pages::PageList;

use crate::types::{Access, Gid, InvalidValue, NetworkType, Qpn};

/// One element of a scatter/gather list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// Address in the memory region that `lkey` identifies.
    pub addr: u64,
    /// Length in bytes. An element of length 0 is empty.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

impl Sge {
    /// Returns the total length of a list in bytes.
    pub fn total_length(list: &[Self]) -> u64 {
        list.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// Maximum message length in bytes (IBA 9.7.7.1.1).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// Remote memory, at the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteAddress {
    /// Address in the peer's memory region.
    pub addr: u64,
    /// R_Key of the region.
    pub rkey: u32,
}

bitflags! {
    /// Flags of a send request.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SendFlags: u8 {
        /// Start only after all earlier RDMA reads and atomics of this QP have completed.
        const FENCE = 0x1;
        /// Generate a completion on success as well.
        const SIGNALED = 0x2;
        /// Request a solicited event at the receiver.
        const SOLICITED = 0x4;
    }
}

/// Data that a SEND carries in addition to its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SendData {
    /// Nothing.
    #[default]
    None,
    /// Four bytes of immediate data, in the order of the consumer's memory.
    Immediate([u8; 4]),
    /// R_Key to invalidate at the receiver.
    Invalidate(u32),
}

/// Destination of a datagram, from the address vector of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UdDestination {
    /// Destination QP.
    pub qpn: Qpn,
    /// Q_Key of the request. If bit 31 is set, the QP's own Q_Key is sent instead.
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
    /// New key: bits 31:8 identify the region, bits 7:0 are the new key byte.
    pub key: u32,
    /// Address of the first byte.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access rights of the region.
    pub access: Access,
    /// Pages, copied when the request was taken from the ring; `None` if the list was invalid.
    pub pages: Option<PageList>,
}

/// Parameters of a local invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidate {
    /// Key of the region.
    pub key: u32,
}

/// Operation of a send request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// Two-sided message.
    Send {
        /// Immediate data or key to invalidate.
        data: SendData,
        /// Destination, for datagram QPs only.
        to: Option<UdDestination>,
    },
    /// RDMA write.
    Write {
        /// Remote memory to write to.
        remote: RemoteAddress,
        /// Immediate data; consumes a receive request at the peer.
        immediate: Option<[u8; 4]>,
    },
    /// RDMA read.
    Read {
        /// Remote memory to read from.
        remote: RemoteAddress,
    },
    /// Atomic compare and swap of eight bytes.
    CompareSwap {
        /// Remote memory.
        remote: RemoteAddress,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Atomic fetch and add of eight bytes.
    FetchAdd {
        /// Remote memory.
        remote: RemoteAddress,
        /// Addend.
        add: u64,
    },
    /// Invalidates a fast-registered region.
    LocalInvalidate(Invalidate),
    /// Registers pages under a key (fast registration).
    FastRegister(Box<FastRegister>),
    /// Operation that this QP does not support: completes with a local QP operation error.
    Unsupported {
        /// Opcode of the request.
        opcode: u32,
    },
    /// Request that cannot be executed (for example with more SGEs than the QP allows).
    Malformed,
}

impl SendOp {
    /// Returns `true` if the operation consumes a receive request at the peer.
    pub const fn takes_receive(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { immediate: Some(_), .. })
    }

    /// Returns `true` if the response carries data for local memory: a READ or an atomic.
    pub const fn has_result(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Returns `true` if the request is executed locally and sends nothing to the peer.
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate(_) | Self::FastRegister(_) | Self::Unsupported { .. } | Self::Malformed)
    }

    /// Returns the opcode of the request's completion.
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

/// Send request. Its scatter/gather list is meant to be reused for the next request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendWr {
    /// Identifier chosen by the consumer.
    pub wr_id: u64,
    /// Operation.
    pub op: SendOp,
    /// Flags.
    pub flags: SendFlags,
    /// Local memory.
    pub sges: Vec<Sge>,
}

impl Default for SendWr {
    fn default() -> Self {
        Self { wr_id: 0, op: SendOp::Malformed, flags: SendFlags::empty(), sges: Vec::new() }
    }
}

/// Receive request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecvWr {
    /// Identifier chosen by the consumer.
    pub wr_id: u64,
    /// Local memory for the message.
    pub sges: Vec<Sge>,
    /// `true` if it has more SGEs than the queue allows: it completes with a local QP operation error when it is used.
    pub malformed: bool,
}

/// Completion status of a request (`ibv_wc_status`).
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

impl TryFrom<u32> for WcStatus {
    type Error = InvalidValue;

    fn try_from(value: u32) -> Result<Self, InvalidValue> {
        Ok(match value {
            0 => Self::Success,
            1 => Self::LocalLength,
            2 => Self::LocalQpOperation,
            4 => Self::LocalProtection,
            5 => Self::Flushed,
            6 => Self::MwBind,
            7 => Self::BadResponse,
            8 => Self::LocalAccess,
            9 => Self::RemoteInvalidRequest,
            10 => Self::RemoteAccess,
            11 => Self::RemoteOperation,
            12 => Self::RetryExceeded,
            13 => Self::RnrRetryExceeded,
            16 => Self::RemoteAborted,
            19 => Self::Fatal,
            20 => Self::ResponseTimeout,
            21 => Self::General,
            _ => return Err(InvalidValue { what: "completion status", value: value.into() }),
        })
    }
}

/// Type of a completed operation.
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
    /// Flags of a completion: which optional fields are valid.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct WcFlags: u8 {
        /// The first 40 bytes of the buffer are a network header.
        const GRH = 0x1;
        /// `immediate` holds the peer's immediate data.
        const IMMEDIATE = 0x2;
        /// `invalidated_key` holds the key that was invalidated.
        const INVALIDATED = 0x4;
    }
}

/// Completion queue entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Identifier of the request.
    pub wr_id: u64,
    /// Cookie that the consumer passed when it created the QP.
    pub qp: u32,
    /// Type of the operation.
    pub opcode: WcOpcode,
    /// Status.
    pub status: WcStatus,
    /// Bytes received or read, including the 40-byte header of datagrams.
    pub byte_len: u32,
    /// Flags: which of the following fields are valid.
    pub flags: WcFlags,
    /// Immediate data of the peer, unchanged.
    pub immediate: [u8; 4],
    /// Key invalidated by a send-with-invalidate.
    pub invalidated_key: u32,
    /// QPN of a datagram's sender.
    pub src_qpn: Qpn,
    /// Type of a datagram's network header.
    pub network: Option<NetworkType>,
    /// Service level of a datagram.
    pub service_level: u8,
    /// `true` if the sender requested a solicited event.
    pub solicited: bool,
}

impl Completion {
    /// Creates a completion with all optional fields empty.
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
