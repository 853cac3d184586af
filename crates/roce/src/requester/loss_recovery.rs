//! Loss recovery state of a requester: the PSNs that may be in flight, the losses that were noticed, and the retries
//! that are left.
//!
//! The ACK timeout of a QP is tens of milliseconds, because the architecture defines it as the time after which a
//! requester gives up on a peer step by step. Between two hosts of one network, a round trip takes a hundred
//! microseconds, so a packet that is lost twice, or whose NAK is lost, would stall the connection for hundreds of round
//! trips. Therefore, when nothing was acknowledged for a few round trips, the oldest packet is retransmitted as a
//! *probe*, as TCP (RFC 8985) and QUIC (RFC 9002) do. A probe costs no retry, and a peer that has the packet already
//! acknowledges it as a duplicate. If the ACK covers this one packet alone, the next one is probed; if that ACK covers
//! no more either, the following packets are considered lost as well. For a READ, the probe requests only one response
//! packet: responses that a busy responder has not sent yet would otherwise arrive twice.
//!
//! After a loss, only a few packets follow the retransmitted one until something is acknowledged: most responders have
//! dropped the packets after the gap (go-back-N), and those that have buffered them do not need them again. A responder
//! that was observed to buffer them gets only the missing packets, and transmission continues meanwhile.

use std::time::Duration;

use super::congestion_window::{CongestionWindow, Loss};
use super::rtt::RttEstimator;
use super::send_state::{MAX_SPAN, Seq};
use crate::rnr_backoff::RnrBackoff;

/// PSNs in flight right after a loss.
const WINDOW_AFTER_LOSS: u32 = 8;
/// Minimum time without progress before a probe: longer than a delay by a busy scheduler.
const MIN_PROBE_TIMEOUT: Duration = Duration::from_micros(500);
/// The same before a response with data is requested a second time, or while the response time of the responder is
/// unknown. Repeated responses add to the load while the first ones are merely late.
const MIN_RESPONSE_TIMEOUT: Duration = Duration::from_millis(4);
/// Minimum time for which an overtaken response counts as late and not as lost.
const MIN_PATIENCE: Duration = Duration::from_micros(100);
/// Factor by which a timer waits longer than that, while more packets are expected: their arrival reveals the loss
/// without a wake-up.
const PATIENCE_IF_MORE: u32 = 5;
/// Maximum number of consecutive probes. After these, the ACK timeout decides.
const MAX_PROBES: u32 = 3;
/// Maximum number of sequence NAKs for consecutive packets that count as losses. After these, the responder is assumed
/// to have stopped buffering packets after a gap.
const MAX_CONSECUTIVE_NAKS: u32 = 2;

/// State of the probe, which retransmits the oldest unacked packet alone to find out which packets the responder has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    None,
    Due(Attempt),
    /// The oldest missing response is to be requested again, alone.
    ResponseDue,
    /// A packet with this PSN was sent as a probe.
    Sent(Seq, Attempt),
}

/// Reason to retransmit everything from some packet on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Setback {
    /// The responder had no receive. Only the packets after the message were lost.
    NotReady,
    /// The responder reports a missing packet.
    Nak,
    /// No response arrived.
    Silence,
}

/// Result of the previous probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Attempt {
    /// There was no previous probe.
    First,
    /// The probed packet had been missing, or the ACK of an earlier packet was late.
    Second,
}

/// Bounds within which an overtaken packet counts as late and not as lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reordering {
    /// Packets that may overtake it.
    pub(super) packets: Seq,
    /// Time since it was overtaken.
    pub(super) time: Duration,
    /// Packets take several paths, so only the time tells.
    pub(super) any_order: bool,
}

#[derive(Debug)]
pub(super) struct LossRecovery {
    /// PSNs that may be in flight now, and upper bound of that.
    window: u32,
    congestion: CongestionWindow,
    /// PSNs that may be in flight as soon as something is acknowledged.
    resume: Option<u32>,
    rtt: RttEstimator,
    /// Time from a READ or atomic to its first response.
    response_time: RttEstimator,
    pub(super) probe: Probe,
    /// Probes since the last progress.
    probes: u32,
    /// Number of doublings of the probe timeout since a round trip was measured (RFC 6298, 5.5 to 5.7).
    probe_backoff: u32,
    /// Packet to retransmit alone.
    pub(super) retransmit: Option<Seq>,
    /// The responder was observed to buffer packets after a gap: only missing packets need to be retransmitted.
    pub(super) peer_reorders: bool,
    /// Retries left before the connection fails (IBA 9.7.6.1.3), and the same after RNR NAKs.
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// Length of the next RNR wait.
    pub(super) rnr_backoff: RnrBackoff,
    /// Consecutive ACK timeouts.
    pub(super) backoff: u32,
    /// The most recent event was an ACK timeout.
    pub(super) timed_out: bool,
    /// PSN of the last sequence NAK that was acted upon. A responder sends one for each missing packet, so a second NAK
    /// with this PSN was duplicated in transit.
    nak_psn: Option<Seq>,
    /// Packet to which the requester last went back without spending a retry.
    free_psn: Option<Seq>,
    /// PSN after the last packet that was retransmitted alone.
    alone_until: Option<Seq>,
    /// Number of consecutive NAKs that named the packet after the retransmitted one.
    consecutive_naks: u32,
    /// Until this time, packets may arrive in any order.
    tolerant: Duration,
}

impl LossRecovery {
    pub(super) fn new(max_window: u32, retries: u8, rnr_retries: u8) -> Self {
        Self {
            window: max_window,
            congestion: CongestionWindow::new(max_window),
            resume: None,
            rtt: RttEstimator::default(),
            response_time: RttEstimator::default(),
            probe: Probe::None,
            probes: 0,
            probe_backoff: 0,
            retransmit: None,
            peer_reorders: false,
            retries,
            rnr_retries,
            rnr_backoff: RnrBackoff::default(),
            backoff: 0,
            timed_out: false,
            nak_psn: None,
            free_psn: None,
            alone_until: None,
            consecutive_naks: 0,
            tolerant: Duration::ZERO,
        }
    }

    /// Restores the RNR retries: the message has found a receive, and `retries` are allowed for the next one.
    pub(super) const fn refill_rnr_retries(&mut self, retries: u8) {
        self.rnr_retries = retries;
        self.rnr_backoff.reset();
    }

    /// PSNs that the network allows in flight.
    #[inline]
    pub(super) const fn congestion_window(&self) -> u32 {
        self.congestion.psns()
    }

    /// PSNs that may be in flight.
    pub(super) fn window(&self) -> u32 {
        self.window.min(self.congestion.psns())
    }

    /// Smoothed round trip time and its variation. `None`: nothing was measured yet.
    pub(super) fn rtt_estimate(&self) -> Option<(Duration, Duration)> {
        self.rtt.estimate().or_else(|| self.response_time.estimate())
    }

    /// Allows packets to arrive in any order until this time, because they take different paths.
    pub(super) const fn tolerate_until(&mut self, time: Duration) {
        self.tolerant = time;
    }

    /// Returns the bounds for overtaken packets. On the same path, at most `packets` overtake another one.
    pub(super) fn reordering(&self, now: Duration, packets: Seq) -> Reordering {
        let any_order = now < self.tolerant;
        Reordering { packets: if any_order { MAX_SPAN } else { packets }, time: self.patience(now), any_order }
    }

    /// Time for which an overtaken packet counts as late and not as lost. On another path, it may wait behind a longer
    /// queue than the packets that overtake it.
    pub(super) fn patience(&self, now: Duration) -> Duration {
        let patience = match self.rtt_estimate() {
            Some((srtt, rttvar)) if now < self.tolerant => (srtt + rttvar * 4) * 2,
            Some((srtt, _)) => srtt / 4,
            None => MIN_PATIENCE,
        };
        patience.max(MIN_PATIENCE)
    }

    /// Time for which a timer waits for an overtaken packet. `more`: later packets are still to come and will reveal
    /// the loss.
    pub(super) fn timer_patience(&self, now: Duration, more: bool) -> Duration {
        let patience = self.patience(now);
        if more { patience.saturating_mul(PATIENCE_IF_MORE) } else { patience }
    }

    /// Records that a packet up to `end` that requests an ACK was sent for the first time.
    pub(super) fn on_sent(&mut self, now: Duration, end: Seq) {
        self.rtt.on_sent(now, end);
    }

    /// Records that a READ or atomic whose first response has the PSN before `end` was sent for the first time.
    pub(super) fn on_request_sent(&mut self, now: Duration, end: Seq) {
        self.response_time.on_sent(now, end);
    }

    /// Records that a packet was retransmitted alone; the range that it requests ends before `end`.
    pub(super) const fn on_retransmitted_alone(&mut self, end: Seq) {
        self.alone_until = Some(end);
    }

    /// Records that missing responses are about to be requested again.
    pub(super) const fn on_lost_response(&mut self) {
        self.response_time.on_retransmit();
    }

    /// Handles progress: `acked` more PSNs are done, up to `una`, and `retries` are allowed again. `max` is the first
    /// PSN that was never sent.
    pub(super) fn on_acked(&mut self, now: Duration, (una, max): (Seq, Seq), acked: Seq, retries: u8) {
        self.congestion.on_acked(acked, una, max);
        self.probes = 0;
        self.retries = retries;
        self.backoff = 0;
        let acked = u32::try_from(acked).unwrap_or(u32::MAX);
        self.window = self.window.saturating_add(acked).max(self.resume.take().unwrap_or(0));
        self.window = self.window.min(self.congestion.psns());
        if self.rtt.on_acked(now, una) | self.response_time.on_acked(now, una) {
            self.probe_backoff = 0;
            self.congestion.set_rtt(self.rtt_estimate().map_or(Duration::ZERO, |(srtt, _)| srtt));
        }
        self.retransmit = self.retransmit.filter(|&seq| seq >= una);
    }

    /// Handles packets that arrived after a gap, as `has` reports.
    pub(super) fn on_sacked(&mut self, now: Duration, has: impl Fn(Seq) -> bool) {
        if self.rtt.on_sacked(now, has) {
            self.probe_backoff = 0;
        }
    }

    /// Records that the data of the response at `seq` arrived after a gap. Its delay says nothing about the path.
    pub(super) fn on_early_data(&mut self, now: Duration, seq: Seq) {
        if self.response_time.on_sacked(now, |measured| measured == seq) {
            self.probe_backoff = 0;
        }
    }

    /// Handles lost packets. `max` is the first PSN that was never sent.
    pub(super) fn on_lost(&mut self, now: Duration, loss: Loss, max: Seq) {
        if loss.is_none() {
            return;
        }
        self.congestion.on_lost(now, loss, self.is_late(), max);
    }

    /// Returns `true` if the queueing delay is close to its maximum.
    pub(super) fn is_late(&self) -> bool {
        self.rtt.is_late() || self.response_time.is_late()
    }

    /// Number of cuts of the congestion window.
    pub(super) const fn cuts(&self) -> u64 {
        self.congestion.cuts()
    }

    /// Handles the lack of any response to the packets in flight. `max` is the first PSN that was never sent.
    pub(super) fn on_silence(&mut self, now: Duration, max: Seq) {
        self.congestion.on_silence(now, max);
    }

    /// Records that the packet at `seq` alone is about to be retransmitted.
    pub(super) fn on_retransmit_of(&mut self, seq: Seq) {
        self.rtt.on_retransmit_of(seq);
    }

    /// Handles an ACK timeout.
    pub(super) const fn on_timeout(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
        self.nak_psn = None;
    }

    /// Records a probe. Returns its number in the current series.
    pub(super) fn on_probe(&mut self) -> u32 {
        self.probes += 1;
        self.probe_backoff = (self.probe_backoff + 1).min(MAX_PROBES);
        self.nak_psn = None;
        self.probes
    }

    /// Prepares the retransmission of everything after the `in_flight` oldest PSNs. A responder that has sent an RNR
    /// NAK or NAK gets the previous window, or half of it after a loss, as soon as it acknowledges something.
    pub(super) fn on_go_back(&mut self, in_flight: Seq, setback: Setback) {
        let before = self.resume.unwrap_or(0).max(self.window);
        self.resume = match setback {
            Setback::NotReady => Some(before),
            Setback::Nak => Some(before / 2),
            Setback::Silence => None,
        };
        self.probe = Probe::None;
        self.timed_out = false;
        self.retransmit = None;
        let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
        self.window = WINDOW_AFTER_LOSS.saturating_add(in_flight).min(self.congestion.psns());
        self.rtt.on_retransmit();
        self.response_time.on_retransmit();
    }

    /// Schedules the retransmission of one packet alone.
    pub(super) const fn retransmit_alone(&mut self, seq: Seq) {
        self.retransmit = Some(seq);
        self.rtt.on_retransmit();
    }

    /// Time to wait for progress before a probe, if packets are `in_flight`. `response`: a response with data is
    /// missing.
    pub(super) fn probe_timeout(&self, in_flight: bool, response: bool) -> Option<Duration> {
        if !in_flight || self.probes >= MAX_PROBES {
            return None;
        }
        let (rtt, response_time) = (self.rtt.rto(), self.response_time.rto());
        let known = if response { response_time } else { rtt };
        let patient = response && (known.is_none() || self.probes > 0);
        let least = if patient { MIN_RESPONSE_TIMEOUT } else { MIN_PROBE_TIMEOUT };
        let timeout = known.or(rtt).or(response_time)?.max(least);
        Some(timeout.saturating_mul(1 << self.probe_backoff))
    }

    /// Records that the responder keeps nothing after the packet at `seq`. Returns `true` if going back to it costs no
    /// retry, which holds for the first time for each packet.
    pub(super) fn takes_back_free(&mut self, seq: Seq) -> bool {
        self.free_psn.replace(seq) != Some(seq)
    }

    /// Handles a sequence NAK for `seq`. Returns `true` unless it is a copy of the previous one. A responder that names
    /// one packet after the other, although those were in flight, does not buffer them any more.
    pub(super) fn on_sequence_nak(&mut self, seq: Seq) -> bool {
        if self.nak_psn == Some(seq) {
            return false;
        }
        let known = self.nak_psn.replace(seq).is_some();
        let consecutive = known && self.alone_until == Some(seq);
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
    fn on_several_paths_only_time_tells_losses() {
        let mut recovery = recovery();
        recovery.on_sent(us(0), 10);
        recovery.on_acked(us(1000), (10, 10), 10, 7);
        recovery.tolerate_until(us(5000));
        // The smoothed round trip time is 1 ms and its variation 0.5 ms. A small window makes no difference.
        recovery.on_go_back(0, Setback::Silence);
        let order = recovery.reordering(us(4999), 3);
        assert_eq!((order.packets, order.time, order.any_order), (MAX_SPAN, us(6000), true));
        let order = recovery.reordering(us(5000), 3);
        assert_eq!((order.packets, order.time, order.any_order), (3, us(250), false));
    }

    #[test]
    fn probes_follow_the_rtt_and_end() {
        let mut recovery = recovery();
        assert_eq!(recovery.probe_timeout(true, false), None, "nothing is known of the peer");
        recovery.on_sent(us(0), 10);
        recovery.on_acked(us(1000), (10, 10), 10, 7);
        for timeout in [3000, 6000, 12_000] {
            assert_eq!(recovery.probe_timeout(true, false), Some(us(timeout)));
            recovery.on_probe();
        }
        assert_eq!(recovery.probe_timeout(true, false), None);
        recovery.on_acked(us(30_000), (11, 11), 1, 7);
        assert!(recovery.probe_timeout(true, false).is_some());
        assert_eq!(recovery.probe_timeout(false, false), None);
    }

    #[test]
    fn the_window_shrinks_with_a_loss_and_grows_with_acks() {
        let mut recovery = recovery();
        recovery.on_sent(us(0), 1);
        recovery.on_go_back(0, Setback::Silence);
        assert_eq!(recovery.window(), 8);
        recovery.on_acked(us(5), (8, 8), 8, 7);
        assert_eq!((recovery.window(), recovery.rtt.rto()), (16, None));
        recovery.on_acked(us(5), (1000, 1000), 992, 7);
        assert_eq!(recovery.window(), 256);
    }

    #[test]
    fn a_responder_that_has_spoken_gets_its_window_back() {
        for (setback, window) in [(Setback::NotReady, 256), (Setback::Nak, 128), (Setback::Silence, 12)] {
            let mut recovery = recovery();
            recovery.on_go_back(3, setback);
            assert_eq!(recovery.window(), 11, "{setback:?}");
            recovery.on_acked(us(5), (1, 1), 1, 7);
            assert_eq!(recovery.window(), window, "{setback:?}");
        }
        // A message that finds no receive repeatedly.
        let mut recovery = recovery();
        (0..5).for_each(|_| recovery.on_go_back(0, Setback::NotReady));
        recovery.on_acked(us(5), (1, 1), 1, 7);
        assert_eq!(recovery.window(), 256);
    }

    #[test]
    fn naks_for_one_packet_after_the_other_end_selective_retransmission() {
        let mut recovery = recovery();
        recovery.peer_reorders = true;
        assert!(recovery.on_sequence_nak(10));
        assert!(!recovery.on_sequence_nak(10), "a copy");
        for (nak, reorders) in [(11, true), (12, false)] {
            recovery.on_retransmitted_alone(nak);
            assert!(recovery.on_sequence_nak(nak));
            assert_eq!(recovery.peer_reorders, reorders, "{nak}");
        }
    }
}
