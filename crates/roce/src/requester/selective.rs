//! Selective acknowledgements of a responder that agreed to send them ([`crate::wire::SackMap`]).

use std::time::Duration;

use super::Requester;
use super::loss_recovery::Setback;
use super::read_grid::ReadGrid;
use super::request::{Request, Stage};
use super::send_state::Seq;
use super::timers::Timer;
use crate::ops::RequesterOps;
use crate::wire::{ACCEPT, OFFER, SackMap};

/// PSNs from the oldest that is unacked to the newest in flight, at most, if the responder keeps what comes behind a
/// gap: as many as a map speaks of.
pub(super) const MAX_SPAN: Seq = SackMap::MAX_DISTANCE as Seq;

/// Whether the responder sends selective acknowledgements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sack {
    /// No.
    Off,
    /// Requests offer to take them, until the first response.
    Offered,
    /// Yes.
    On,
}

impl Sack {
    /// What requests carry in their reserved bits.
    #[inline]
    pub(super) const fn offer(self) -> u8 {
        if matches!(self, Self::Offered) { OFFER } else { 0 }
    }

    /// A response carries this in its reserved bits. The first one decides.
    #[inline]
    pub(super) const fn on_response(&mut self, reserved7: u8) {
        if matches!(self, Self::Offered) {
            *self = if reserved7 == ACCEPT { Self::On } else { Self::Off };
        }
    }
}

impl Requester {
    /// The responder misses the packet at `seq` and has what `map` says.
    pub(super) fn selective_ack(&mut self, now: Duration, seq: Seq, map: &SackMap, ops: &mut impl RequesterOps) {
        if seq < self.snd.executed {
            self.stats.stale += 1;
            return;
        }
        self.ack_until(now, seq, ops);
        // During an RNR wait this is only an echo of what was in flight.
        if self.ended || self.timers.is_running(Timer::RnrBackoff) {
            return;
        }
        // What the responder expects only moves on, so a packet that it had and misses now is proof as well. The NAK
        // that told of the loss was lost itself.
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

    /// Goes back to the packet at `seq`: the responder misses it and keeps nothing behind it, whatever it has reported
    /// before, because it had no room or has lost its buffer. This costs no retry once for each packet, so that a
    /// responder that asks for the same packet for ever spends the retries.
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
        let patience = self.recovery.patience();
        let newest = self.scoreboard.newest();
        let reads = &self.reads;
        let started = self.requests.iter().take_while(|request| request.stage == Stage::Started);
        let executed = self.snd.executed;
        let missing = started
            .skip_while(|request| request.end() <= executed)
            .take_while(|request| request.first < newest)
            .flat_map(|request| packets_of(request, executed, reads))
            .take_while(|&seq| seq < newest);
        let lost = self.scoreboard.find_lost(now, missing, patience);
        self.recovery.on_lost(now, lost, self.snd.max);
    }
}

/// PSNs of the packets of a request from `from` on: a READ has one for each request that it is split into. The one that
/// is missing may begin elsewhere, because a request was split once more.
fn packets_of(request: &Request, from: Seq, reads: &ReadGrid) -> impl Iterator<Item = Seq> {
    let first = Some(from.max(request.first)).filter(|&seq| seq < request.end());
    std::iter::successors(first, move |&seq| {
        let next = if request.wants_data() { reads.end_of(request, seq) } else { seq + 1 };
        Some(next).filter(|&next| next < request.end())
    })
}
