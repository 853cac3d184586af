//! Messages between the supervisor, the workers and the command line.
//!
//! The same [`Request`] type serves two connections. The command line sends it as a call of JSON-RPC ([`json_rpc`])
//! over the control socket. The supervisor sends it to the worker of a network in [`frame`]s over a socket pair,
//! together with descriptors, and uses the internal requests there as well. A worker sends [`HostRequest`]s to the
//! supervisor over a separate socket pair.
//!
//! The supervisor treats a worker as hostile. Data from a worker is bounded before it is stored ([`FrameReader`]). A
//! reply must belong to an open request, is limited to the longest reply to that request ([`Request::max_reply`]), and
//! carries no descriptors. Its text is made [printable](crate::text) before it is shown.

pub(crate) mod exchange;
pub mod frame;
mod host;
pub mod json_rpc;
mod message;
#[cfg(test)]
mod tests;

pub use self::frame::{Frame, FrameError, FrameReader, Received};
pub use self::host::{HostReply, HostRequest, MAX_HOST_REQUEST};
pub use self::message::{
    Carrier, Incoming, NetworkSetup, Outgoing, REPLACE_VERSION, Reply, Request, Upgraded, VERSION, checked_lines,
    upgraded_lines,
};
