//! Round trip time estimation (RFC 6298).

use std::time::Duration;

use super::delay::Delay;
use super::send_state::Seq;

/// Smoothed round trip time and its variation.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    srtt: Duration,
    rttvar: Duration,
}

/// Measures the time from a packet that requests a response to that response, one packet at a time.
#[derive(Debug, Default)]
pub(super) struct RttEstimator {
    estimate: Option<Estimate>,
    delay: Delay,
    /// PSN after a packet that waits for its ACK, and the time at which it was sent.
    sample: Option<(Seq, Duration)>,
}

impl RttEstimator {
    /// Time after which a response is late: smoothed RTT plus four times its variation. `None`: nothing was measured
    /// yet.
    pub(super) fn rto(&self) -> Option<Duration> {
        self.estimate.map(|Estimate { srtt, rttvar }| srtt + rttvar * 4)
    }

    /// Smoothed RTT and its variation. `None`: nothing was measured yet.
    pub(super) fn estimate(&self) -> Option<(Duration, Duration)> {
        self.estimate.map(|Estimate { srtt, rttvar }| (srtt, rttvar))
    }

    /// Returns `true` if the queueing delay is close to its maximum.
    pub(super) fn is_late(&self) -> bool {
        self.delay.is_late()
    }

    /// Records that a packet up to `end` that requests an ACK was sent for the first time.
    pub(super) fn on_sent(&mut self, now: Duration, end: Seq) {
        self.sample.get_or_insert((end, now));
    }

    /// Handles an ACK for everything before `una`. Returns `true` if that gave a measurement.
    #[inline]
    pub(super) fn on_acked(&mut self, now: Duration, una: Seq) -> bool {
        self.measure(now, |end| end <= una)
    }

    /// Handles packets that arrived after a gap, as `has` reports. Returns `true` if that gave a measurement.
    pub(super) fn on_sacked(&mut self, now: Duration, has: impl Fn(Seq) -> bool) -> bool {
        self.measure(now, |end| has(end.saturating_sub(1)))
    }

    #[inline]
    fn measure(&mut self, now: Duration, has_come: impl Fn(Seq) -> bool) -> bool {
        let Some((_, sent)) = self.sample.filter(|&(end, _)| has_come(end)) else { return false };
        self.sample = None;
        let rtt = now.saturating_sub(sent);
        self.delay.add(now, rtt);
        self.estimate = Some(match self.estimate {
            None => Estimate { srtt: rtt, rttvar: rtt / 2 },
            Some(Estimate { srtt, rttvar }) => {
                Estimate { srtt: (srtt * 7 + rtt) / 8, rttvar: (rttvar * 3 + srtt.abs_diff(rtt)) / 4 }
            }
        });
        true
    }

    /// Discards the current measurement, because its packet is about to be retransmitted: the ACKs of the two
    /// transmissions cannot be told apart (Karn's algorithm).
    pub(super) const fn on_retransmit(&mut self) {
        self.sample = None;
    }

    /// Does the same if it is this packet that is retransmitted.
    pub(super) fn on_retransmit_of(&mut self, seq: Seq) {
        self.sample = self.sample.filter(|&(end, _)| end != seq + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn one_packet_at_a_time_is_measured_and_no_retransmission() {
        let mut rtt = RttEstimator::default();
        rtt.on_sent(us(0), 10);
        rtt.on_sent(us(500), 20);
        rtt.on_acked(us(900), 9);
        assert_eq!(rtt.rto(), None);
        rtt.on_acked(us(1000), 20);
        assert_eq!(rtt.rto(), Some(us(3000)));
        rtt.on_sent(us(2000), 30);
        rtt.on_retransmit();
        rtt.on_acked(us(9000), 30);
        assert_eq!(rtt.rto(), Some(us(3000)));
        rtt.on_sent(us(9000), 40);
        rtt.on_acked(us(10_000), 40);
        assert_eq!(rtt.rto(), Some(us(2500)));
    }
}
