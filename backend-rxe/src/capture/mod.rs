//! Watching a device: copies of all frames on its uplink, and of what local delivery would have been on the wire.
//!
//! A [`Point`] belongs to a device, whoever serves it: its adapter and its port hold it. A [`Capture`] is somebody who
//! watches a point; frames come to it through a bounded [`buffer`], and are dropped and counted when it does not keep
//! up. While nobody watches, a batch of requests or frames costs one relaxed load.

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
