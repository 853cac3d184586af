//! Counters of an adapter. Hot paths count in a plain [`Tally`] that is added to the shared [`Counters`] once per
//! batch.

use pvrdma_verbs::{Count, SendOp, counters};

counters! {
    /// Counts of an adapter.
    pub(crate) struct Counters {
        /// Sends of connected QPs.
        rc_sends,
        /// Bytes in them.
        rc_send_bytes in Bytes,
        /// RDMA writes.
        rc_writes,
        /// Bytes in them.
        rc_write_bytes in Bytes,
        /// RDMA reads.
        rc_reads,
        /// Bytes in them.
        rc_read_bytes in Bytes,
        /// Atomics.
        rc_atomics,
        /// Datagrams sent.
        ud_sends,
        /// Bytes in them, without headers.
        ud_send_bytes in Bytes,
        /// Datagrams that reached a receive.
        ud_delivered,
        /// Datagrams to a GID that no device of the network has bound.
        ud_dropped_no_route,
        /// Datagrams to a QPN that does not take any.
        ud_dropped_no_qp,
        /// Datagrams with the wrong Q_Key.
        ud_dropped_qkey,
        /// Datagrams for which no receive was posted.
        ud_dropped_no_receive,
        /// Datagrams longer than the receive.
        ud_too_long,
        /// Addresses that the guest wanted to bind and may not have.
        gids_refused,
        /// Times that an address that the guest has bound belonged to another device or host, so that the guest has to
        /// wait for it.
        gids_waited,
        /// Times that the guest got such an address after all.
        gids_granted,
        /// Requests, each time they are tried, and datagrams to a peer that one of the two may not talk to.
        peers_refused,
        /// Datagrams and tries of requests between devices of this process while the link of one of them was down.
        dropped_link_down,
        /// Fast registrations and local invalidations.
        key_operations,
        /// Times a peer had no receive posted.
        rnr_waits,
        /// Times a request was retried after such a wait.
        rnr_retries,
        /// Times a peer did not respond.
        unanswered,
        /// Times a request was retried because of that.
        retries,
        /// Requests that ended with an error, flushes excepted.
        request_errors,
        /// Requests of peers that were refused.
        refused_requests,
        /// Flushed send requests and receives.
        flushed,
        /// Completions lost because a queue was full.
        cq_overruns,
    }

    /// Counts of one batch.
    pub(crate) struct Tally;
}

impl Tally {
    /// Counts a successful request of a connected QP, and the `length` bytes of its message.
    #[inline]
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
