//! Counters of an adapter. Hot paths count in a plain [`Tally`] that is added to the shared [`Counters`] once per
//! batch.

use pvrdma_base::{Count, counters};
use pvrdma_verbs_types::SendOp;

counters! {
    /// Counts of an adapter.
    pub(crate) struct Counters {
        /// SENDs of connected queue pairs.
        rc_sends,
        /// Bytes of SENDs of connected queue pairs.
        rc_send_bytes in Bytes,
        /// RDMA WRITEs.
        rc_writes,
        /// Bytes of RDMA WRITEs.
        rc_write_bytes in Bytes,
        /// RDMA READs.
        rc_reads,
        /// Bytes of RDMA READs.
        rc_read_bytes in Bytes,
        /// Atomic operations.
        rc_atomics,
        /// Datagrams sent.
        ud_sends,
        /// Bytes of sent datagrams, without headers.
        ud_send_bytes in Bytes,
        /// Datagrams delivered to a receive.
        ud_delivered,
        /// Datagrams to a GID that no device of the network has bound.
        ud_dropped_no_route,
        /// Datagrams to a QPN without a datagram queue pair.
        ud_dropped_no_qp,
        /// Datagrams with a wrong Q_Key.
        ud_dropped_qkey,
        /// Datagrams for which no receive was posted.
        ud_dropped_no_receive,
        /// Datagrams to a device that was paused for longer than a second.
        ud_dropped_paused,
        /// Datagrams longer than the receive.
        ud_too_long,
        /// Addresses that the guest may not bind.
        gids_refused,
        /// Bound addresses that the guest has to wait for, because another device or host has them.
        gids_waited,
        /// Addresses that were granted after the guest had to wait for them.
        gids_granted,
        /// Requests (each attempt) and datagrams to a peer that the rules of either device refuse.
        peers_refused,
        /// Requests (each attempt) and datagrams between devices of this process while the link of one of them was
        /// down.
        dropped_link_down,
        /// Fast registrations and local invalidations.
        key_operations,
        /// Requests for which the peer had no receive posted.
        rnr_waits,
        /// Retries of requests after a receiver-not-ready wait.
        rnr_retries,
        /// Requests to which a peer did not respond.
        unanswered,
        /// Retries of requests to a peer that did not respond.
        retries,
        /// Requests that completed in error, except flushes.
        request_errors,
        /// Requests of peers that were refused.
        refused_requests,
        /// Send requests and receives that were flushed.
        flushed,
        /// Completions that were lost because a queue was full.
        cq_overruns,
        /// Connections to iWARP peers that were established.
        iwarp_connections,
        /// Requests for iWARP connections that the guest, the peer or a rule refused, or that were invalid.
        iwarp_refused,
        /// Requests for iWARP connections beyond the number of connections or the memory of the device.
        iwarp_overflow,
        /// Connections to iWARP peers that could not be made.
        iwarp_failed,
        /// Datagrams to iWARP peers, or from them, that were lost. iWARP has none but those of the connection manager.
        iwarp_datagrams_dropped,
        /// Requests that iWARP does not have: atomics and immediate data.
        iwarp_unsupported,
        /// SENDs of iWARP peers that had to wait for a receive.
        iwarp_waited_for_receive,
    }

    /// Counts of one batch.
    pub(crate) struct Tally;
}

impl Tally {
    /// Counts a successful request of a connected QP, and the `length` bytes of its message.
    // Always inline: see `Requester::end_with_success`.
    #[inline(always)]
    pub(crate) fn count_request(&mut self, op: &SendOp, length: u64) {
        let (requests, bytes) = match op {
            SendOp::Send { .. } => (&mut self.rc_sends, &mut self.rc_send_bytes),
            SendOp::Write { .. } => (&mut self.rc_writes, &mut self.rc_write_bytes),
            SendOp::Read { .. } => (&mut self.rc_reads, &mut self.rc_read_bytes),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => return self.rc_atomics += 1,
            // Key operations are counted when they are executed.
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                return;
            }
        };
        *requests += 1;
        *bytes += length;
    }

    /// Returns the number of successful requests and datagrams, the bytes that were sent, and the bytes that were read.
    #[inline]
    pub(crate) fn moved(&self) -> [u64; 3] {
        let requests = self.rc_sends + self.rc_writes + self.rc_reads + self.rc_atomics + self.ud_sends;
        [requests, self.rc_send_bytes + self.rc_write_bytes + self.ud_send_bytes, self.rc_read_bytes]
    }
}

impl Counters {
    /// Counts one event that is not on a hot path.
    pub(crate) fn bump(counter: &Count) {
        counter.increment();
    }
}
