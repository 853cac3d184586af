//! Data plane: converts elements of the guest's rings to work requests, and completions to elements (spec §6 to §9).
//!
//! No request allocates memory here, except for a fast registration, which carries a page list.

mod complete;
mod gather;
mod recv;
mod send;

pub(crate) use complete::{Armed, CqRing, SavedCqRing, Unheard, infer};
pub(crate) use recv::RecvRing;
pub(crate) use send::{SendRing, SendRingParams};
