// Long: the messages of a device, in the order in which they are written.
//! Messages of the RDMA function: registers, session, rings and objects. Kinds `0x01xx`.
//!
//! [`Device`] is first. [`Table`]s, event rings and objects follow, each object after those that it names. The
//! adapter's part of the state that belongs to no object precedes [`AdapterTables`].
//!
//! Two kinds of records have variable length, and belong to the next record of another kind: the list of pages of an
//! object ([`Pages`]) and the adapter's part of it ([`AdapterPart`]). Each may be divided among several records.

use crate::stream::records;

/// The function without its objects.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Device {
    /// Configuration space.
    #[prost(bytes = "vec", tag = "1")]
    pub config_space: Vec<u8>,
    /// Interface version of the device.
    #[prost(uint32, tag = "2")]
    pub version: u32,
    /// Encapsulation of all GIDs.
    #[prost(enumeration = "Encapsulation", tag = "3")]
    pub roce: i32,
    /// Name of the format of the adapter's parts.
    #[prost(string, tag = "4")]
    pub adapter: String,
    /// Register DSRLOW.
    #[prost(uint32, tag = "5")]
    pub dsr_low: u32,
    /// Register ERR.
    #[prost(uint32, tag = "6")]
    pub err: u32,
    /// Register MACL.
    #[prost(uint32, tag = "7")]
    pub mac_low: u32,
    /// Register MACH.
    #[prost(uint32, tag = "8")]
    pub mac_high: u32,
    /// Register IMR.
    #[prost(uint32, tag = "9")]
    pub interrupt_mask: u32,
    /// Register ICR.
    #[prost(uint32, tag = "10")]
    pub interrupt_cause: u32,
    /// Phase of the driver.
    #[prost(enumeration = "Phase", tag = "11")]
    pub phase: i32,
    /// Result of the handshake, unless the phase is `Reset`.
    #[prost(message, optional, tag = "12")]
    pub session: Option<Session>,
    /// Limits in force.
    #[prost(message, optional, tag = "13")]
    pub limits: Option<Limits>,
}

/// Encapsulation of a GID's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Encapsulation {
    /// Not a value.
    None = 0,
    /// RoCE v1.
    RoceV1 = 1,
    /// RoCE v2.
    RoceV2 = 2,
}

/// Phase of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Phase {
    /// No shared region is installed.
    Reset = 0,
    /// The shared region was accepted.
    Handshake = 1,
    /// Commands are served.
    Active = 2,
}

/// Result of a handshake.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Session {
    /// Bus address of the command slot.
    #[prost(uint64, tag = "1")]
    pub command_slot: u64,
    /// Bus address of the response slot.
    #[prost(uint64, tag = "2")]
    pub response_slot: u64,
    /// Guest page number of BAR 2.
    #[prost(uint64, tag = "3")]
    pub uar_pfn: u64,
    /// Version that both sides use.
    #[prost(uint32, tag = "4")]
    pub version: u32,
    /// Bus address of the shared region; 0 if the writer did not know it. The driver is told there if the device fails.
    #[prost(uint64, tag = "5")]
    pub shared_region: u64,
}

/// Limits in force: those that the driver has read.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Limits {
    /// Queue pairs.
    #[prost(uint32, tag = "1")]
    pub max_qp: u32,
    /// Requests per queue.
    #[prost(uint32, tag = "2")]
    pub max_qp_wr: u32,
    /// SGEs per request.
    #[prost(uint32, tag = "3")]
    pub max_sge: u32,
    /// Completion queues.
    #[prost(uint32, tag = "4")]
    pub max_cq: u32,
    /// Entries per completion queue.
    #[prost(uint32, tag = "5")]
    pub max_cqe: u32,
    /// Memory regions.
    #[prost(uint32, tag = "6")]
    pub max_mr: u32,
    /// Bytes per memory region.
    #[prost(uint64, tag = "7")]
    pub max_mr_size: u64,
    /// Protection domains.
    #[prost(uint32, tag = "8")]
    pub max_pd: u32,
    /// Shared receive queues.
    #[prost(uint32, tag = "9")]
    pub max_srq: u32,
    /// RDMA reads and atomics outstanding per QP.
    #[prost(uint32, tag = "10")]
    pub max_rd_atomic: u32,
    /// Atomics are supported.
    #[prost(bool, tag = "11")]
    pub atomics: bool,
    /// Fast registration and invalidation are supported.
    #[prost(bool, tag = "12")]
    pub memory_management: bool,
    /// Requests per shared receive queue.
    #[prost(uint32, tag = "13")]
    pub max_srq_wr: u32,
    /// Doorbell pages.
    #[prost(uint32, tag = "14")]
    pub max_uar: u32,
    /// Address handles of the guest's kernel.
    #[prost(uint32, tag = "15")]
    pub max_ah: u32,
    /// GID table entries.
    #[prost(uint32, tag = "16")]
    pub gid_table: u32,
}

/// Kind of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum ObjectKind {
    /// Not a value.
    None = 0,
    /// Contexts.
    Context = 1,
    /// Protection domains.
    Pd = 2,
    /// Memory regions.
    Mr = 3,
    /// Completion queues.
    Cq = 4,
    /// Shared receive queues.
    Srq = 5,
    /// Queue pairs.
    Qp = 6,
}

/// State of a handle table that determines the next handles.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Table {
    /// Kind of its objects.
    #[prost(enumeration = "ObjectKind", tag = "1")]
    pub kind: i32,
    /// First handle after a reset of the driver.
    #[prost(uint32, tag = "2")]
    pub begin: u32,
    /// First handle to try for the next object.
    #[prost(uint32, tag = "3")]
    pub next: u32,
    /// Number of passes through the table.
    #[prost(uint32, tag = "4")]
    pub rounds: u32,
}

/// Pages of the object that follows, appended to those of records before. Both lists have the same length.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Pages {
    /// Bus addresses of runs of adjacent pages.
    #[prost(uint64, repeated, tag = "1")]
    pub addresses: Vec<u64>,
    /// Number of pages of each run.
    #[prost(uint32, repeated, tag = "2")]
    pub counts: Vec<u32>,
}

/// The adapter's part of the object that follows, appended to that of records before.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct AdapterPart {
    /// Bytes in the adapter's format.
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
}

/// The adapter's state that belongs to no object, which precedes this record.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct AdapterTables {}

/// An event ring; its pages precede it, unless it is shut. The asynchronous ring comes first.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct EventRing {
    /// Index that the device publishes. Missing: the ring is shut.
    #[prost(uint32, optional, tag = "1")]
    pub tail: Option<u32>,
}

/// Events that wait for room in the event ring before this record, in order. All lists of a ring belong together.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WaitingEvents {
    /// Type of each event; empty for notifications.
    #[prost(uint32, repeated, tag = "1")]
    pub kinds: Vec<u32>,
    /// Handle or port of each event.
    #[prost(uint32, repeated, tag = "2")]
    pub subjects: Vec<u32>,
}

/// A context.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Context {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// Index of its doorbell page.
    #[prost(uint32, tag = "2")]
    pub uar_page: u32,
}

/// A protection domain.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Pd {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// Handle of its context, 0 for the kernel.
    #[prost(uint32, tag = "2")]
    pub owner: u32,
}

/// Completions for which a completion queue is armed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Armed {
    /// None.
    Not = 0,
    /// Solicited ones and errors.
    Solicited = 1,
    /// All.
    Any = 2,
}

/// A completion queue; its pages precede it: of a dead queue, only the first.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Cq {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// Handle of its context, 0 for the kernel.
    #[prost(uint32, tag = "2")]
    pub owner: u32,
    /// Number of entries.
    #[prost(uint32, tag = "3")]
    pub entries: u32,
    /// Index that the device publishes. Missing: the queue is dead.
    #[prost(uint32, optional, tag = "4")]
    pub tail: Option<u32>,
    /// Completions for which it is armed.
    #[prost(enumeration = "Armed", tag = "5")]
    pub armed: i32,
    /// Set if the guest may have armed the queue unnoticed.
    #[prost(message, optional, tag = "6")]
    pub unheard: Option<Unheard>,
}

/// State of a completion queue whose doorbells did not trap.
#[derive(Clone, Copy, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Unheard {
    /// The guest was notified of all completions in the queue. If it was not, it is notified when the device resumes.
    #[prost(bool, tag = "1")]
    pub announced: bool,
    /// Time in nanoseconds for which the guest may leave completions in the queue before it is notified, where
    /// doorbells still do not trap.
    #[prost(uint64, tag = "2")]
    pub delay: u64,
}

/// Reason why a ring cannot be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum BrokenBy {
    /// The ring can be used.
    Nothing = 0,
    /// The guest's index is not below twice the number of elements.
    OutOfRange = 1,
    /// The guest's index is more than the ring ahead.
    TooFarAhead = 2,
    /// The guest's index is behind requests that were taken.
    BehindTaken = 3,
}

/// Position of the device in a ring that the guest fills.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RingPosition {
    /// Index of the next request to take.
    #[prost(uint32, tag = "1")]
    pub next: u32,
    /// Index of the oldest request whose slot was not returned.
    #[prost(uint32, tag = "2")]
    pub head: u32,
    /// Reason why the ring cannot be used.
    #[prost(enumeration = "BrokenBy", tag = "3")]
    pub broken: i32,
    /// The guest's index that is the reason.
    #[prost(uint32, tag = "4")]
    pub broken_index: u32,
}

/// A shared receive queue; its pages and the adapter's part precede it.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Srq {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// Handle of its protection domain.
    #[prost(uint32, tag = "2")]
    pub pd: u32,
    /// Size in requests.
    #[prost(uint32, tag = "3")]
    pub max_wr: u32,
    /// SGEs per request.
    #[prost(uint32, tag = "4")]
    pub max_sge: u32,
    /// Number of requests below which the guest gets an event, 0 if disarmed.
    #[prost(uint32, tag = "5")]
    pub limit: u32,
    /// Position in the ring.
    #[prost(message, optional, tag = "6")]
    pub ring: Option<RingPosition>,
}

/// Kind of a memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum MrKind {
    /// Not a value.
    None = 0,
    /// Memory of a process.
    User = 1,
    /// All bus addresses, for the kernel.
    Dma = 2,
    /// A region that work requests fill.
    FastRegister = 3,
}

/// A memory region; its pages, if it is of a process, and the adapter's part precede it.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Mr {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// Handle of its protection domain.
    #[prost(uint32, tag = "2")]
    pub pd: u32,
    /// Kind.
    #[prost(enumeration = "MrKind", tag = "3")]
    pub kind: i32,
    /// Virtual address of the first byte, of memory of a process.
    #[prost(uint64, tag = "4")]
    pub start: u64,
    /// Bytes, of memory of a process.
    #[prost(uint64, tag = "5")]
    pub length: u64,
    /// Access rights.
    #[prost(uint32, tag = "6")]
    pub access: u32,
    /// Maximum number of pages of a region that work requests fill.
    #[prost(uint32, tag = "7")]
    pub max_pages: u32,
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum QpType {
    /// Not a value.
    None = 0,
    /// Reliable connection.
    Rc = 1,
    /// Unreliable datagrams.
    Ud = 2,
    /// General services.
    Gsi = 3,
}

/// A queue pair; its pages and the adapter's part precede it.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Qp {
    /// Handle.
    #[prost(uint32, tag = "1")]
    pub handle: u32,
    /// QPN.
    #[prost(uint32, tag = "2")]
    pub qpn: u32,
    /// Transport service.
    #[prost(enumeration = "QpType", tag = "3")]
    pub qp_type: i32,
    /// Handle of its protection domain.
    #[prost(uint32, tag = "4")]
    pub pd: u32,
    /// Handle of the completion queue of sends. Missing: the guest has destroyed the queue.
    #[prost(uint32, optional, tag = "5")]
    pub send_cq: Option<u32>,
    /// Handle of the completion queue of receives. Missing: the guest has destroyed the queue.
    #[prost(uint32, optional, tag = "6")]
    pub recv_cq: Option<u32>,
    /// It has a shared receive queue.
    #[prost(bool, tag = "16")]
    pub has_srq: bool,
    /// Handle of its shared receive queue. Missing: it has none, or the guest has destroyed the queue.
    #[prost(uint32, optional, tag = "7")]
    pub srq: Option<u32>,
    /// Requests of the send ring.
    #[prost(uint32, tag = "8")]
    pub max_send_wr: u32,
    /// Requests of the receive ring, 0 with a shared receive queue.
    #[prost(uint32, tag = "9")]
    pub max_recv_wr: u32,
    /// SGEs of a send request.
    #[prost(uint32, tag = "10")]
    pub max_send_sge: u32,
    /// SGEs of a receive request, 0 with a shared receive queue.
    #[prost(uint32, tag = "11")]
    pub max_recv_sge: u32,
    /// Each send request generates a completion.
    #[prost(bool, tag = "12")]
    pub signal_all: bool,
    /// Number of pages of the send ring, after the page with the ring state and before the pages of the receive ring.
    #[prost(uint32, tag = "13")]
    pub send_pages: u32,
    /// Position in the send ring.
    #[prost(message, optional, tag = "14")]
    pub send_ring: Option<RingPosition>,
    /// Position in the receive ring.
    #[prost(message, optional, tag = "15")]
    pub recv_ring: Option<RingPosition>,
}

/// A bound GID.
#[derive(Clone, PartialEq, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Gid {
    /// Index in the table.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// The GID.
    #[prost(bytes = "vec", tag = "2")]
    pub gid: Vec<u8>,
    /// VLAN, 0 for none.
    #[prost(uint32, tag = "3")]
    pub vlan: u32,
}

records! {
    0x0101 => Device,
    0x0102 => Table,
    0x0103 => Pages,
    0x0104 => AdapterPart,
    0x0105 => AdapterTables,
    0x0106 => EventRing,
    0x0107 => WaitingEvents,
    0x0108 => Context,
    0x0109 => Pd,
    0x010a => Cq,
    0x010b => Srq,
    0x010c => Mr,
    0x010d => Qp,
    0x010e => Gid,
}
