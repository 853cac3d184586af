//! Counters of a port.

use pvrdma_base::{Count, Counter, Unit, counters};

use pvrdma_roce::{RequesterStats, ResponderStats};

counters! {
    /// Counts of a port.
    pub(crate) struct PortCounters {
        /// Frames of queue pairs sent.
        wire_frames_sent,
        /// Bytes of sent frames of queue pairs.
        wire_sent_bytes in Bytes,
        /// RoCE frames received for the device.
        wire_frames_received,
        /// Bytes of received RoCE frames.
        wire_received_bytes in Bytes,
        /// Frames of queue pairs that exceed the link's MTU.
        wire_dropped_too_long,
        /// Frames that were dropped because the link was too slow.
        wire_dropped_no_room,
        /// Invalid RoCE frames.
        wire_dropped_malformed,
        /// Packets with a wrong ICRC or UDP checksum, or without an ICRC that the network requires.
        wire_dropped_damaged,
        /// Packets sent without an ICRC, by agreement with the peer.
        wire_sent_without_icrc,
        /// Packets received without an ICRC, by agreement with the peer.
        wire_received_without_icrc,
        /// Packets from or to an address that does not belong to the connection or the device.
        wire_dropped_address,
        /// Packets to an address of the device at another Ethernet address. They go to the network function, unless
        /// `forged-transmits` permits the address.
        wire_foreign_mac,
        /// Packets from an address that the device may not communicate with.
        wire_dropped_peer,
        /// Packets to an address of the device with the tag of another VLAN, or without the tag of its VLAN.
        wire_dropped_vlan,
        /// Packets to a QPN that does not exist.
        wire_dropped_no_qp,
        /// Packets to a queue pair whose state does not permit them, such as late ones of an ended connection.
        wire_dropped_state,
        /// Packets that a queue pair does not accept: wrong service, partition or version.
        wire_dropped_refused,
        /// Packets that had to wait for earlier responses and were dropped: too many of them, or no memory.
        wire_dropped_deferred,
        /// Packets behind a lost one that were not kept: too far ahead, or no memory.
        wire_dropped_ahead,
        /// Packets of queue pairs with a congestion mark (ECN).
        wire_marked,
        /// RoCE frames that arrived while the device was paused, and were dropped.
        wire_dropped_paused,
        /// Requests that arrived while the device was paused, and were held off with an RNR NAK.
        wire_held,
        /// Congestion notifications (CNPs) sent.
        wire_cnps_sent,
        /// Congestion notifications (CNPs) received.
        wire_cnps_received,
        /// Received congestion notifications that are not from the peer of a connection, or for no connection.
        wire_cnps_ignored,
        /// Rate cuts of queue pairs by congestion notifications.
        wire_rate_cuts,
        /// Packets that waited for the rate of their queue pair.
        wire_paced,
        /// Pauses of all connections to a peer because one of them no longer reaches it.
        wire_quiet,
        /// Path changes of connections, because of congestion or silence.
        wire_rehashed,
        /// Packets retransmitted.
        wire_resent,
        /// Retransmissions of the oldest packet because nothing was acknowledged for a few round trips.
        wire_probes,
        /// ACK timeouts that were postponed because received packets waited in the socket.
        wire_unread,
        /// ACK timeouts.
        wire_timeouts,
        /// Sequence NAKs received.
        wire_sequence_naks,
        /// Receiver-not-ready NAKs received.
        wire_rnr_naks,
        /// Responses that were lost in transit.
        wire_lost_answers,
        /// Duplicate packets received.
        wire_duplicates,
        /// Packets received ahead of their sequence.
        wire_out_of_sequence,
        /// Frames of queue pairs and the network function, in both directions, while the link was down.
        frames_dropped_link_down,
        /// Frames passed from the network to the network function.
        passed_in,
        /// Frames passed from the network function to the network.
        passed_out,
        /// Frames other than RDMA that were dropped: there was no network function, or it had no room.
        passed_dropped,
        /// Frames of the network function from another Ethernet address than the device's.
        passed_dropped_forged,
        /// RoCE frames of the network function, which only queue pairs may send.
        passed_dropped_roce,
        /// ARP, RARP and neighbour discovery messages of the network function that were dropped: they name an address
        /// that the device may not have or another Ethernet address, or cannot be parsed.
        passed_dropped_address,
        /// IP packets of the network function from an address that is not listed for the device.
        passed_dropped_source,
        /// Router advertisements and DHCP server packets of the network function that were dropped.
        passed_dropped_server,
        /// Frames of the network function that were dropped because they control the Ethernet link: pauses, and frames
        /// to addresses that bridges do not forward.
        passed_dropped_control,
        /// Frames of the network function that request a checksum or segmentation and are not a complete TCP segment or
        /// UDP datagram.
        passed_dropped_offload,
        /// Frames from or to the network function outside the VLAN of the port, or with a tag that the port does not
        /// pass.
        passed_dropped_vlan,
    }
}

/// Returns the counter of address conflicts.
pub(super) fn address_conflicts(conflicts: u64) -> Counter {
    let help = "Uses of an address of the device by a host beyond the uplink.";
    Counter::total("address_conflicts", Unit::None, help, conflicts)
}

/// Returns the counter of frames that the uplink's link lost.
pub(super) fn wire_lost_in_link(frames: u64) -> Counter {
    Counter::total("wire_lost_in_link", Unit::None, "Frames that the link accepted and lost.", frames)
}

/// Returns the counter of frames that the network function's link lost.
pub(super) fn passed_lost_in_link(frames: u64) -> Counter {
    let help = "Frames that the link to the network function accepted and lost.";
    Counter::total("passed_lost_in_link", Unit::None, help, frames)
}

/// Returns all counters of a port with the value zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    let mut list = PortCounters::default().list();
    list.extend([address_conflicts(0), wire_lost_in_link(0), passed_lost_in_link(0)]);
    list
}

impl PortCounters {
    /// Counts one event.
    pub(crate) fn bump(counter: &Count) {
        counter.increment();
    }

    /// Counts several events.
    pub(crate) fn add(counter: &Count, count: u64) {
        counter.add(count);
    }

    /// Adds the events between two snapshots of a requester's statistics.
    pub(crate) fn requester(&self, before: &RequesterStats, after: &RequesterStats) {
        let add = |counter, after: u64, before: u64| Self::add(counter, after.saturating_sub(before));
        add(&self.wire_rehashed, after.rehashed, before.rehashed);
        add(&self.wire_resent, after.retransmitted, before.retransmitted);
        add(&self.wire_probes, after.probes, before.probes);
        add(&self.wire_timeouts, after.timeouts, before.timeouts);
        add(&self.wire_sequence_naks, after.sequence_naks, before.sequence_naks);
        add(&self.wire_rnr_naks, after.rnr_naks, before.rnr_naks);
        add(&self.wire_sent_without_icrc, after.without_icrc, before.without_icrc);
        add(&self.wire_lost_answers, after.lost_responses, before.lost_responses);
    }

    /// Adds the events between two snapshots of a responder's statistics.
    pub(crate) fn responder(&self, before: &ResponderStats, after: &ResponderStats) {
        let add = |counter, after: u64, before: u64| Self::add(counter, after.saturating_sub(before));
        add(&self.wire_duplicates, after.duplicates, before.duplicates);
        add(&self.wire_out_of_sequence, after.out_of_sequence, before.out_of_sequence);
    }
}
