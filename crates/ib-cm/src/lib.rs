//! The communication manager of InfiniBand, which RoCE uses as well: its messages, and connections from setup to
//! release. Neither this crate nor its dependencies have I/O, threads or a clock.
//!
//! [`Mad`] is a message, as bytes and as a value. [`Connection`] is one end of a connection, in either role, from the
//! request to the end of the time in which late messages may arrive. The methods are those of a protocol without I/O:
//! [`Connection::handle_message`] and [`Connection::handle_timeout`] process events and return their meaning for the
//! owner; [`Connection::poll_transmit`] returns the next datagram, and [`Connection::poll_timeout`] the next deadline.
//! The owner finds the connection of a message by its communication IDs ([`Message::destination`]); a REQ begins one.
//! [`terminated`] has all connections of a guest whose peers its host reaches by other means.
//!
//! Formats and states follow the InfiniBand Architecture Specification volume 1 ("IBA"), chapter 12, and annex A11 for
//! the addresses in the private data ([`IpAddresses`]).
//!
//! Not implemented: service ID resolution, alternate paths (LAP, APR).
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use pvrdma_ib_cm::{Connection, Mad, Message, RejectReason, Req};
//!
//! let now = Duration::ZERO;
//! let request = Mad { transaction: 1, message: Message::Req(Box::new(Req { local_id: 7, ..Req::default() })) };
//! let received = Mad::parse(&request.to_bytes())?;
//! let Message::Req(request) = received.message else { unreachable!() };
//!
//! let mut connection = Connection::incoming(now, 8, received.transaction, *request);
//! connection.reject(now, RejectReason::INVALID_SERVICE_ID, &[]);
//! let reply = connection.poll_transmit().map(|bytes| Mad::parse(&bytes));
//! assert!(matches!(reply, Some(Ok(Mad { message: Message::Rej(rej), .. })) if rej.remote_id == 7));
//! # Ok::<(), pvrdma_ib_cm::MadError>(())
//! ```

mod addresses;
mod connection;
mod mad;
mod message;
mod req;
pub mod terminated;

pub use addresses::{IpAddresses, PORT_SPACE_TCP};
pub use connection::{
    Connection, Event, MAX_REPEATS, REPEAT_AFTER, Rejected, State, TIME_WAIT, answer_without_connection,
    service_timeout,
};
pub use mad::{CLASS, CLASS_VERSION, MAD_LEN, METHOD_SEND, Mad, MadError, is_connection_manager};
pub use message::{Drep, Dreq, Message, MessageKind, Mra, Rej, RejectReason, Rep, Rtu};
pub use req::{PathInfo, Req};
