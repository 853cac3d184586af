//! Messages of the software adapter: memory regions and queue pairs. They are contents of
//! [`crate::pvrdma::AdapterPart`]s, which carry one of them for each object.

use crate::pages::PageList;
use crate::roce;
use crate::work::{RecvWr, SendWr};

/// The tables of an adapter: its keys, without the regions, and its GIDs that cannot be used yet.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct AdapterTables {
    /// Index of the first slot in keys.
    #[prost(uint32, tag = "1")]
    pub base: u32,
    /// The last key byte of each slot. A slot that is not free has a region.
    #[prost(bytes = "vec", tag = "2")]
    pub keys: Vec<u8>,
    /// Free slots, in the order in which they are used.
    #[prost(uint32, repeated, tag = "3")]
    pub free: Vec<u32>,
    /// Indices of GIDs that wait because another device or host has the address.
    #[prost(uint32, repeated, tag = "4")]
    pub taken_gids: Vec<u32>,
    /// Indices of GIDs for which no host had been asked to the end.
    #[prost(uint32, repeated, tag = "5")]
    pub unasked_gids: Vec<u32>,
}

/// A memory region, without the parameters that the device has passed.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Region {
    /// Its key.
    #[prost(fixed32, tag = "1")]
    pub key: u32,
    /// Content of a fast-registered region, if its key is valid.
    #[prost(message, optional, tag = "2")]
    pub filled: Option<Filled>,
}

/// Content of a fast-registered region.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Filled {
    /// Address of the first byte.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// Length in bytes.
    #[prost(uint64, tag = "2")]
    pub length: u64,
    /// Access rights (`ibv_access_flags`).
    #[prost(uint32, tag = "3")]
    pub access: u32,
    /// Pages.
    #[prost(message, optional, tag = "4")]
    pub pages: Option<PageList>,
}

/// A shared receive queue, without its ring.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct SharedReceiveQueue {
    /// The ring can no longer be read.
    #[prost(bool, tag = "1")]
    pub broken: bool,
}

/// A queue pair, without its rings.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct QueuePair {
    /// State (`ibv_qp_state`).
    #[prost(uint32, tag = "1")]
    pub state: u32,
    /// The queue pair is in SQD with a request in flight.
    #[prost(bool, tag = "2")]
    pub draining: bool,
    /// Attributes.
    #[prost(message, optional, tag = "3")]
    pub attrs: Option<QpAttributes>,
    /// Source address of the connection, if it was found.
    #[prost(message, optional, tag = "4")]
    pub source: Option<Address>,
    /// The requester half.
    #[prost(message, optional, tag = "5")]
    pub requester: Option<Requester>,
    /// The responder half.
    #[prost(message, optional, tag = "6")]
    pub responder: Option<Responder>,
}

/// Attributes of a queue pair, except for its state.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct QpAttributes {
    /// Path MTU (`ibv_mtu`).
    #[prost(uint32, tag = "1")]
    pub path_mtu: u32,
    /// Q_Key.
    #[prost(fixed32, tag = "2")]
    pub qkey: u32,
    /// First PSN of the peer's requests.
    #[prost(uint32, tag = "3")]
    pub rq_psn: u32,
    /// First PSN of requests.
    #[prost(uint32, tag = "4")]
    pub sq_psn: u32,
    /// QPN of the peer.
    #[prost(uint32, tag = "5")]
    pub dest_qpn: u32,
    /// Operations that the peer may request (`ibv_access_flags`).
    #[prost(uint32, tag = "6")]
    pub access: u32,
    /// P_Key table index.
    #[prost(uint32, tag = "7")]
    pub pkey_index: u32,
    /// An event was requested when SQD is reached.
    #[prost(bool, tag = "8")]
    pub en_sqd_async_notify: bool,
    /// RDMA reads and atomics outstanding as requester.
    #[prost(uint32, tag = "9")]
    pub max_rd_atomic: u32,
    /// RDMA reads and atomics outstanding as responder.
    #[prost(uint32, tag = "10")]
    pub max_dest_rd_atomic: u32,
    /// Encoded RNR NAK timer.
    #[prost(uint32, tag = "11")]
    pub min_rnr_timer: u32,
    /// Port number.
    #[prost(uint32, tag = "12")]
    pub port_num: u32,
    /// Local ACK timeout.
    #[prost(uint32, tag = "13")]
    pub timeout: u32,
    /// Retransmissions before the QP gives up.
    #[prost(uint32, tag = "14")]
    pub retry_cnt: u32,
    /// Retransmissions after an RNR NAK.
    #[prost(uint32, tag = "15")]
    pub rnr_retry: u32,
    /// Path migration state.
    #[prost(uint32, tag = "16")]
    pub path_mig_state: u32,
    /// Path to the peer.
    #[prost(message, optional, tag = "17")]
    pub av: Option<AddressVector>,
}

/// Path to the peer of a connected queue pair.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct AddressVector {
    /// Destination GID, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub dgid: Vec<u8>,
    /// Index of the source GID.
    #[prost(uint32, tag = "2")]
    pub sgid_index: u32,
    /// Flow label.
    #[prost(uint32, tag = "3")]
    pub flow_label: u32,
    /// Hop limit.
    #[prost(uint32, tag = "4")]
    pub hop_limit: u32,
    /// Traffic class.
    #[prost(uint32, tag = "5")]
    pub traffic_class: u32,
    /// Service level.
    #[prost(uint32, tag = "6")]
    pub service_level: u32,
    /// Destination MAC address, 6 bytes.
    #[prost(bytes = "vec", tag = "7")]
    pub dmac: Vec<u8>,
}

/// A bound GID.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Address {
    /// The GID, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub gid: Vec<u8>,
    /// The encapsulation is RoCE v1 and not v2.
    #[prost(bool, tag = "2")]
    pub v1: bool,
    /// VLAN, if it has one.
    #[prost(uint32, optional, tag = "3")]
    pub vlan: Option<u32>,
}

/// The requester half of a queue pair.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Requester {
    /// The ring can no longer be read.
    #[prost(bool, tag = "1")]
    pub broken: bool,
    /// The request in flight of local delivery or of datagrams, which starts from its beginning.
    #[prost(message, optional, tag = "2")]
    pub current: Option<SendWr>,
    /// Retransmissions left in local delivery.
    #[prost(uint32, tag = "3")]
    pub retries: u32,
    /// Retransmissions after RNR NAKs left in local delivery.
    #[prost(uint32, tag = "4")]
    pub rnr_retries: u32,
    /// The guest wants an event when the send queue is drained.
    #[prost(bool, tag = "5")]
    pub notify_drained: bool,
    /// Requests that succeeded since RESET.
    #[prost(uint64, tag = "6")]
    pub requests: u64,
    /// Bytes in them.
    #[prost(uint64, tag = "7")]
    pub bytes: u64,
    /// Path of requests.
    #[prost(oneof = "Route", tags = "8, 9, 10, 11")]
    pub route: Option<Route>,
}

/// Path of requests to their peer.
#[derive(Clone, PartialEq, Eq, Hash, prost::Oneof)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Route {
    /// The peer was not found yet. The number identifies the connection, as in `Local`.
    #[prost(uint64, tag = "8")]
    Unresolved(u64),
    /// The peer is in this process. The number identifies the connection among those that are saved together; 0: no
    /// request was accepted yet.
    #[prost(uint64, tag = "9")]
    Local(u64),
    /// The peer is on the network.
    #[prost(message, boxed, tag = "10")]
    Wire(Box<WireRequester>),
    /// Each request has its own path.
    #[prost(message, tag = "11")]
    Datagram(Datagrams),
}

/// The requester of a peer on the network.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WireRequester {
    /// Source address of its packets. None: no packet can be sent.
    #[prost(message, optional, tag = "1")]
    pub source: Option<Address>,
    /// State of the transport.
    #[prost(message, optional, tag = "2")]
    pub transport: Option<roce::Requester>,
}

/// State of a datagram queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Datagrams {
    /// PSN of the next packet, if one was sent.
    #[prost(uint32, optional, tag = "1")]
    pub psn: Option<u32>,
}

/// The responder half of a queue pair.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Responder {
    /// The ring can no longer be read.
    #[prost(bool, tag = "1")]
    pub broken: bool,
    /// The receive in use.
    #[prost(message, optional, tag = "2")]
    pub receive: Option<RecvWr>,
    /// The first request in RTR has arrived.
    #[prost(bool, tag = "3")]
    pub established: bool,
    /// The event that no receive of the SRQ is left was raised.
    #[prost(bool, tag = "4")]
    pub last_wqe_raised: bool,
    /// Connection whose requests are accepted: 0 for none yet, 1 for one on the network, otherwise as in
    /// [`Route::Local`].
    #[prost(uint64, tag = "5")]
    pub connection: u64,
    /// State for a peer on the network.
    #[prost(message, optional, tag = "6")]
    pub wire: Option<WireResponder>,
}

/// The responder for a peer on the network.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WireResponder {
    /// Source address of its packets. None: no packet can be sent.
    #[prost(message, optional, tag = "1")]
    pub source: Option<Address>,
    /// The queue pair ended while a request was handled, and owes the response.
    #[prost(bool, tag = "2")]
    pub refused: bool,
    /// State of the transport.
    #[prost(message, optional, tag = "3")]
    pub transport: Option<roce::Responder>,
}
