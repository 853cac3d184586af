//! What a requester knows about losses: how much may be in flight, what was noticed, and what is left to try.
//!
//! The ACK timeout of a QP is tens of milliseconds, because the architecture makes it the time after which a peer is
//! given up step by step. Between two hosts of one network a round trip takes a hundred microseconds, and what is lost
//! twice, or whose NAK is lost, would stand still for hundreds of round trips. So when nothing was acknowledged for a
//! few round trips, the oldest packet is retransmitted as a *probe*, as TCP (RFC 8985) and QUIC (RFC 9002) do; that
//! spends no retry, and a peer that has it sees a duplicate, which it acknowledges. If the ACK covers this one
//! packet alone, the next is probed, and if that ACK covers no more either, the following packets are taken for
//! lost, too. Of a READ the probe asks for one response packet: what a busy responder has not sent yet would come
//! twice.
//!
//! After a loss only a few packets follow the one that is retransmitted until something is acknowledged: most
//! responders have dropped them (go-back-N), and those that buffered what came behind the gap need none. One that was
//! seen to buffer them gets the missing packets alone, and the flow goes on meanwhile.

use std::time::Duration;

use super::congestion_window::{CongestionWindow, Loss};
use super::rtt::RttEstimator;
use super::send_state::Seq;
use crate::rnr_backoff::RnrBackoff;

/// PSNs in flight right after a loss.
const WINDOW_AFTER_LOSS: u32 = 8;
/// Shortest time without progress that leads to a probe: above what a busy scheduler takes away.
const MIN_PROBE_TIMEOUT: Duration = Duration::from_micros(500);
/// The same before a response with data is requested again for a second time, or of a responder of which it is not
/// known how long it takes: what is repeated comes on top of what is merely late.
const MIN_RESPONSE_TIMEOUT: Duration = Duration::from_millis(4);
/// Shortest time for which a response that was overtaken is late and not lost.
const MIN_PATIENCE: Duration = Duration::from_micros(100);
/// Times that a timer is more patient than what comes next, as long as something is expected: that tells without waking
/// anybody.
const PATIENCE_IF_MORE: u32 = 5;
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
    /// The oldest missing response is to be requested again, alone.
    ResponseDue,
    /// The packet with this PSN was sent.
    Sent(Seq, Attempt),
}

/// Why everything is retransmitted from some packet on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Setback {
    /// The responder had no receive. Nothing was lost, but what came behind the message.
    NotReady,
    /// The responder says that a packet is missing.
    Nak,
    /// Nothing was heard.
    Silence,
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
    congestion: CongestionWindow,
    /// PSNs that may be in flight as soon as something is acknowledged.
    resume: Option<u32>,
    rtt: RttEstimator,
    /// The time from a READ or atomic to its first response.
    response_time: RttEstimator,
    pub(super) probe: Probe,
    /// Probes since the last progress.
    probes: u32,
    /// Times that the probe timeout has doubled since a round trip was measured (RFC 6298, 5.5 to 5.7).
    probe_backoff: u32,
    /// A packet to retransmit alone.
    pub(super) retransmit: Option<Seq>,
    /// The responder was seen to buffer what comes behind a gap: only what is missing need be retransmitted.
    pub(super) peer_reorders: bool,
    /// Retransmissions that are left before the peer is given up (IBA 9.7.6.1.3), and the same after RNR NAKs.
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// How long the next RNR wait is.
    pub(super) rnr_backoff: RnrBackoff,
    /// ACK timeouts in a row.
    pub(super) backoff: u32,
    /// The last thing that happened was an ACK timeout.
    pub(super) timed_out: bool,
    /// PSN of the last sequence NAK that was acted upon: a responder sends one for each missing packet, what comes
    /// again was duplicated on its way.
    nak_psn: Option<Seq>,
    /// The packet to which the requester went back last without spending a retry.
    free_psn: Option<Seq>,
    /// The PSN after the last packet that was retransmitted alone.
    alone_until: Option<Seq>,
    /// How many of them in a row named the packet after the one that was retransmitted.
    consecutive_naks: u32,
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
        }
    }

    /// The message that found no receive has found one: `retries` are allowed for the next.
    pub(super) const fn refill_rnr_retries(&mut self, retries: u8) {
        self.rnr_retries = retries;
        self.rnr_backoff.reset();
    }

    /// PSNs that may be in flight as far as the network is concerned.
    #[inline]
    pub(super) const fn congestion_window(&self) -> u32 {
        self.congestion.psns()
    }

    /// PSNs that may be in flight.
    pub(super) fn window(&self) -> u32 {
        self.window.min(self.congestion.psns())
    }

    /// The smoothed round trip time and its variation. `None`: nothing was measured yet.
    pub(super) fn rtt_estimate(&self) -> Option<(Duration, Duration)> {
        self.rtt.estimate().or_else(|| self.response_time.estimate())
    }

    /// For how long a response that was overtaken is late and not lost.
    pub(super) fn patience(&self) -> Duration {
        self.rtt_estimate().map_or(MIN_PATIENCE, |(srtt, _)| (srtt / 4).max(MIN_PATIENCE))
    }

    /// For how long a timer waits for what was overtaken. `more`: something is still to come behind it, and will tell.
    pub(super) fn timer_patience(&self, more: bool) -> Duration {
        if more { self.patience().saturating_mul(PATIENCE_IF_MORE) } else { self.patience() }
    }

    /// A packet up to `end` that asks for an ACK was sent for the first time.
    pub(super) fn on_sent(&mut self, now: Duration, end: Seq) {
        self.rtt.on_sent(now, end);
    }

    /// A READ or atomic whose first response has the PSN before `end` was sent for the first time.
    pub(super) fn on_request_sent(&mut self, now: Duration, end: Seq) {
        self.response_time.on_sent(now, end);
    }

    /// A packet was retransmitted alone; what it asks for ends before `end`.
    pub(super) const fn on_retransmitted_alone(&mut self, end: Seq) {
        self.alone_until = Some(end);
    }

    /// Missing responses are about to be requested again.
    pub(super) const fn on_lost_response(&mut self) {
        self.response_time.on_retransmit();
    }

    /// `acked` more PSNs are done, up to `una`, and `retries` are allowed again. `max` is the first that was never
    /// sent.
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

    /// What `has` says has come behind a gap.
    pub(super) fn on_sacked(&mut self, now: Duration, has: impl Fn(Seq) -> bool) {
        if self.rtt.on_sacked(now, has) {
            self.probe_backoff = 0;
        }
    }

    /// The data of the response at `seq` has come behind a gap, which takes time that says nothing of the way.
    pub(super) fn on_early_data(&mut self, now: Duration, seq: Seq) {
        if self.response_time.on_sacked(now, |measured| measured == seq) {
            self.probe_backoff = 0;
        }
    }

    /// Packets are lost. `max` is the first PSN that was never sent.
    pub(super) fn on_lost(&mut self, now: Duration, loss: Loss, max: Seq) {
        if loss.is_none() {
            return;
        }
        self.congestion.on_lost(now, loss, self.is_late(), max);
    }

    /// Returns `true` if packets wait on the way about as long as they ever do.
    pub(super) fn is_late(&self) -> bool {
        self.rtt.is_late() || self.response_time.is_late()
    }

    /// How often the congestion window was cut.
    pub(super) const fn cuts(&self) -> u64 {
        self.congestion.cuts()
    }

    /// Nothing is heard of what is in flight. `max` is the first PSN that was never sent.
    pub(super) fn on_silence(&mut self, now: Duration, max: Seq) {
        self.congestion.on_silence(now, max);
    }

    /// The packet at `seq` is about to be retransmitted, and no other.
    pub(super) fn on_retransmit_of(&mut self, seq: Seq) {
        self.rtt.on_retransmit_of(seq);
    }

    /// An ACK timeout.
    pub(super) const fn on_timeout(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
        self.nak_psn = None;
    }

    /// A probe is due. Returns which one in a row it is.
    pub(super) fn on_probe(&mut self) -> u32 {
        self.probes += 1;
        self.probe_backoff = (self.probe_backoff + 1).min(MAX_PROBES);
        self.nak_psn = None;
        self.probes
    }

    /// Everything behind the `in_flight` oldest PSNs is about to be retransmitted. A responder that has spoken gets
    /// what it got before, or half of that after a loss, as soon as it acknowledges something.
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

    /// Retransmits one packet alone.
    pub(super) const fn retransmit_alone(&mut self, seq: Seq) {
        self.retransmit = Some(seq);
        self.rtt.on_retransmit();
    }

    /// How long to wait for progress before a probe, if something is `in_flight`. `response`: a response with data is
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

    /// The responder keeps nothing behind the packet at `seq`. Returns `true` if going back to it spends no retry: the
    /// first time for each packet.
    pub(super) fn takes_back_free(&mut self, seq: Seq) -> bool {
        self.free_psn.replace(seq) != Some(seq)
    }

    /// A sequence NAK names `seq`. Returns `true` if it is not a copy of the one before. A responder that names one
    /// packet after the other, although those were in flight, does not buffer them any more.
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
        // A message that finds no receive time and again.
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
