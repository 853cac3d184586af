//! Flight recorder of a queue pair: the events before it entered the error state.
//!
//! Only rare events are recorded, so a queue pair without any costs only an empty pointer. A repeated event is counted,
//! not stored again. The thread that flushes a failed queue pair takes the recording and logs it. A queue pair that its
//! guest moves to the error state has not failed.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_roce::RequesterStats;
use pvrdma_verbs_types::{NakReason, QpState, WcStatus};

use super::error_cause::ErrorCause;
use crate::failures::FailureCause;

/// Maximum number of events that are kept of a queue pair: the last ones.
const EVENTS: usize = 16;

/// Maximum size of a recording, in bytes.
pub(crate) const RECORDING: usize = size_of::<Recording>() + EVENTS * size_of::<Entry>();

/// A rare event of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlightEvent {
    /// A modify command changed the state.
    State(QpState),
    /// A modify command changed the path.
    Path,
    /// The connection changed to another of several equal paths.
    Rehashed,
    /// Packets were retransmitted.
    Resent,
    /// The oldest packet was retransmitted, to test whether the peer responds.
    Probe,
    /// No acknowledgement arrived in time.
    Timeout,
    /// The peer reported a gap.
    SequenceNak,
    /// The peer had no receive.
    RnrNak,
    /// Responses were missing.
    LostResponses,
    /// A peer in this process does not exist.
    Unanswered,
    /// A request of the peer was refused.
    Refused(NakReason),
    /// A request ended with this status.
    Request(WcStatus),
    /// The ring of the send queue is invalid.
    SendQueue,
    /// The ring of the receive queue is invalid.
    ReceiveQueue,
}

impl fmt::Display for FlightEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State(state) => write!(f, "modified to {state:?}"),
            Self::Path => f.write_str("new path"),
            Self::Rehashed => f.write_str("another source port"),
            Self::Resent => f.write_str("packets retransmitted"),
            Self::Probe => f.write_str("probe"),
            Self::Timeout => f.write_str("timeout"),
            Self::SequenceNak => f.write_str("sequence NAK"),
            Self::RnrNak => f.write_str("RNR NAK"),
            Self::LostResponses => f.write_str("responses lost"),
            Self::Unanswered => f.write_str("no answer"),
            Self::Refused(nak) => write!(f, "request of the peer refused: {nak:?}"),
            Self::Request(status) => write!(f, "request ended: {status:?}"),
            Self::SendQueue => f.write_str("send queue invalid"),
            Self::ReceiveQueue => f.write_str("receive queue invalid"),
        }
    }
}

/// An event, with the number of its repetitions in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    event: FlightEvent,
    count: u64,
    first: Duration,
    last: Duration,
}

/// The events of a queue pair.
#[derive(Debug, Default)]
struct Recording {
    entries: VecDeque<Entry>,
    /// Number of entries that were dropped to make room.
    dropped: u64,
    failed: Option<ErrorCause>,
}

/// A failed queue pair with its last events, for display.
#[derive(Debug)]
pub(crate) struct Failure {
    half: ErrorCause,
    recording: Box<Recording>,
    now: Duration,
}

impl Failure {
    /// Returns the cause: the last event of the half that failed which can end a queue pair.
    pub(crate) fn cause(&self) -> FailureCause {
        let mut events = self.recording.entries.iter().rev().map(|entry| entry.event);
        match self.half {
            ErrorCause::CqOverrun => FailureCause::CqOverrun,
            ErrorCause::Responder => events
                .find_map(|event| match event {
                    FlightEvent::Refused(nak) => Some(FailureCause::of_refusal(nak)),
                    FlightEvent::ReceiveQueue => Some(FailureCause::ReceiveQueue),
                    _ => None,
                })
                .unwrap_or(FailureCause::RefusedOperation),
            ErrorCause::Requester | ErrorCause::Command => {
                let cause = events.by_ref().find_map(|event| match event {
                    FlightEvent::Request(status) => Some(FailureCause::of_request(status)),
                    FlightEvent::SendQueue => Some(FailureCause::SendQueue),
                    _ => None,
                });
                match cause {
                    // The remaining events are those before the end of the request. The wire has timeouts instead.
                    Some(FailureCause::RetryExceeded) if events.next() == Some(FlightEvent::Unanswered) => {
                        FailureCause::PeerAbsent
                    }
                    cause => cause.unwrap_or(FailureCause::RequestFailed),
                }
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.half {
            ErrorCause::Command => "its guest",
            ErrorCause::Requester => "its requester",
            ErrorCause::Responder => "its responder",
            ErrorCause::CqOverrun => "a full completion queue",
        };
        f.write_str(word)?;
        if self.recording.dropped > 0 {
            write!(f, "; {} earlier", self.recording.dropped)?;
        }
        let before = |at: Duration| self.now.saturating_sub(at).as_secs_f64() * 1e3;
        for Entry { event, count, first, last } in &self.recording.entries {
            write!(f, "; -{:.3} ms {event}", before(*last))?;
            if *count > 1 {
                write!(f, " ({count} times since -{:.3} ms)", before(*first))?;
            }
        }
        Ok(())
    }
}

/// Recorder of events of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct FlightRecorder(Mutex<Option<Box<Recording>>>);

impl FlightRecorder {
    /// Records an event.
    #[cold]
    pub(crate) fn record(&self, now: Duration, event: FlightEvent) {
        self.add(now, event, 1);
    }

    /// Records an event that is of interest only next to others: it is dropped if nothing has been recorded yet.
    #[cold]
    pub(crate) fn note(&self, now: Duration, event: FlightEvent) {
        if let Some(recording) = &mut *self.0.lock() {
            recording.add(now, event, 1);
        }
    }

    fn add(&self, now: Duration, event: FlightEvent, count: u64) {
        self.0.lock().get_or_insert_default().add(now, event, count);
    }

    /// Records the events between two snapshots of a requester's statistics.
    #[inline]
    pub(crate) fn requester(&self, now: impl FnOnce() -> Duration, before: &RequesterStats, after: &RequesterStats) {
        let rare = |stats: &RequesterStats| {
            [
                (FlightEvent::Timeout, stats.timeouts),
                (FlightEvent::SequenceNak, stats.sequence_naks),
                (FlightEvent::RnrNak, stats.rnr_naks),
                (FlightEvent::LostResponses, stats.lost_responses),
                (FlightEvent::Probe, stats.probes),
                (FlightEvent::Rehashed, stats.rehashed),
                (FlightEvent::Resent, stats.retransmitted),
            ]
        };
        let (before, after) = (rare(before), rare(after));
        if before != after {
            self.differences(now(), before, after);
        }
    }

    #[cold]
    fn differences(&self, now: Duration, before: [(FlightEvent, u64); 7], after: [(FlightEvent, u64); 7]) {
        for ((event, after), (_, before)) in after.into_iter().zip(before) {
            if after > before {
                self.add(now, event, after.wrapping_sub(before));
            }
        }
    }

    /// Records that the queue pair has entered its error state.
    #[cold]
    pub(super) fn fail(&self, cause: ErrorCause) {
        self.0.lock().get_or_insert_default().failed.get_or_insert(cause);
    }

    /// Discards the recording, because the queue pair is reset or its guest ends it.
    pub(super) fn clear(&self) {
        self.0.lock().take();
    }

    /// Takes the recording of a failed queue pair. Returns it only once.
    #[cold]
    pub(crate) fn take_failure(&self, now: Duration) -> Option<Failure> {
        let mut held = self.0.lock();
        let cause = held.as_ref()?.failed?;
        Some(Failure { half: cause, recording: held.take()?, now })
    }
}

impl Recording {
    fn add(&mut self, now: Duration, event: FlightEvent, count: u64) {
        match self.entries.back_mut() {
            Some(last) if last.event == event => {
                last.count = last.count.saturating_add(count);
                last.last = now;
            }
            _ => {
                if self.entries.capacity() < EVENTS {
                    self.entries.reserve_exact(EVENTS);
                }
                if self.entries.len() >= EVENTS {
                    self.entries.pop_front();
                    self.dropped = self.dropped.saturating_add(1);
                }
                self.entries.push_back(Entry { event, count, first: now, last: now });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Attack: a peer causes events without end. The number of entries is limited, and repeated events are one entry.
    #[test]
    fn a_recording_is_bounded() {
        let recorder = FlightRecorder::default();
        for number in 0..100_000_u32 {
            recorder.record(number * MS, if number % 2 == 0 { FlightEvent::RnrNak } else { FlightEvent::Timeout });
        }
        for number in 0..100_000_u32 {
            recorder.record(number * MS, FlightEvent::SequenceNak);
        }
        let held = recorder.0.lock();
        let recording = held.as_ref().unwrap();
        assert_eq!((recording.entries.len(), recording.dropped), (EVENTS, 100_001 - EVENTS as u64));
        let held = size_of::<Recording>() + recording.entries.capacity() * size_of::<Entry>();
        assert!(held <= RECORDING, "{held} bytes");
    }

    #[test]
    fn a_failure_is_reported_once_and_in_words() {
        let recorder = FlightRecorder::default();
        // A change of state costs nothing as long as nothing else was recorded.
        recorder.note(MS, FlightEvent::State(QpState::Rts));
        assert!(recorder.0.lock().is_none());
        let before = RequesterStats::default();
        recorder.requester(|| panic!("nothing has happened"), &before, &RequesterStats { packets: 7, ..before });
        recorder.requester(|| 10 * MS, &before, &RequesterStats { timeouts: 1, retransmitted: 3, ..before });
        recorder.requester(|| 20 * MS, &before, &RequesterStats { retransmitted: 2, ..before });
        recorder.note(30 * MS, FlightEvent::State(QpState::Sqd));
        recorder.record(40 * MS, FlightEvent::Request(WcStatus::RetryExceeded));
        assert!(recorder.take_failure(50 * MS).is_none(), "the queue pair has not failed");
        recorder.fail(ErrorCause::Requester);
        recorder.fail(ErrorCause::CqOverrun);
        let failure = recorder.take_failure(50 * MS).unwrap();
        assert_eq!(failure.cause(), FailureCause::RetryExceeded);
        assert_eq!(
            failure.to_string(),
            "its requester; -40.000 ms timeout; -30.000 ms packets retransmitted (5 times since -40.000 ms); \
             -20.000 ms modified to Sqd; -10.000 ms request ended: RetryExceeded"
        );
        assert!(recorder.take_failure(60 * MS).is_none());
    }

    /// The cause is that of the half that failed, and of its last request.
    #[test]
    fn the_cause_of_a_failure() {
        use FlightEvent::{ReceiveQueue, Refused, Rehashed, Request, SendQueue, Timeout, Unanswered};
        let refused = Refused(NakReason::RemoteAccess);
        for (half, events, cause) in [
            (ErrorCause::Requester, &[refused, Request(WcStatus::LocalProtection)][..], FailureCause::LocalProtection),
            (ErrorCause::Responder, &[Request(WcStatus::RemoteAccess), refused], FailureCause::RefusedAccess),
            (ErrorCause::Responder, &[refused, Request(WcStatus::Flushed)], FailureCause::RefusedAccess),
            (ErrorCause::CqOverrun, &[refused], FailureCause::CqOverrun),
            (ErrorCause::Requester, &[Request(WcStatus::BadResponse), SendQueue], FailureCause::SendQueue),
            (ErrorCause::Responder, &[refused, ReceiveQueue], FailureCause::ReceiveQueue),
            (ErrorCause::Requester, &[Unanswered, Request(WcStatus::RetryExceeded)], FailureCause::PeerAbsent),
            (
                ErrorCause::Requester,
                &[Unanswered, Timeout, Request(WcStatus::RetryExceeded)],
                FailureCause::RetryExceeded,
            ),
            (ErrorCause::Requester, &[Rehashed], FailureCause::RequestFailed),
        ] {
            let recorder = FlightRecorder::default();
            events.iter().for_each(|&event| recorder.record(MS, event));
            recorder.fail(half);
            assert_eq!(recorder.take_failure(MS).unwrap().cause(), cause, "{half:?} {events:?}");
        }
    }

    #[test]
    fn each_cause_has_a_word_of_its_own() {
        let mut words = FailureCause::ALL.map(FailureCause::word);
        assert_eq!(
            serde_json::to_value(FailureCause::ALL).unwrap(),
            serde_json::json!(words),
            "causes have the same names in JSON"
        );
        words.sort_unstable();
        assert!(words.windows(2).all(|pair| pair[0] != pair[1]), "{words:?}");
    }
}
