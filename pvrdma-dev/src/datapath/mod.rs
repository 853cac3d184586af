//! The data plane: elements of the guest's rings to work requests, completions to elements (spec §6 to §9).
//!
//! Nothing here allocates per request except a fast registration, which brings a page list.

mod complete;
mod gather;
mod recv;
mod send;

pub(crate) use complete::{CqRing, infer};
pub(crate) use recv::RecvRing;
pub(crate) use send::{SendRing, SendRingParams};
