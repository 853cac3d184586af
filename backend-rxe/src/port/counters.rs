//! Counters of a port.

use pvrdma_verbs::{Count, Counter, Unit, counters};

use pvrdma_roce::{RequesterStats, ResponderStats};

counters! {
    /// Counts of a port.
    pub(crate) struct PortCounters {
        /// Frames of queue pairs that left.
        wire_frames_sent,
        /// Bytes in them.
        wire_sent_bytes in Bytes,
        /// RoCE frames that came for this device.
        wire_frames_received,
        /// Bytes in them.
        wire_received_bytes in Bytes,
        /// Frames of queue pairs that are longer than the link's MTU allows.
        wire_dropped_too_long,
        /// Frames that were not built or not kept because the link did not keep up.
        wire_dropped_no_room,
        /// RoCE frames that do not parse.
        wire_dropped_malformed,
        /// Packets with a wrong ICRC or UDP checksum.
        wire_dropped_damaged,
        /// Packets to or from an address that has no business here.
        wire_dropped_address,
        /// Packets to an address that the device has bound, at an Ethernet address that is not the device's: they are
        /// for the network function, unless `forged-transmits` allows the device others.
        wire_foreign_mac,
        /// Packets from an address that the device may not talk to.
        wire_dropped_peer,
        /// Packets to an address of ours with the tag of another VLAN, without the tag of its VLAN, or with one where
        /// it has none.
        wire_dropped_vlan,
        /// Packets to a QPN that does not exist.
        wire_dropped_no_qp,
        /// Packets to a QP that is in no state to take them: late ones, when a connection ends.
        wire_dropped_state,
        /// Packets that a QP does not take: wrong service, partition or version.
        wire_dropped_refused,
        /// Packets that would have had to wait for responses to leave first: too many, or no memory was left for them.
        wire_dropped_deferred,
        /// Packets ahead of a lost one that were not kept: too far ahead, or no memory was left for them.
        wire_dropped_ahead,
        /// Packets of queue pairs that a switch marked for congestion.
        wire_marked,
        /// Congestion notifications sent.
        wire_cnps_sent,
        /// Congestion notifications that came.
        wire_cnps_received,
        /// Of these, notifications that are not from the peer of a connection, or for no connection.
        wire_cnps_ignored,
        /// Times that a notification cut the rate of a QP.
        wire_rate_cuts,
        /// Times that a packet had to wait for the rate of its QP.
        wire_paced,
        /// Times that connections to a peer paused, because of one of them nothing gets there any more.
        wire_quiet,
        /// Times that a connection took another path, because of congestion or because nothing was heard.
        wire_rehashed,
        /// Packets retransmitted.
        wire_resent,
        /// Times that nothing was acknowledged for a few round trips, so that the oldest packet was retransmitted.
        wire_probes,
        /// Times that an ACK timeout was put off, because received packets still waited in the socket.
        wire_unread,
        /// ACK timeouts.
        wire_timeouts,
        /// Gaps that a peer reported.
        wire_sequence_naks,
        /// Receives that a peer did not have.
        wire_rnr_naks,
        /// Answers that were lost on their way.
        wire_lost_answers,
        /// Packets that came again.
        wire_duplicates,
        /// Packets that came too early.
        wire_out_of_sequence,
        /// Frames of queue pairs and of the network function, in both directions, while the link was down.
        frames_dropped_link_down,
        /// Frames passed from the network to the network function.
        passed_in,
        /// Frames passed from the network function to the network.
        passed_out,
        /// Frames other than RDMA that had no network function or no room there.
        passed_dropped,
        /// Frames of the network function from an address that is not the device's.
        passed_dropped_forged,
        /// RoCE frames of the network function, which only queue pairs may send.
        passed_dropped_roce,
        /// ARP, RARP and neighbour discovery of the network function that give it an address which the device may not
        /// have or another Ethernet address, or that are not understood.
        passed_dropped_address,
        /// IP packets of the network function from an address that is not listed for the device.
        passed_dropped_source,
        /// Router advertisements and packets of DHCP servers of the network function, where it may be neither.
        passed_dropped_server,
        /// Frames of the network function with a checksum to calculate, or to be cut, that are no whole TCP segment or
        /// UDP datagram.
        passed_dropped_offload,
        /// Frames of or for the network function that are not in the VLAN of the port, or have a tag where it passes
        /// none.
        passed_dropped_vlan,
    }
}

/// Returns the counter of address conflicts.
pub(super) fn address_conflicts(conflicts: u64) -> Counter {
    let help = "Times that a host beyond the uplink used an address that the device holds.";
    Counter::total("address_conflicts", Unit::None, help, conflicts)
}

/// Returns the counter of frames that the uplink's link lost.
pub(super) fn wire_lost_in_link(frames: u64) -> Counter {
    Counter::total("wire_lost_in_link", Unit::None, "Frames that the link took and did not carry.", frames)
}

/// Returns the counter of frames that the network function's link lost.
pub(super) fn passed_lost_in_link(frames: u64) -> Counter {
    let help = "Frames that the link to the network function took and did not carry.";
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
        add(&self.wire_lost_answers, after.lost_responses, before.lost_responses);
    }

    /// Adds the events between two snapshots of a responder's statistics.
    pub(crate) fn responder(&self, before: &ResponderStats, after: &ResponderStats) {
        let add = |counter, after: u64, before: u64| Self::add(counter, after.saturating_sub(before));
        add(&self.wire_duplicates, after.duplicates, before.duplicates);
        add(&self.wire_out_of_sequence, after.out_of_sequence, before.out_of_sequence);
    }
}
