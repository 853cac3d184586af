//! Captures of a device: copies of all frames on its uplink, and of the packets that local delivery would have produced
//! on the wire.
//!
//! A [`Point`] belongs to a device, whichever process serves it: its adapter and its port hold it. A [`Capture`] reads
//! from a point; frames are passed to it through a bounded [`buffer`], and are dropped and counted when the reader does
//! not keep up. Without captures, a batch of requests or frames costs one relaxed load.

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
