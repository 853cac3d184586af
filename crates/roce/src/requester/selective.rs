//! Selective acknowledgements of a responder that agreed to send them ([`crate::wire::SackMap`]).

use std::time::Duration;

use pvrdma_verbs::RequesterOps;

use super::Requester;
use super::loss_recovery::Setback;
use super::read_grid::ReadGrid;
use super::request::{Request, Stage};
use super::scoreboard::MAX_REORDERING;
use super::send_state::Seq;
use super::timers::Timer;
use crate::wire::SackMap;

impl Requester {
    /// Handles a selective acknowledgement: the responder misses the packet at `seq` and has those in `map`.
    pub(super) fn selective_ack(&mut self, now: Duration, seq: Seq, map: &SackMap, ops: &mut impl RequesterOps) {
        if seq < self.snd.executed {
            self.stats.stale += 1;
            return;
        }
        self.ack_until(now, seq, ops);
        // During an RNR wait, this NAK only reflects packets that were in flight when the wait began.
        if self.ended || self.timers.is_running(Timer::RnrBackoff) {
            return;
        }
        // The PSN that the responder expects only increases, so a packet that it had before and misses now is a proof
        // as well: the NAK that reported the loss of its buffer was itself lost.
        if map.is_empty() || self.scoreboard.has(seq) {
            return self.nothing_kept(now, seq, ops);
        }
        if self.scoreboard.update(seq, map, self.snd.max) {
            let board = &self.scoreboard;
            self.recovery.on_sacked(now, |seq| board.has(seq));
            self.restart_timers(now);
        }
        self.find_lost(now);
        self.notice_missing(now, seq);
    }

    /// Goes back to the packet at `seq`: the responder misses it and keeps nothing after it, regardless of earlier
    /// reports, because it had no room or has lost its buffer. This costs no retry the first time for each packet. A
    /// responder that requests the same packet forever therefore uses up the retries.
    fn nothing_kept(&mut self, now: Duration, seq: Seq, ops: &mut impl RequesterOps) {
        let is_news = self.recovery.on_sequence_nak(seq) || self.scoreboard.received() > 0;
        if !is_news {
            return;
        }
        self.stats.sequence_naks += 1;
        if self.recovery.takes_back_free(seq) {
            self.go_back(now, seq, Setback::Nak);
            self.restart_timers(now);
        } else {
            self.retry(now, seq, Setback::Nak, ops);
        }
        self.notice_missing(now, seq);
    }

    /// Looks for packets that others have overtaken.
    pub(super) fn find_lost(&mut self, now: Duration) {
        let order = self.recovery.reordering(now, MAX_REORDERING);
        let newest = self.scoreboard.newest();
        let reads = &self.reads;
        let started = self.requests.iter().take_while(|request| request.stage == Stage::Started);
        let executed = self.snd.executed;
        let missing = started
            .skip_while(|request| request.end() <= executed)
            .take_while(|request| request.first < newest)
            .flat_map(|request| packets_of(request, executed, reads))
            .take_while(|&seq| seq < newest);
        let lost = self.scoreboard.find_lost(now, missing, order);
        self.recovery.on_lost(now, lost, self.snd.max);
    }
}

/// PSNs of the packets of a request from `from` on: a READ has one for each request that it is split into. The missing
/// packet may begin elsewhere, because a request was split once more.
fn packets_of(request: &Request, from: Seq, reads: &ReadGrid) -> impl Iterator<Item = Seq> {
    let first = Some(from.max(request.first)).filter(|&seq| seq < request.end());
    std::iter::successors(first, move |&seq| {
        let next = if request.wants_data() { reads.end_of(request, seq) } else { seq + 1 };
        Some(next).filter(|&next| next < request.end())
    })
}
