//! The RoCE transport: packet formats, and the state machines of requester, responder and datagrams. Neither this crate
//! nor its dependencies have I/O, threads or a clock.
//!
//! A connected QP consists of two independent halves. [`Requester`] turns send requests into packets, processes the
//! responses and retransmits lost packets; [`Responder`] executes the peer's requests in PSN order and queues
//! responses. They share only the [`Path`], so each half can have its own lock. Datagrams need no state beyond a PSN:
//! [`DatagramSender`] and [`Datagram`].
//!
//! # Kinds of methods
//!
//! * `handle_*` process an event: a packet that [`admit`] accepted, or a deadline that has passed. `now` is an
//!   argument, a duration since any fixed origin.
//! * [`Requester::post`] accepts a request, as long as [`Requester::has_room`] returns `true`.
//! * `poll_transmit` writes the next frame into the caller's buffer, until it returns `None`. Call it after every
//!   `handle_*` and every `post`. To coalesce responses, handle several packets first.
//! * [`Requester::poll_timeout`] returns the time at which `handle_timeout` is due. Only requesters have timers.
//!
//! All access to memory, queues and the consumer goes through [`RequesterOps`] and [`ResponderOps`], which the owner of
//! a QP implements with its checks and completion rules.
//!
//! # Rules
//!
//! The protocol is that of the InfiniBand Architecture Specification volume 1 ("IBA"), chapter 9, for RC and UD:
//! go-back-N with three refinements that are invisible on the wire. Packets that the responder is known to have
//! executed are not retransmitted; responses of an RDMA READ are accepted in any order, and only the missing ones are
//! requested again; and the ACK timeout backs off. A responder may buffer out-of-order packets ([`ReorderBuffer`]): the
//! requester notices this, and retransmits only the missing packets. Two endpoints of this crate agree, in reserved
//! bits of the BTH, that a NAK reports which packets have arrived after the one that it names ([`wire::SackMap`]). If
//! the administrators of both ends permit it ([`IcrcRule`]), they also leave the ICRC out.
//! Large reads are split into requests of a bounded length ([`Tuning::read_chunk`]), so that a responder that sends a
//! whole response in one burst does not overrun the requester.
//!
//! The division of a request into packets is a value of its own, independent of a connection ([`PacketPlan`]).
//!
//! Each half exports its state as plain data ([`Requester::inspect`], [`Responder::inspect`]), and can be saved and
//! restored ([`saved`]).
//!
//! Congestion control is separate from the halves, because both send at one common rate: [`ReactionPoint`].
//!
//! Not implemented: end-to-end credits (received ones are ignored, and every ACK announces that it carries none: IBA
//! 9.7.7.2 requires them of HCAs, and RoCE peers work without), automatic path migration, ATOMIC WRITE and FLUSH
//! (refused), UC.
//!
//! # Example
//!
//! The packets of a SEND of 2,500 bytes over a path with an MTU of 1,024 bytes:
//!
//! ```
//! use pvrdma_roce::{PacketPlan, SizedWr};
//! use pvrdma_verbs_types::{Mtu, SendData, SendOp, SendWr};
//!
//! let op = SendOp::Send { data: SendData::None, to: None };
//! let request = SendWr { op, ..SendWr::default() };
//! let request = SizedWr::new(&request, 2500, Mtu::M1024);
//!
//! let packets: Vec<PacketPlan> =
//!     (0..request.count).filter_map(|index| PacketPlan::new(&request, index, 1024, 1)).collect();
//! assert_eq!(packets.iter().map(|packet| packet.len).collect::<Vec<_>>(), [1024, 1024, 452]);
//! assert!(packets.last().is_some_and(|last| last.ends_message));
//! ```

// The modules refer to the value types by the name of the crate that re-exports them.
extern crate pvrdma_verbs_types as pvrdma_verbs;

mod datagram;
mod dcqcn;
mod filter;
mod path;
mod quiet;
mod requester;
mod responder;
mod rnr_backoff;
pub mod saved;
mod split_mix;
pub mod wire;

pub use datagram::{Datagram, DatagramSender};
pub use dcqcn::{Congestion, MEGABIT, ReactionPoint};
pub use filter::{DropReason, admit, admit_connected, admit_notification};
pub use path::{EgressMarking, IcrcRule, Origin, Path, PathInspect, datagram_traffic_class};
pub use quiet::Quiet;
pub use requester::inspect::{RequesterInspect, RunningTimer, SendWait};
pub use requester::packet_plan::{PacketPlan, SizedWr};
pub use requester::{Requester, RequesterStats, Tuning};
pub use responder::{Handled, ReorderBuffer, Responder, ResponderInspect, ResponderStats};
pub use rnr_backoff::RnrBackoff;
