//! Work requests that were taken from a ring and have not ended, as other messages contain them.

use crate::pages::PageList;

/// One element of a scatter/gather list.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Sge {
    /// Address in the memory region.
    #[prost(uint64, tag = "1")]
    pub addr: u64,
    /// Length in bytes.
    #[prost(uint32, tag = "2")]
    pub length: u32,
    /// Key of the region.
    #[prost(fixed32, tag = "3")]
    pub lkey: u32,
}

/// A send request.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct SendWr {
    /// Identifier chosen by the consumer.
    #[prost(uint64, tag = "1")]
    pub wr_id: u64,
    /// Flags: 1 fence, 2 signaled, 4 solicited.
    #[prost(uint32, tag = "2")]
    pub flags: u32,
    /// Local memory.
    #[prost(message, repeated, tag = "3")]
    pub sges: Vec<Sge>,
    /// Operation.
    #[prost(oneof = "Operation", tags = "4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub operation: Option<Operation>,
}

/// Operation of a send request.
#[derive(Clone, PartialEq, Eq, Hash, prost::Oneof)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Operation {
    /// SEND.
    #[prost(message, tag = "4")]
    Send(Send),
    /// RDMA WRITE.
    #[prost(message, tag = "5")]
    Write(Write),
    /// RDMA READ.
    #[prost(message, tag = "6")]
    Read(Remote),
    /// Atomic compare and swap.
    #[prost(message, tag = "7")]
    CompareSwap(CompareSwap),
    /// Atomic fetch and add.
    #[prost(message, tag = "8")]
    FetchAdd(FetchAdd),
    /// Invalidation of the local region with this key.
    #[prost(fixed32, tag = "9")]
    LocalInvalidate(u32),
    /// Fast registration.
    #[prost(message, tag = "10")]
    FastRegister(FastRegister),
    /// Operation with this opcode, which the QP does not support.
    #[prost(uint32, tag = "11")]
    Unsupported(u32),
    /// The request cannot be executed. The value is always `true`.
    #[prost(bool, tag = "12")]
    Malformed(bool),
}

/// Remote memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Remote {
    /// Address in the region.
    #[prost(uint64, tag = "1")]
    pub addr: u64,
    /// R_Key of the region.
    #[prost(fixed32, tag = "2")]
    pub rkey: u32,
}

/// A SEND. It has immediate data, or a key to invalidate, or none of them.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Send {
    /// Immediate data: the four bytes in memory, as a little-endian number.
    #[prost(fixed32, optional, tag = "1")]
    pub immediate: Option<u32>,
    /// R_Key to invalidate at the receiver.
    #[prost(fixed32, optional, tag = "2")]
    pub invalidate: Option<u32>,
    /// Destination of a datagram.
    #[prost(message, optional, tag = "3")]
    pub to: Option<Destination>,
}

/// Destination of a datagram.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Destination {
    /// Destination QPN.
    #[prost(uint32, tag = "1")]
    pub qpn: u32,
    /// Q_Key of the request.
    #[prost(fixed32, tag = "2")]
    pub qkey: u32,
    /// Index of the source GID.
    #[prost(uint32, tag = "3")]
    pub sgid_index: u32,
    /// Destination GID, 16 bytes.
    #[prost(bytes = "vec", tag = "4")]
    pub dgid: Vec<u8>,
    /// Destination MAC address, 6 bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub dmac: Vec<u8>,
    /// Service level.
    #[prost(uint32, tag = "6")]
    pub service_level: u32,
    /// Traffic class.
    #[prost(uint32, tag = "7")]
    pub traffic_class: u32,
    /// Flow label.
    #[prost(uint32, tag = "8")]
    pub flow_label: u32,
    /// Hop limit.
    #[prost(uint32, tag = "9")]
    pub hop_limit: u32,
}

/// An RDMA WRITE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Write {
    /// Remote memory.
    #[prost(message, optional, tag = "1")]
    pub remote: Option<Remote>,
    /// Immediate data: the four bytes in memory, as a little-endian number.
    #[prost(fixed32, optional, tag = "2")]
    pub immediate: Option<u32>,
}

/// An atomic compare and swap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CompareSwap {
    /// Remote memory.
    #[prost(message, optional, tag = "1")]
    pub remote: Option<Remote>,
    /// Expected value.
    #[prost(fixed64, tag = "2")]
    pub compare: u64,
    /// New value.
    #[prost(fixed64, tag = "3")]
    pub swap: u64,
}

/// An atomic fetch and add.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct FetchAdd {
    /// Remote memory.
    #[prost(message, optional, tag = "1")]
    pub remote: Option<Remote>,
    /// Addend.
    #[prost(fixed64, tag = "2")]
    pub add: u64,
}

/// A fast registration.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct FastRegister {
    /// New key.
    #[prost(fixed32, tag = "1")]
    pub key: u32,
    /// Address of the first byte.
    #[prost(uint64, tag = "2")]
    pub iova: u64,
    /// Length in bytes.
    #[prost(uint64, tag = "3")]
    pub length: u64,
    /// Access rights (`ibv_access_flags`).
    #[prost(uint32, tag = "4")]
    pub access: u32,
    /// Pages, which were copied when the request was taken from the ring. None if the list in the request was invalid.
    #[prost(message, optional, tag = "5")]
    pub pages: Option<PageList>,
}

/// A receive request.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RecvWr {
    /// Identifier chosen by the consumer.
    #[prost(uint64, tag = "1")]
    pub wr_id: u64,
    /// Local memory for the message.
    #[prost(message, repeated, tag = "2")]
    pub sges: Vec<Sge>,
    /// The request has more SGEs than the queue allows.
    #[prost(bool, tag = "3")]
    pub malformed: bool,
}
