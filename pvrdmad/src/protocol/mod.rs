//! What the supervisor, the workers and the command line say to each other.
//!
//! One [`Request`] type serves both ways of asking: the command line sends it in lines of JSON over the control socket,
//! the supervisor in [`frame`]s over a socket pair to the worker of a network, there with the requests that are only
//! for it and with descriptors. A worker asks the supervisor back with [`HostRequest`]s, on a socket pair of its own.
//!
//! The supervisor takes a worker for hostile. What it reads from one is bounded before it is kept ([`FrameReader`]),
//! must belong to a request that is open, may be as long as the reply to that request can be ([`Request::max_reply`]),
//! carries no descriptors, and its text is made [`printable`] before anybody sees it.

pub mod frame;
mod host;
pub(crate) mod json_rpc;
mod message;
#[cfg(test)]
mod tests;
mod text;

pub use self::frame::{Frame, FrameError, FrameReader, Received};
pub use self::host::{HostReply, HostRequest, MAX_HOST_REQUEST};
pub use self::message::{Carrier, Incoming, NetworkSetup, Outgoing, Reply, Request, VERSION};
pub use self::text::{is_printable_json, printable, printable_text};
