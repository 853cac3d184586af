//! Saving and restoring a requester.

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_saved_state::roce as saved;
use pvrdma_verbs_types::{QpAttrs, SendOp};

use super::read_grid::ReadGrid;
use super::request::{Request, Stage};
use super::sack::Sack;
use super::send_state::{Seq, wire_psn};
use super::timers::Timer;
use super::{Requester, RequesterStats, Tuning};
use crate::path::Path;
use crate::rnr_backoff::RnrBackoff;
use crate::saved::{RestoreError, agreement, ensure, failure, invalid, port, psn};

/// Number of PSNs that may be outstanding: half of PSN space (IBA 9.7.4.1.1).
const MAX_SENT: u32 = 1 << 23;

impl Requester {
    /// Saves the requester. Attributes, path and tuning are the caller's to save. `now` is on the clock of the other
    /// methods.
    ///
    /// Measurements, windows, timers and selective acknowledgements are dropped, and responses that arrived before an
    /// earlier one are requested again.
    pub fn save(&self, now: Duration) -> saved::Requester {
        let Self {
            path: _,
            remote: _,
            attrs: _,
            tuning: _,
            requests,
            page_lists: _,
            spare: _,
            snd,
            nxt_request: _,
            reads,
            responses: _,
            probed: _,
            ack_policy: _,
            recovery,
            sack,
            omits_icrc: _,
            scoreboard: _,
            multipath,
            timers,
            draining,
            failing,
            ended,
            ident: _,
            stats,
        } = self;
        let count = |until: Seq| until.saturating_sub(snd.una);
        let short = |until: Seq| u32::try_from(count(until)).unwrap_or(u32::MAX);
        let first = requests.front().map_or(snd.una, |request| request.first);
        let rnr_wait = timers.deadline(Timer::RnrBackoff).map(|deadline| deadline.saturating_sub(now).as_micros());
        saved::Requester {
            una: wire_psn(snd.una).get(),
            executed: short(snd.executed),
            sent: short(snd.max),
            posted: count(snd.posted),
            requests: requests.iter().map(Request::save).collect(),
            reads: Some(reads.save(first, snd.una)),
            sack: sack.save().into(),
            retries: recovery.retries.into(),
            rnr_retries: recovery.rnr_retries.into(),
            rnr_wait: rnr_wait.map_or(0, |micros| u32::try_from(micros).unwrap_or(u32::MAX)),
            draining: *draining,
            ended: *ended,
            failing: failing
                .filter(|_| !ended)
                .map(|(seq, status)| saved::Failing { seq: short(seq), status: status as u32 }),
            peer_port: multipath.peer_port.map(u32::from),
            stats: Some(save_stats(stats)),
        }
    }

    /// Restores a requester in a connection with these attributes, which the caller has checked. Call
    /// [`Self::poll_transmit`] then: everything that was sent and is not known to have been executed is sent once more,
    /// which costs no retry.
    ///
    /// The state may hold more requests than `tuning` allows. The caller checks their number against the send ring.
    ///
    /// # Errors
    /// The state is not one that a requester can be in.
    pub fn restore(
        attrs: &QpAttrs,
        path: Path,
        tuning: Tuning,
        now: Duration,
        state: saved::Requester,
    ) -> Result<Self, RestoreError> {
        let saved::Requester {
            una,
            executed,
            sent,
            posted,
            requests,
            reads,
            sack,
            retries,
            rnr_retries,
            rnr_wait,
            draining,
            ended,
            failing,
            peer_port,
            stats,
        } = state;
        let mut this = Self::new(&QpAttrs { sq_psn: psn("oldest PSN", una)?, ..*attrs }, path, tuning);
        this.attrs.sq_psn = attrs.sq_psn;
        let una = this.snd.una;
        ensure(executed <= sent && u64::from(sent) <= posted, "the marks in PSN space are not in order")?;
        ensure(sent < MAX_SENT, "more PSNs are outstanding than a connection may have")?;
        this.snd.executed = una.saturating_add(executed.into());
        this.snd.max = una.saturating_add(sent.into());
        this.snd.posted = una.checked_add(posted).ok_or_else(|| invalid("number of posted PSNs", posted))?;
        (this.draining, this.ended) = (draining, ended);
        this.requests = restore_requests(requests, this.snd.posted, attrs)?;
        this.check_requests()?;
        this.page_lists = this.requests.iter().filter(|request| holds_pages(request)).count();
        let first = this.requests.front().map_or(una, |request| request.first);
        let reads = reads.ok_or(RestoreError::Missing { field: "division of READs" })?;
        this.reads = ReadGrid::restore(&reads, first, this.snd.max)?;
        this.sack = Sack::restore(agreement(sack)?);
        this.recovery.retries = at_most("number of retries", retries, attrs.retry_cnt)?;
        this.recovery.rnr_retries = at_most("number of RNR retries", rnr_retries, attrs.rnr_retry)?;
        ensure(!ended || this.requests.is_empty(), "a requester has ended and holds requests")?;
        if let Some(saved::Failing { seq, status }) = failing {
            ensure(seq < sent, "the request that fails was not sent")?;
            let seq = una.saturating_add(seq.into());
            let waits = this.requests.front().is_some_and(|front| seq >= front.end());
            ensure(waits, "the request that fails has none before it")?;
            this.failing = Some((seq, failure(status)?));
        }
        this.multipath.peer_port = port(peer_port)?;
        this.stats = stats.map(restore_stats).unwrap_or_default();
        // A wait that ends too early could cost the last retry.
        let wait = Duration::from_micros(rnr_wait.into()).min(RnrBackoff::WOKEN);
        this.timers.set(Timer::RnrBackoff, (rnr_wait > 0).then(|| now.saturating_add(wait)));
        this.set_nxt(una);
        // The first packet requests an ACK, which tells what the responder has.
        this.ack_policy.force();
        Ok(this)
    }

    /// Checks that the restored requests and the marks in PSN space fit together.
    fn check_requests(&self) -> Result<(), RestoreError> {
        let Some(front) = self.requests.front() else {
            return ensure(self.ended || self.snd.una == self.snd.posted, "PSNs are posted without a request");
        };
        ensure(front.first <= self.snd.una, "the oldest request begins after the oldest PSN that is not done")?;
        ensure(front.stage != Stage::Started || self.snd.una < front.end(), "the oldest request is done")?;
        let started = self.requests.iter().take_while(|request| request.stage == Stage::Started).count();
        let mut others = self.requests.iter().skip(started);
        // A request whose memory is gone has failed although a part of it was sent.
        let sent_before = others.next().map_or(self.snd.posted, |next| match next.stage {
            Stage::Failed(_) => next.end(),
            Stage::Posted | Stage::Started => next.first,
        });
        ensure(self.snd.max <= sent_before, "PSNs of a request that was not started were sent")?;
        ensure(others.all(|request| request.stage != Stage::Started), "requests were not started in order")
    }
}

/// Restores requests whose last PSN is before `posted`.
fn restore_requests(
    requests: Vec<saved::Request>,
    posted: Seq,
    attrs: &QpAttrs,
) -> Result<VecDeque<Request>, RestoreError> {
    let restore = |request| Request::restore(request, 0, attrs.path_mtu);
    let mut restored = requests.into_iter().map(restore).collect::<Result<VecDeque<_>, _>>()?;
    let total: Seq = restored.iter().map(|request| Seq::from(request.count)).sum();
    let mut first = posted.checked_sub(total);
    for request in &mut restored {
        request.first = first.ok_or(RestoreError::Contradiction("requests have more PSNs than are posted"))?;
        first = Some(request.end());
    }
    Ok(restored)
}

/// Returns `true` for a fast registration that was not started.
fn holds_pages(request: &Request) -> bool {
    request.stage == Stage::Posted && matches!(request.wr.op, SendOp::FastRegister(_))
}

fn at_most(field: &'static str, value: u32, most: u8) -> Result<u8, RestoreError> {
    u8::try_from(value).ok().filter(|&value| value <= most).ok_or_else(|| invalid(field, value))
}

const fn save_stats(stats: &RequesterStats) -> saved::RequesterStats {
    let RequesterStats {
        packets,
        retransmitted,
        probes,
        timeouts,
        sequence_naks,
        lost_responses,
        rnr_naks,
        rehashed,
        stale,
        without_icrc: _,
    } = *stats;
    saved::RequesterStats {
        packets,
        retransmitted,
        probes,
        timeouts,
        sequence_naks,
        lost_responses,
        rnr_naks,
        rehashed,
        stale,
    }
}

const fn restore_stats(stats: saved::RequesterStats) -> RequesterStats {
    let saved::RequesterStats {
        packets,
        retransmitted,
        probes,
        timeouts,
        sequence_naks,
        lost_responses,
        rnr_naks,
        rehashed,
        stale,
    } = stats;
    RequesterStats {
        packets,
        retransmitted,
        probes,
        timeouts,
        sequence_naks,
        lost_responses,
        rnr_naks,
        rehashed,
        stale,
        without_icrc: 0,
    }
}
