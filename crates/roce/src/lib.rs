//! The RoCE transport: packet formats, and the requester, responder and datagram state machines. No I/O, no threads, no
//! clock, and no dependency that has one.
//!
//! A connected QP is two independent halves. [`Requester`] turns send requests into packets, takes the responses and
//! retransmits what was lost; [`Responder`] executes the peer's requests in PSN order and queues responses. They share
//! nothing but the [`Path`], so each can live behind the lock of its half. Datagrams need no state beyond a PSN:
//! [`DatagramSender`] and [`Datagram`].
//!
//! # Kinds of methods
//!
//! * `handle_*` take what happened: a packet that [`admit`] let through, or a deadline that has passed. `now` is an
//!   argument, a duration since any fixed origin.
//! * [`Requester::post`] takes work, while [`Requester::has_room`].
//! * `poll_transmit` writes the next frame into a caller's buffer, until it returns `None`. Call it after every
//!   `handle_*` and every `post`. Responses are coalesced by handling several packets first.
//! * [`Requester::poll_timeout`] says when `handle_timeout` is due. Only requesters have timers.
//!
//! Everything that concerns memory, queues and the consumer goes through [`RequesterOps`] and [`ResponderOps`], which
//! the owner of a QP implements with its checks and completion rules.
//!
//! # Rules
//!
//! The rules are those of the InfiniBand Architecture Specification volume 1 ("IBA"), chapter 9, for RC and UD;
//! go-back-N with three refinements that are invisible on the wire: what the responder is known to have executed is
//! not retransmitted, responses of an RDMA READ are taken in any order and what is missing of them is requested
//! again alone, and the ACK timeout backs off. A responder may buffer packets that come too early
//! ([`ReorderBuffer`]): the requester notices, and retransmits only what is missing. Two ends of this crate agree in
//! reserved bits of the BTH that a NAK says what has come behind the packet that it names ([`wire::SackMap`]). Large
//! reads are split into requests of a bounded length ([`Tuning::read_chunk`]), so that a responder that sends a whole
//! response in one go does not flood us.
//!
//! How a request is cut into packets is a value of its own, without a connection ([`PacketPlan`]).
//!
//! Each half describes itself as plain data ([`Requester::inspect`], [`Responder::inspect`]).
//!
//! Congestion control stands beside the halves, because both send at one rate: [`ReactionPoint`].
//!
//! Not here: end-to-end credits (received ones are ignored, and every ACK says that it carries none: IBA 9.7.7.2 asks
//! HCAs for them, and RoCE peers live without), automatic path migration, ATOMIC WRITE and FLUSH (refused), UC.

// The modules know the value types under the name of the crate that re-exports them.
extern crate pvrdma_verbs_types as pvrdma_verbs;

mod datagram;
mod dcqcn;
mod filter;
mod ops;
mod path;
mod quiet;
mod requester;
mod responder;
mod rnr_backoff;
mod split_mix;
pub mod wire;

pub use datagram::{Datagram, DatagramSender};
pub use dcqcn::{Congestion, MEGABIT, ReactionPoint};
pub use filter::{DropReason, admit, admit_connected, admit_notification};
pub use ops::{AccessError, AtomicChange, NakReason, Received, RequesterOps, ResponderOps};
pub use path::{EgressMarking, Origin, Path, PathInspect, datagram_traffic_class};
pub use quiet::Quiet;
pub use requester::inspect::{RequesterInspect, RunningTimer};
pub use requester::packet_plan::{PacketPlan, SizedWr};
pub use requester::{Requester, RequesterStats, Tuning};
pub use responder::{Handled, ReorderBuffer, Responder, ResponderInspect, ResponderStats};
pub use rnr_backoff::RnrBackoff;
