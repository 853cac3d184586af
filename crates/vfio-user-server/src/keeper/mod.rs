//! Keeper: process of a device that receives the descriptors of its clients.
//!
//! To refuse a descriptor is to close it, and `close` of a file on a FUSE file system waits until the server of that
//! file system answers, even in a process that was killed. A client must not be able to block the process of a network
//! like that. So this process never receives a client's descriptor: it peeks at each message first
//! ([`MSG_PEEK`](rustix::net::RecvFlags::PEEK) without space for descriptors installs none), and leaves messages that
//! carry some to the keeper. The keeper has a duplicate of the client's socket. It receives such a message, examines
//! its descriptors, closes those that are refused, and passes on the bytes and the accepted descriptors. If it does not
//! answer in time, the client's connection ends, and the supervisor kills the keeper and starts another one.
//!
//! The keeper also outlives the worker. It holds the descriptors that a client's connection consists of, and notes with
//! the rest (`notes`). It maps no guest memory and does not read the notes. The VMM sees no end of its connection if
//! the worker crashes, and the next worker recalls the client from the keeper ([`crate::Server::recover`]).
//!
//! [`process`] is the keeper's loop. [`client`] is the end in the process that serves the device, which is called the
//! worker here. Both receive a message's bytes and descriptors from a socket with the same code (`receive`); `wire` has
//! the messages between the two.

pub mod client;
pub(crate) mod notes;
pub mod process;
pub(crate) mod receive;
mod wire;
