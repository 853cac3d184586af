//! Local delivery: the path to a peer of the same process. The payload is copied once.

pub(crate) mod apart;
mod exchange;
mod own_side;
pub(crate) mod rc;
pub(crate) mod route;
pub(crate) mod ud;

pub(crate) use route::{LocalRoute, LocalRouteInspect};
