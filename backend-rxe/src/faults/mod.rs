//! Faults on request: failures of a device's connections that a test asks for.
//!
//! A fault takes effect where its real cause would: a key is treated as invalid where keys are checked, a receive as
//! absent where receives are taken. All later consequences (statuses at both ends, events, states, retries) follow from
//! the code that handles the real cause. No completion is forged.
//!
//! The rules of a device count what its connected queue pairs do. Datagram queue pairs are left alone, because the
//! connection manager uses them. The same rules and the same sequence of requests yield the same faults.
//!
//! A device without rules pays one load of a flag at each place.

mod point;
mod rule;

pub(crate) use point::FaultPoint;
pub use point::{DeviceFaults, FaultStatus};
pub use rule::{Fault, FaultRule, Site, Trigger};
