//! Which packets ask for an ACK (AckReq in the BTH, IBA 9.7.5.1.2).

/// Packets without an ACK request in a row, at most.
const MAX_WITHOUT_REQUEST: u32 = 32;

/// Counts packets since the last ACK request. Ends of messages, READs and atomics ask anyway.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AckPolicy {
    without_request: u32,
}

impl AckPolicy {
    /// Lets the next packet ask.
    pub(super) const fn force(&mut self) {
        self.without_request = u32::MAX;
    }

    /// Returns `true` if the next packet must ask, given how many PSNs may be in flight. A window that is full before anybody
    /// asks would wait for the ACK timeout.
    pub(super) fn is_due(self, window: u32) -> bool {
        self.without_request >= MAX_WITHOUT_REQUEST.min(window / 4)
    }

    /// A packet was sent.
    pub(super) const fn on_sent(&mut self, ack_request: bool) {
        self.without_request = if ack_request { 0 } else { self.without_request.saturating_add(1) };
    }
}
