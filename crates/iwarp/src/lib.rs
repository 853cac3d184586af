//! The iWARP protocols: MPA, DDP and RDMAP over a byte stream. Neither this crate nor its dependencies have I/O,
//! threads or a clock. The caller provides TCP.
//!
//! A [`Connection`] is all of it: bytes of the socket and requests of the consumer go in, bytes, completions and
//! [`Event`]s come out. It consists of the MPA startup ([`Initiator`], [`Responder`]), which results in [`Negotiated`],
//! and of a [`Stream`] from then on. A stream serves both directions, because a single segment may carry a message of
//! the peer, and because responses to the peer's READs leave between the requests of this end. An owner that keeps the
//! bytes of a connection elsewhere can use the parts by themselves.
//!
//! # Kinds of methods
//!
//! * [`Stream::post`] accepts a request, as long as [`Stream::has_room`] returns `true`.
//! * [`Stream::receive`] takes bytes of the peer and returns how many of them it has processed. The caller keeps the
//!   rest, at most [`wire::fpdu::MAX_FPDU`] bytes, and passes it again in front of the next bytes. The rest is an
//!   incomplete FPDU, or begins with a SEND for which no receive is posted ([`Stream::waits_for_receive`]). In the
//!   second case the caller stops reading, so that the window of TCP holds off the peer.
//! * [`Stream::poll_transmit`] writes the next FPDU into the caller's buffer, until it returns `None`. Call it after
//!   each other method.
//! * [`Stream::taken`] reports that TCP has accepted bytes that `poll_transmit` returned.
//! * [`Stream::handle_timeout`] is due at [`Stream::poll_timeout`]. `now` is a duration since any fixed origin.
//!
//! All access to memory, queues and the consumer goes through [`RequesterOps`](pvrdma_verbs_types::RequesterOps) and
//! [`ResponderOps`](pvrdma_verbs_types::ResponderOps). The owner of a QP implements them with its checks and completion
//! rules.
//!
//! # Rules
//!
//! The protocol is that of RFC 5040 (RDMAP), 5041 (DDP), 5044 and 6581 (MPA). Where these leave a choice, this crate
//! follows these rules:
//!
//! * No part of an FPDU is placed before the FPDU is complete and its CRC has been checked.
//! * A SEND or WRITE completes when TCP has accepted all of it, because its memory can then be reused. This says
//!   nothing about delivery; only a READ can confirm that (RFC 5040 5.5).
//! * The STag that a READ names as its sink is invented and refers to no memory. A response is accepted for the oldest
//!   READ only, at exactly the next offset, and scattered to the SGEs of the request. So a READ opens no memory to the
//!   peer's WRITEs.
//! * STag 0 is never sent, because adapters refuse it even in messages without data.
//! * A responder sends nothing before the first FPDU has arrived (RFC 5044 7.1.2).
//! * A request that iWARP lacks (SEND or WRITE with immediate data, atomics) completes with a local QP operation error.
//!
//! Not implemented: markers; the extensions of RFC 7306 (atomics, immediate data).
//!
//! # Example
//!
//! Two ends agree on the properties of a connection:
//!
//! ```
//! use std::time::Duration;
//! use pvrdma_iwarp::{Answer, Initiator, Limits, Responder};
//!
//! let now = Duration::ZERO;
//! let limits = Limits { ird: 16, ord: 16, crc: true };
//! let initiator = Initiator::new(now, limits, b"hello")?;
//! let incoming = Responder::new(now).handle_bytes(&initiator.request()).unwrap().unwrap();
//! assert_eq!(incoming.private_data(), b"hello");
//!
//! let (reply, _) = incoming.accept(Limits { ird: 4, ..limits }, b"welcome").unwrap();
//! let Ok(Some(Answer::Accepted { negotiated, .. })) = initiator.handle_bytes(&reply) else { unreachable!() };
//! assert_eq!((negotiated.crc, negotiated.ord), (true, 4));
//! # Ok::<(), pvrdma_iwarp::StartupError>(())
//! ```

mod connection;
mod startup;
mod stream;
pub mod wire;

pub use connection::{Connection, Event};
pub use startup::{
    Answer, Incoming, Initiator, Limits, MAX_PROGRAM_DATA, Negotiated, REPLY_TIMEOUT, REQUEST_TIMEOUT, Responder, Role,
    Rtr, StartupError, StartupFailure,
};
pub use stream::inspect::StreamInspect;
pub use stream::{Close, End, Finished, Stream, StreamStats, Tuning};
