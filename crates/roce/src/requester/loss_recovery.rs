//! What a requester knows about losses: how much may be in flight, what was noticed, and what is left to try.
//!
//! The ACK timeout of a QP is tens of milliseconds, because the architecture makes it the time after which a peer is
//! given up step by step. Between two hosts of one network a round trip takes a hundred microseconds, and what is lost
//! twice, or whose NAK is lost, would stand still for hundreds of round trips. So when nothing was acknowledged for a
//! few round trips, the oldest packet is retransmitted as a *probe*, as TCP (RFC 8985) and QUIC (RFC 9002) do; that
//! spends no retry, and a peer that has it sees a duplicate, which it acknowledges. If the ACK covers this one packet
//! alone, the next is probed, and if that ACK covers no more either, the following packets are taken for lost, too.
//!
//! After a loss only a few packets follow the one that is retransmitted until something is acknowledged: most
//! responders have dropped them (go-back-N), and those that buffered what came behind the gap need none. One that was
//! seen to buffer them gets the missing packets alone, and the flow goes on meanwhile.

use std::time::Duration;

use super::rtt::RttEstimator;
use super::send_state::Seq;

/// PSNs in flight right after a loss.
const WINDOW_AFTER_LOSS: u32 = 8;
/// Shortest time without progress that leads to a probe: above what a busy scheduler takes away.
const MIN_PROBE_TIMEOUT: Duration = Duration::from_micros(500);
/// Probes in a row; after these the ACK timeout decides.
const MAX_PROBES: u32 = 3;
/// Sequence NAKs for one packet after the other that are believed to be losses. After these the responder has stopped
/// to buffer what comes behind a gap.
const MAX_CONSECUTIVE_NAKS: u32 = 2;

/// Whether the oldest unacked packet is retransmitted alone, to see what the responder has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    None,
    Due(Attempt),
    /// The packet with this PSN was sent.
    Sent(Seq, Attempt),
}

/// What the probe before it told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Attempt {
    /// There was none.
    First,
    /// Its packet had been missing, or the ACK of an earlier packet came late.
    Second,
}

#[derive(Debug)]
pub(super) struct LossRecovery {
    /// PSNs that may be in flight now, and at most.
    window: u32,
    max_window: u32,
    rtt: RttEstimator,
    pub(super) probe: Probe,
    /// Probes since the last progress.
    probes: u32,
    /// A packet to retransmit alone.
    pub(super) retransmit: Option<Seq>,
    /// The responder was seen to buffer what comes behind a gap: only what is missing need be retransmitted.
    pub(super) peer_reorders: bool,
    /// Retransmissions that are left before the peer is given up (IBA 9.7.6.1.3), and the same after RNR NAKs.
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// ACK timeouts in a row.
    pub(super) backoff: u32,
    /// The last thing that happened was an ACK timeout.
    pub(super) timed_out: bool,
    /// PSN of the last sequence NAK that was acted upon: a responder sends one for each missing packet, what comes
    /// again was duplicated on its way.
    nak_psn: Option<Seq>,
    /// How many of them in a row named the packet after the one that was retransmitted.
    consecutive_naks: u32,
    /// `una` when a lost response made us go back. What was in flight then tells us the same again.
    lost_response: Option<Seq>,
}

impl LossRecovery {
    pub(super) fn new(max_window: u32, retries: u8, rnr_retries: u8) -> Self {
        Self {
            window: max_window,
            max_window,
            rtt: RttEstimator::default(),
            probe: Probe::None,
            probes: 0,
            retransmit: None,
            peer_reorders: false,
            retries,
            rnr_retries,
            backoff: 0,
            timed_out: false,
            nak_psn: None,
            consecutive_naks: 0,
            lost_response: None,
        }
    }

    /// PSNs that may be in flight.
    pub(super) const fn window(&self) -> u32 {
        self.window
    }

    /// What is known of the round trip time.
    pub(super) const fn rtt(&self) -> &RttEstimator {
        &self.rtt
    }

    /// A packet up to `end` that asks for an ACK was sent for the first time.
    pub(super) fn on_sent(&mut self, now: Duration, end: Seq) {
        self.rtt.on_sent(now, end);
    }

    /// `acked` more PSNs are done, up to `una`, and `retries` are allowed again.
    pub(super) fn on_acked(&mut self, now: Duration, una: Seq, acked: Seq, retries: u8) {
        self.probes = 0;
        self.retries = retries;
        self.backoff = 0;
        let acked = u32::try_from(acked).unwrap_or(u32::MAX);
        self.window = self.window.saturating_add(acked).min(self.max_window);
        self.rtt.on_acked(now, una);
        self.retransmit = self.retransmit.filter(|&seq| seq >= una);
    }

    /// An ACK timeout.
    pub(super) const fn on_timeout(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
        self.forget_naks();
    }

    /// A probe is due. It is counted.
    pub(super) fn on_probe(&mut self) {
        self.probes += 1;
        self.forget_naks();
    }

    const fn forget_naks(&mut self) {
        (self.nak_psn, self.lost_response) = (None, None);
    }

    /// Everything from `una` on is about to be retransmitted.
    pub(super) fn on_go_back(&mut self) {
        self.probe = Probe::None;
        self.timed_out = false;
        self.retransmit = None;
        self.window = WINDOW_AFTER_LOSS.min(self.max_window);
        self.rtt.on_retransmit();
    }

    /// Retransmits one packet alone.
    pub(super) const fn retransmit_alone(&mut self, seq: Seq) {
        self.retransmit = Some(seq);
        self.rtt.on_retransmit();
    }

    /// How long to wait for progress before a probe, if something is `in_flight`.
    pub(super) fn probe_timeout(&self, in_flight: bool) -> Option<Duration> {
        let rto = self.rtt.rto().filter(|_| in_flight && self.probes < MAX_PROBES)?;
        Some(rto.max(MIN_PROBE_TIMEOUT).saturating_mul(1 << self.probes))
    }

    /// A sequence NAK names `seq`. Returns `true` if it is not a copy of the one before. A responder that names one
    /// packet after the other, although those were in flight, does not buffer them any more.
    pub(super) fn on_sequence_nak(&mut self, seq: Seq) -> bool {
        if self.nak_psn == Some(seq) {
            return false;
        }
        let consecutive = self.nak_psn.replace(seq).is_some_and(|before| before + 1 == seq);
        self.consecutive_naks = if consecutive { self.consecutive_naks.saturating_add(1) } else { 0 };
        if self.consecutive_naks >= MAX_CONSECUTIVE_NAKS {
            self.peer_reorders = false;
        }
        true
    }

    /// Returns `true` if a sequence NAK was acted upon since the last timeout or probe.
    pub(super) const fn saw_nak(&self) -> bool {
        self.nak_psn.is_some()
    }

    /// The response at `una` is lost. Returns `true` if that is news.
    pub(super) fn on_lost_response(&mut self, una: Seq) -> bool {
        self.lost_response.replace(una) != Some(una)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    fn recovery() -> LossRecovery {
        LossRecovery::new(256, 7, 7)
    }

    #[test]
    fn probes_follow_the_rtt_and_end() {
        let mut recovery = recovery();
        assert_eq!(recovery.probe_timeout(true), None, "nothing is known of the peer");
        recovery.on_sent(us(0), 10);
        recovery.on_acked(us(1000), 10, 10, 7);
        for timeout in [3000, 6000, 12_000] {
            assert_eq!(recovery.probe_timeout(true), Some(us(timeout)));
            recovery.on_probe();
        }
        assert_eq!(recovery.probe_timeout(true), None);
        recovery.on_acked(us(30_000), 11, 1, 7);
        assert!(recovery.probe_timeout(true).is_some());
        assert_eq!(recovery.probe_timeout(false), None);
    }

    #[test]
    fn the_window_shrinks_with_a_loss_and_grows_with_acks() {
        let mut recovery = recovery();
        recovery.on_sent(us(0), 1);
        recovery.on_go_back();
        assert_eq!(recovery.window(), 8);
        recovery.on_acked(us(5), 8, 8, 7);
        assert_eq!((recovery.window(), recovery.rtt.rto()), (16, None));
        recovery.on_acked(us(5), 1000, 992, 7);
        assert_eq!(recovery.window(), 256);
    }

    #[test]
    fn naks_for_one_packet_after_the_other_end_selective_retransmission() {
        let mut recovery = recovery();
        recovery.peer_reorders = true;
        assert!(recovery.on_sequence_nak(10));
        assert!(!recovery.on_sequence_nak(10), "a copy");
        for (nak, reorders) in [(11, true), (12, false)] {
            assert!(recovery.on_sequence_nak(nak));
            assert_eq!(recovery.peer_reorders, reorders, "{nak}");
        }
    }
}
