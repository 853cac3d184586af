//! Local delivery: the way to a peer of the same process.

pub(crate) mod rc;
pub(crate) mod ud;
