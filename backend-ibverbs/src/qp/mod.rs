//! Queue pairs.
//!
//! The host's QP is in RESET, INIT, RTR, RTS or ERROR. SQD and SQE are implemented here: in SQD, requests stay in the
//! guest's ring while the posted ones complete; in SQE, requests are flushed.

mod address_handles;
mod complete;
mod connection;
mod host_state;
mod look_up;
mod modify;
mod parts;
mod queue_pair;
mod recv;
mod recv_side;
mod send;
mod send_side;
mod teardown;
mod translate;

pub(crate) use parts::QpParts;
pub(crate) use queue_pair::Qp;
pub(crate) use recv_side::{Filled, RecvSide};
