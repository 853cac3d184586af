//! Counters of a port of a switch.

use pvrdma_base::{Counter, counters};

counters! {
    /// Counters of a port, or of frames for no port.
    pub(super) struct SwitchCounters {
        /// Frames from other ports of the network to this one.
        switch_frames_received,
        /// Frames for this port that arrived faster than it accepted them.
        switch_dropped_full,
        /// Frames from this port to another one that exceed the network's MTU.
        switch_dropped_too_long,
        /// Frames from this port to the uplink that were dropped because it had accepted nothing for a second.
        switch_dropped_uplink,
        /// Frames to an address that no port has.
        switch_dropped_unknown,
    }
}

/// Returns all counters of a port, at zero.
pub fn all_counters() -> Vec<Counter> {
    SwitchCounters::default().list()
}
