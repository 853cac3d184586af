//! Connections of a guest that end at this process: the guest's `rdma_cm` exchanges messages with this end, and the
//! owner makes the connection on the host by its own means.
//!
//! ```text
//! guest                        GuestConnections                       owner: HostSide
//! REQ ──────────────────────►  claim, connect ──────────────────────►
//! REP ◄──────────────────────  offer ◄──────────────────────────────  the peer has accepted
//! modify to RTR, RTS                                                  finds what `prepare` noted
//! RTU ──────────────────────►  confirm ─────────────────────────────►
//!
//! REQ ◄──────────────────────  ask ◄────────────────────────────────  a peer asks for a connection
//! modify to RTR, RTS                                                  finds what `prepare` noted
//! REP ──────────────────────►  accept ──────────────────────────────►
//! RTU ◄──────────────────────  accepted ◄───────────────────────────  the connection can be used
//! ```

mod connections;
mod end;
mod host_side;
mod messages;

pub use connections::{GuestConnections, Maximum, NO_QP, PeerRequest};
pub use end::Stage;
pub use host_side::{Accepted, Counted, HostSide, QpBinding};
pub use messages::{ConnectionData, REJ_PRIVATE, REQ_PRIVATE, of_rep, of_req};

#[cfg(test)]
mod tests;
