//! What a port of a switch counts.

use pvrdma_base::{Counter, counters};

counters! {
    /// Counts of a port, or of what came for none.
    pub(super) struct SwitchCounters {
        /// Frames that other ports of the network sent to this one.
        switch_frames_received,
        /// Frames for this port that came faster than it took them.
        switch_dropped_full,
        /// Frames from this port to another one that are longer than the network's MTU allows.
        switch_dropped_too_long,
        /// Frames from this port for the uplink, which has taken nothing for a second.
        switch_dropped_uplink,
        /// Frames to an address that nobody has.
        switch_dropped_unknown,
    }
}

/// Everything that a port counts, at zero.
pub fn all_counters() -> Vec<Counter> {
    SwitchCounters::default().list()
}
