//! Faults on request: failures of a device and its connections that a test asks for.
//!
//! A fault takes effect where its real cause would: a key is treated as invalid where keys are checked, a receive as
//! absent where receives are taken. All later consequences (statuses at both ends, events, states, retries) follow from
//! the code that handles the real cause. No completion and no event is forged.
//!
//! The rules of a device count what its connected queue pairs do. Datagram queue pairs are not counted, because the
//! connection manager uses them. The same rules and the same sequence of requests yield the same faults.
//!
//! A device without rules pays one load of a flag at each place.

mod armed;
mod effects;
mod point;
mod rule;
#[cfg(test)]
mod tests;

pub use armed::FaultStatus;
pub use effects::{DeviceEffect, DeviceFaults};
pub(crate) use point::{FaultPoint, Turn};
pub use rule::{Fault, FaultRule, Scope, Site, Trigger};
