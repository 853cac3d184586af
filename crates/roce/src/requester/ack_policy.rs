//! Choice of the packets that request an ACK (AckReq in the BTH, IBA 9.7.5.1.2).

/// Largest number of packets in a row without AckReq.
const MAX_WITHOUT_REQUEST: u32 = 32;

/// Counts packets since the last ACK request. The last packets of messages, READs and atomics always request one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AckPolicy {
    without_request: u32,
}

impl AckPolicy {
    /// Makes the next packet request an ACK.
    pub(super) const fn force(&mut self) {
        self.without_request = u32::MAX;
    }

    /// Returns `true` if the next packet must request an ACK, for a window of this number of PSNs. A window that fills
    /// up without a request would stall until the ACK timeout.
    pub(super) fn is_due(self, window: u32) -> bool {
        self.without_request >= MAX_WITHOUT_REQUEST.min(window / 4)
    }

    /// Accounts for a packet that was sent.
    pub(super) const fn on_sent(&mut self, ack_request: bool) {
        self.without_request = if ack_request { 0 } else { self.without_request.saturating_add(1) };
    }
}
