//! Counters of a tunnel.

use pvrdma_base::{Counter, Unit, counters};

counters! {
    /// Counters of a tunnel, in addition to those that every link has.
    pub(super) struct VxlanCounters {
        /// Datagrams of a sender that is not a remote.
        vxlan_dropped_sender,
        /// Datagrams that contain no VXLAN header, no VNI or no frame.
        vxlan_dropped_malformed,
        /// Datagrams of another network.
        vxlan_dropped_vni,
        /// Frames that met congestion, and whose senders do not understand the mark.
        vxlan_dropped_congested,
        /// Stations that appeared behind another remote.
        vxlan_moved,
        /// Frames of stations that were not learned because there are too many behind their remote.
        vxlan_not_learned,
    }
}

/// Returns the gauge of known addresses, for all remotes together.
pub(super) fn vxlan_stations(stations: usize) -> Counter {
    Counter::gauge("vxlan_stations", Unit::None, "Stations that are known to be behind a remote.", stations as u64)
}

/// Returns the counter of trains that were sent.
pub(super) fn vxlan_trains_sent(trains: u64) -> Counter {
    Counter::total("vxlan_trains_sent", Unit::None, "Runs of datagrams that the kernel took as one.", trains)
}

/// Returns all counters of a tunnel, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    let mut list = VxlanCounters::default().list();
    list.extend([vxlan_stations(0), vxlan_trains_sent(0)]);
    list
}
