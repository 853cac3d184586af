//! Messages of the RoCE engine, parts of those in [`crate::rxe`]: the two halves of a connected queue pair.
//!
//! Timers, round-trip times, congestion windows, path choices and reorder buffers are not saved: a restored requester
//! goes back to its oldest PSN, and a restored responder tells a peer that agreed on selective acknowledgements that it
//! keeps no packets.

use crate::work::SendWr;

/// The requester half.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Requester {
    /// Oldest PSN that is not done.
    #[prost(uint32, tag = "1")]
    pub una: u32,
    /// Number of PSNs from `una` on that the responder is known to have executed.
    #[prost(uint32, tag = "2")]
    pub executed: u32,
    /// Number of PSNs from `una` on that were sent.
    #[prost(uint32, tag = "3")]
    pub sent: u32,
    /// Number of PSNs from `una` on that belong to posted requests.
    #[prost(uint64, tag = "4")]
    pub posted: u64,
    /// Requests that were posted and have not ended, in order.
    #[prost(message, repeated, tag = "5")]
    pub requests: Vec<Request>,
    /// Division of READs into requests.
    #[prost(message, optional, tag = "6")]
    pub reads: Option<ReadGrid>,
    /// Selective acknowledgements: whether the peer has agreed.
    #[prost(enumeration = "Agreement", tag = "7")]
    pub sack: i32,
    /// Retransmissions left before the connection fails.
    #[prost(uint32, tag = "8")]
    pub retries: u32,
    /// Retransmissions after RNR NAKs left before the connection fails.
    #[prost(uint32, tag = "9")]
    pub rnr_retries: u32,
    /// Microseconds until the wait that an RNR NAK requested is over; 0 if there is none.
    #[prost(uint32, tag = "10")]
    pub rnr_wait: u32,
    /// No new request is started (SQD).
    #[prost(bool, tag = "11")]
    pub draining: bool,
    /// All requests were flushed.
    #[prost(bool, tag = "12")]
    pub ended: bool,
    /// The request that ends the QP when all before it are done.
    #[prost(message, optional, tag = "13")]
    pub failing: Option<Failing>,
    /// UDP source port of responses on the connection's own path, once one has arrived.
    #[prost(uint32, optional, tag = "14")]
    pub peer_port: Option<u32>,
    /// Counters.
    #[prost(message, optional, tag = "15")]
    pub stats: Option<RequesterStats>,
}

/// State of the agreement on selective acknowledgements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Agreement {
    /// They are not used.
    Off = 0,
    /// The requester offers to accept them, or the responder accepts an offer.
    Open = 1,
    /// They are used.
    On = 2,
}

/// A request that fails.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Failing {
    /// Number of PSNs from `una` to one of the request.
    #[prost(uint32, tag = "1")]
    pub seq: u32,
    /// Status with which it completes (`ibv_wc_status`).
    #[prost(uint32, tag = "2")]
    pub status: u32,
}

/// Division of READs into requests. Positions count from the first PSN of the oldest request.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ReadGrid {
    /// PSNs per READ request from `new_since` on.
    #[prost(uint32, tag = "1")]
    pub new_length: u32,
    /// Position from which on `new_length` applies.
    #[prost(uint32, tag = "2")]
    pub new_since: u32,
    /// PSNs per READ request before `new_since`.
    #[prost(uint32, tag = "3")]
    pub old_length: u32,
    /// Position from which on `old_length` applies.
    #[prost(uint32, tag = "4")]
    pub old_since: u32,
    /// Positions at which READ requests were split.
    #[prost(uint32, repeated, tag = "5")]
    pub splits: Vec<u32>,
}

/// Counters of a requester.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RequesterStats {
    /// Packets sent.
    #[prost(uint64, tag = "1")]
    pub packets: u64,
    /// Packets sent that had been sent before.
    #[prost(uint64, tag = "2")]
    pub retransmitted: u64,
    /// Probes.
    #[prost(uint64, tag = "3")]
    pub probes: u64,
    /// ACK timeouts.
    #[prost(uint64, tag = "4")]
    pub timeouts: u64,
    /// Sequence NAKs acted upon.
    #[prost(uint64, tag = "5")]
    pub sequence_naks: u64,
    /// Repeated requests for missing responses.
    #[prost(uint64, tag = "6")]
    pub lost_responses: u64,
    /// RNR NAKs acted upon.
    #[prost(uint64, tag = "7")]
    pub rnr_naks: u64,
    /// Changes of path.
    #[prost(uint64, tag = "8")]
    pub rehashed: u64,
    /// Responses that belonged to no outstanding request.
    #[prost(uint64, tag = "9")]
    pub stale: u64,
}

/// A posted request of a requester.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Request {
    /// The request.
    #[prost(message, optional, tag = "1")]
    pub work: Option<SendWr>,
    /// Progress of the request.
    #[prost(enumeration = "Stage", tag = "2")]
    pub stage: i32,
    /// Status with which a failed request completes (`ibv_wc_status`).
    #[prost(uint32, tag = "3")]
    pub status: u32,
}

/// Progress of a posted request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Stage {
    /// It was not checked yet.
    Posted = 0,
    /// It may be sent; a local one is done.
    Started = 1,
    /// It completes with an error when its turn comes.
    Failed = 2,
}

/// The responder half.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Responder {
    /// PSN that is executed next.
    #[prost(uint32, tag = "1")]
    pub expected: u32,
    /// Messages completed, 24 bits.
    #[prost(uint32, tag = "2")]
    pub msn: u32,
    /// The message in progress.
    #[prost(oneof = "Message", tags = "3, 4")]
    pub message: Option<Message>,
    /// The NAK that was sent for `expected`.
    #[prost(enumeration = "NakSent", tag = "5")]
    pub nak_sent: i32,
    /// PSN of the newest SEND or WRITE packet executed.
    #[prost(uint32, tag = "6")]
    pub ack_psn: u32,
    /// Messages that were complete at `ack_psn`.
    #[prost(uint32, tag = "7")]
    pub ack_msn: u32,
    /// A sequence NAK was sent.
    #[prost(bool, tag = "8")]
    pub has_sent_nak: bool,
    /// Newest duplicate that got no ACK.
    #[prost(uint32, optional, tag = "9")]
    pub unacked_duplicate: Option<u32>,
    /// The peer has repeated a READ or atomic after such a duplicate.
    #[prost(bool, tag = "10")]
    pub peer_goes_back: bool,
    /// Responses to be sent, in order.
    #[prost(message, repeated, tag = "11")]
    pub responses: Vec<Response>,
    /// Executed READs and atomics whose responses can be repeated, the oldest first.
    #[prost(message, repeated, tag = "12")]
    pub resources: Vec<Resource>,
    /// Selective acknowledgements: whether the peer has agreed.
    #[prost(enumeration = "Agreement", tag = "13")]
    pub sack: i32,
    /// Responses follow the path of requests.
    #[prost(bool, tag = "14")]
    pub follows: bool,
    /// UDP source port of requests on the peer's own path, once one has arrived.
    #[prost(uint32, optional, tag = "15")]
    pub peer_port: Option<u32>,
    /// Nothing is executed any more.
    #[prost(bool, tag = "16")]
    pub ended: bool,
    /// Counters.
    #[prost(message, optional, tag = "17")]
    pub stats: Option<ResponderStats>,
}

/// A message with packets still to come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Oneof)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Message {
    /// A SEND of which this number of bytes is in the receive in use.
    #[prost(uint32, tag = "3")]
    Send(u32),
    /// An RDMA WRITE.
    #[prost(message, tag = "4")]
    Write(WriteInProgress),
}

/// An RDMA WRITE with packets still to come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WriteInProgress {
    /// Address of the next byte.
    #[prost(uint64, tag = "1")]
    pub addr: u64,
    /// R_Key.
    #[prost(fixed32, tag = "2")]
    pub rkey: u32,
    /// Bytes still to come.
    #[prost(uint32, tag = "3")]
    pub left: u32,
    /// Bytes of the whole message.
    #[prost(uint32, tag = "4")]
    pub length: u32,
}

/// The NAK that was sent for the expected PSN.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum NakSent {
    /// None.
    None = 0,
    /// A sequence NAK.
    Sequence = 1,
    /// An RNR NAK.
    Rnr = 2,
}

/// A response to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Response {
    /// PSN of its next packet.
    #[prost(uint32, tag = "1")]
    pub psn: u32,
    /// Messages that were complete with the request.
    #[prost(uint32, tag = "2")]
    pub msn: u32,
    /// Kind of the response.
    #[prost(oneof = "ResponseKind", tags = "3, 4, 5, 6")]
    pub kind: Option<ResponseKind>,
}

/// Kind of a response.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Oneof)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum ResponseKind {
    /// An ACK. The value is always `true`.
    #[prost(bool, tag = "3")]
    Ack(bool),
    /// A NAK with this syndrome (IBA 9.7.5.2.8).
    #[prost(uint32, tag = "4")]
    Nak(u32),
    /// Data of a READ.
    #[prost(message, tag = "5")]
    Read(ReadResponse),
    /// The result of an atomic.
    #[prost(message, tag = "6")]
    Atomic(AtomicResponse),
}

/// The rest of the response of a READ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ReadResponse {
    /// First PSN of the request.
    #[prost(uint32, tag = "1")]
    pub request: u32,
    /// Address of the next byte.
    #[prost(uint64, tag = "2")]
    pub addr: u64,
    /// R_Key.
    #[prost(fixed32, tag = "3")]
    pub rkey: u32,
    /// Bytes still to be sent.
    #[prost(uint32, tag = "4")]
    pub length: u32,
    /// Nothing of this transmission was sent.
    #[prost(bool, tag = "5")]
    pub starts: bool,
    /// The response is a repetition.
    #[prost(bool, tag = "6")]
    pub duplicate: bool,
}

/// The result of an atomic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct AtomicResponse {
    /// Value before the operation.
    #[prost(fixed64, tag = "1")]
    pub original: u64,
    /// The response is a repetition.
    #[prost(bool, tag = "2")]
    pub duplicate: bool,
}

/// An executed READ or atomic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Resource {
    /// First PSN of the request.
    #[prost(uint32, tag = "1")]
    pub psn: u32,
    /// Operation.
    #[prost(oneof = "Executed", tags = "2, 3")]
    pub executed: Option<Executed>,
}

/// An executed operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Oneof)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Executed {
    /// A READ of this memory.
    #[prost(message, tag = "2")]
    Read(ReadRange),
    /// An atomic that found this value.
    #[prost(fixed64, tag = "3")]
    Atomic(u64),
}

/// Memory that a READ names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ReadRange {
    /// Address of the first byte.
    #[prost(uint64, tag = "1")]
    pub addr: u64,
    /// R_Key.
    #[prost(fixed32, tag = "2")]
    pub rkey: u32,
    /// Length in bytes.
    #[prost(uint32, tag = "3")]
    pub length: u32,
}

/// Counters of a responder.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ResponderStats {
    /// Packets executed.
    #[prost(uint64, tag = "1")]
    pub executed: u64,
    /// Duplicates of executed packets.
    #[prost(uint64, tag = "2")]
    pub duplicates: u64,
    /// Packets that arrived before the expected one.
    #[prost(uint64, tag = "3")]
    pub out_of_sequence: u64,
    /// RNR NAKs sent.
    #[prost(uint64, tag = "4")]
    pub not_ready: u64,
    /// Requests refused.
    #[prost(uint64, tag = "5")]
    pub refused: u64,
    /// Acknowledgements and responses sent.
    #[prost(uint64, tag = "6")]
    pub responses: u64,
}
