//! Counters of a tunnel.

use pvrdma_base::{Counter, Unit, counters};

counters! {
    /// Counters of a tunnel, in addition to those that every link has.
    pub(super) struct VxlanCounters {
        /// Datagrams from a sender that is not a remote.
        vxlan_dropped_sender,
        /// Datagrams without a VXLAN header, a VNI or a frame.
        vxlan_dropped_malformed,
        /// Datagrams with another VNI.
        vxlan_dropped_vni,
        /// Frames with congestion experienced whose senders do not support ECN.
        vxlan_dropped_congested,
        /// Stations that appeared behind another remote.
        vxlan_moved,
        /// Addresses that were not learned, because too many are known behind their remote.
        vxlan_not_learned,
    }
}

/// Returns the gauge of known addresses, for all remotes together.
pub(super) fn vxlan_stations(stations: usize) -> Counter {
    Counter::gauge("vxlan_stations", Unit::None, "Stations known behind remotes.", stations as u64)
}

/// Returns the counter of trains that were sent.
pub(super) fn vxlan_trains_sent(trains: u64) -> Counter {
    Counter::total("vxlan_trains_sent", Unit::None, "Runs of datagrams that the kernel accepted as one.", trains)
}

/// Returns all counters of a tunnel, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    let mut list = VxlanCounters::default().list();
    list.extend([vxlan_stations(0), vxlan_trains_sent(0)]);
    list
}
