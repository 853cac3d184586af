//! The ways from a requester to a responder.

pub(crate) mod directory;
pub(crate) mod local;
pub(crate) mod wire;
