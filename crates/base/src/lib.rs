//! Building blocks of all device models and network programs of this workspace.
//!
//! * [`counters!`] declares counters with their exported names, units and help texts. The compiler refuses a name that
//!   an exporter could not take.
//! * [`LogLimit`] and [`DeviceLog`] limit the number of log lines that a guest, a VMM or a peer can cause.
//! * [`threads`] starts threads and confines each one before it runs any other code; [`EndOnPanic`] ends the process
//!   when a panic leaves shared state half changed.
//! * [`locks`] are those of the standard library, without poisoning.
//! * [`setters!`] implements the methods that set the fields of a configuration.
//! * [`Snapshot`] holds the description of an object, taken without waiting for the object's lock.
//! * `Random` generates keys and numbers that a peer must not be able to guess (feature `random`).
//!
//! The crate depends on no other crate of this workspace, and contains nothing about RDMA, packets or guest memory.
//! With the feature `serde`, counters and snapshots can be serialized.
//!
//! # Example
//!
//! A receiver counts frames, and limits the lines that a hostile sender can cause in the log:
//!
//! ```
//! use pvrdma_base::{Counter, LogLimit};
//!
//! pvrdma_base::counters! {
//!     /// Counts of a receiver.
//!     pub struct ReceiverCounters {
//!         /// Frames that were taken.
//!         frames_received,
//!         /// Frames that were dropped because they were too short.
//!         short_frames,
//!     }
//! }
//!
//! fn receive(frame: &[u8], counters: &ReceiverCounters, log: &LogLimit) {
//!     if frame.len() < 14 {
//!         counters.short_frames.increment();
//!         log.warn(module_path!(), "eth0", format_args!("a frame of {} bytes is dropped", frame.len()));
//!     } else {
//!         counters.frames_received.increment();
//!     }
//! }
//!
//! let (counters, log) = (ReceiverCounters::default(), LogLimit::new());
//! receive(&[0; 64], &counters, &log);
//! receive(&[0; 6], &counters, &log);
//! let values: Vec<_> = counters.list().iter().map(|Counter { name, value, .. }| (*name, *value)).collect();
//! assert_eq!(values, [("frames_received", 1), ("short_frames", 1)]);
//! ```

mod containment;
mod counters;
pub mod locks;
mod log_limit;
#[cfg(feature = "random")]
mod random;
mod setters;
mod snapshot;
mod thread_kind;
pub mod threads;

pub use containment::EndOnPanic;
pub use counters::{Count, Counter, Kind, Unit};
pub use log_limit::{DeviceLog, LogLimit};
#[cfg(feature = "random")]
pub use random::Random;
pub use snapshot::{Snapshot, micros};
