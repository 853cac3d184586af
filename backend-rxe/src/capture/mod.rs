//! Captures of a device: copies of all frames on its uplink, and of the packets that local delivery would have produced
//! on the wire.
//!
//! A [`Point`] belongs to a device; the adapter and the port of the device hold it, in whichever process they run. A
//! [`Capture`] reads from a point. Frames reach it through a bounded [`buffer`]; if its reader does not keep up, they
//! are dropped and counted. Without captures, a batch of requests or frames costs one relaxed load.

mod buffer;
mod link;
pub(crate) mod local;
mod point;
mod seen;
mod synthetic_trace;

pub use buffer::{Batch, Captured};
pub(crate) use link::CaptureLink;
pub use point::{Capture, CaptureCounts};
pub(crate) use point::{Captures, Point};
pub use seen::{CaptureConfig, Direction, Interface};
pub(crate) use synthetic_trace::{StepOutcome, SyntheticTrace};
