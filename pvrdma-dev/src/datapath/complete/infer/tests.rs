//! Five kinds of consumers, on virtual time.

use proptest::prelude::*;

use super::*;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

/// Behaviour of a consumer.
#[derive(Clone, Copy, Debug)]
enum Consumer {
    /// Arms, sleeps until it is notified, wakes after `latency`, takes all completions, and repeats that.
    Sleeper { latency: u64 },
    /// Polls every `period` and takes all completions.
    Poller { period: u64 },
    /// Polls every `period`, but computes for `pause` after `busy` polls that found completions.
    Pausing { period: u64, busy: u32, pause: u64 },
    /// Polls every `period`, takes completions if there are at least `batch`, and takes all of them after 20 ms.
    Batcher { period: u64, batch: u32 },
}

/// Result of a run.
#[derive(Debug, Default)]
struct Outcome {
    /// Notifications.
    events: u64,
    /// Notifications that made the consumer look although there was nothing.
    extra: u64,
    /// Longest time from a publication, or from the consumer's last step if that was later, to a notification that
    /// covers it.
    longest_wait: u64,
    /// Notifications that took longer than twice the shortest delay.
    long_waits: u64,
    /// Consumptions.
    consumed: u64,
}

struct Machine {
    infer: Infer,
    now: u64,
    /// Publications and consumptions so far; the consumer's index counts the latter.
    published: u32,
    consumed: u32,
    due: Option<u64>,
    /// Time since which a completion may be waiting.
    waits_since: u64,
    /// Publications covered by a notification.
    covered: u32,
    woken: Option<u64>,
    outcome: Outcome,
}

impl Machine {
    fn obey(&mut self, verdict: Verdict) {
        self.due = verdict.due;
        if verdict.notify {
            let wait = self.now - self.waits_since;
            self.outcome.events += 1;
            self.outcome.longest_wait = self.outcome.longest_wait.max(wait);
            self.outcome.long_waits += u64::from(wait > 2 * SHORTEST);
            self.covered = self.published;
            self.woken.get_or_insert(self.now);
        }
    }

    fn publish(&mut self) {
        self.published += 1;
        if self.published - self.consumed.max(self.covered) == 1 {
            self.waits_since = self.now;
        }
        let verdict = self.infer.published(self.consumed, 1, self.published - self.consumed, self.now);
        self.obey(verdict);
    }

    fn consume(&mut self) {
        if self.consumed == self.published {
            return;
        }
        self.consumed = self.published;
        self.outcome.consumed += 1;
        self.waits_since = self.now;
    }

    fn look(&mut self) {
        self.due = None;
        let verdict = self.infer.looked(self.consumed, self.published - self.consumed, self.now);
        self.obey(verdict);
    }
}

/// Publishes after each of the `gaps`, with a consumer, until all completions are consumed.
fn run(consumer: Consumer, gaps: impl IntoIterator<Item = u64>) -> Outcome {
    let infer = Infer::new(0, 0, SHORTEST, 0);
    let outcome = Outcome::default();
    let mut m = Machine {
        infer,
        now: 0,
        published: 0,
        consumed: 0,
        due: None,
        waits_since: 0,
        covered: 0,
        woken: None,
        outcome,
    };
    let mut gaps = gaps.into_iter();
    let mut arrival = gaps.next();
    let mut acts = match consumer {
        Consumer::Sleeper { .. } => None,
        Consumer::Poller { period } | Consumer::Pausing { period, .. } | Consumer::Batcher { period, .. } => {
            Some(period)
        }
    };
    let mut busy_looks = 0;
    while arrival.is_some() || m.consumed != m.published {
        if let Consumer::Sleeper { latency } = consumer
            && acts.is_none()
        {
            acts = m.woken.map(|at| at + latency);
        }
        let times = [arrival, acts, m.due];
        let next = times.into_iter().flatten().min().expect("a completion waits, and no thread is going to look");
        m.now = next;
        if arrival == Some(next) {
            m.publish();
            arrival = gaps.next().map(|gap| next + gap);
        } else if acts == Some(next) {
            let events = m.woken.take();
            let waiting = m.published - m.consumed;
            if events.is_some() && waiting == 0 {
                m.outcome.extra += 1;
            }
            acts = match consumer {
                Consumer::Sleeper { .. } => {
                    m.consume();
                    None
                }
                Consumer::Poller { period } => {
                    m.consume();
                    Some(next + period)
                }
                Consumer::Pausing { period, busy, pause } => {
                    busy_looks += u32::from(waiting > 0);
                    m.consume();
                    let rest = busy_looks >= busy;
                    if rest {
                        busy_looks = 0;
                    }
                    Some(next + if rest { pause } else { period })
                }
                Consumer::Batcher { period, batch } => {
                    if waiting >= batch || m.now - m.waits_since > 20 * MILLISECOND {
                        m.consume();
                    }
                    Some(next + period)
                }
            };
        } else {
            m.look();
        }
    }
    m.outcome
}

fn gaps(longest: u64) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![1..100 * MICROSECOND, 1..longest], 200..600)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// A sleeper is notified of every completion it does not consume, from the third time on immediately, except for
    /// probes.
    #[test]
    fn a_sleeper_is_woken(latency in 1..400 * MICROSECOND, gaps in gaps(5 * MILLISECOND)) {
        let outcome = run(Consumer::Sleeper { latency }, gaps);
        prop_assert!(outcome.longest_wait <= CONFIRM + SHORTEST && outcome.long_waits <= 4, "{outcome:?}");
        prop_assert_eq!(outcome.extra, 0);
    }

    /// A sleeper whose reaction takes longer than usual is woken as well, never later than the bound, and is
    /// recognized.
    #[test]
    fn a_slow_sleeper_is_woken(latency in MILLISECOND..10 * MILLISECOND, gaps in gaps(50 * MILLISECOND)) {
        let outcome = run(Consumer::Sleeper { latency }, gaps.iter().copied());
        prop_assert!(outcome.longest_wait <= 2 * LONGEST, "{outcome:?}");
        let again = run(Consumer::Sleeper { latency }, gaps.iter().cycle().take(2000).copied());
        prop_assert!(again.long_waits <= 64, "it is never found out: {again:?}");
    }

    /// A consumer that polls faster than the shortest delay gets no event.
    #[test]
    fn a_fast_poller_gets_nothing(period in SHORTEST / 4..SHORTEST, gaps in gaps(5 * MILLISECOND)) {
        prop_assert_eq!(run(Consumer::Poller { period }, gaps).events, 0);
    }

    /// A consumer that polls more slowly gets a few events until it is recognized.
    #[test]
    fn a_poller_gets_few_events(period in SHORTEST..CONFIRM, gaps in gaps(5 * MILLISECOND)) {
        let outcome = run(Consumer::Poller { period }, gaps.iter().cycle().take(4_000).copied());
        prop_assert!(outcome.events <= 32, "{outcome:?}");
    }

    /// A pause causes a few events, each after a longer delay than the one before.
    #[test]
    fn a_poller_with_pauses_gets_one_event_each(
        period in SHORTEST / 4..SHORTEST, busy in 10_u32..100, pause in MILLISECOND..200 * MILLISECOND,
        gaps in gaps(MILLISECOND)
    ) {
        let outcome = run(Consumer::Pausing { period, busy, pause }, gaps);
        let pauses = outcome.consumed / u64::from(busy) + 1;
        prop_assert!(outcome.events <= 12 + 12 * pauses, "{} pauses, {:?}", pauses, outcome);
    }

    /// A batcher leaves completions alone on purpose, and keeps polling: it gets at most one event per completion.
    #[test]
    fn a_batcher_gets_few_events(period in SHORTEST / 4..SHORTEST, batch in 2_u32..32, gaps in gaps(MILLISECOND)) {
        let completions = gaps.len() as u64;
        let outcome = run(Consumer::Batcher { period, batch }, gaps);
        prop_assert!(outcome.longest_wait <= 2 * LONGEST, "{outcome:?}");
        prop_assert!(outcome.events <= completions, "{outcome:?}");
    }

    /// For any consumer and any times of looks, the guest is notified of unconsumed completions, or a look is due.
    #[test]
    fn nothing_is_forgotten(steps in prop::collection::vec((0_u8..4, 1..2 * MILLISECOND), 1..400)) {
        let mut infer = Infer::new(0, 0, SHORTEST, 0);
        let (mut now, mut published, mut consumed) = (0, 0_u32, 0_u32);
        // Publications covered by a notification, and the time of the next look.
        let (mut covered, mut due): (u32, Option<u64>) = (0, None);
        for (step, pause) in steps {
            now += pause;
            let verdict = match step {
                0 | 1 => {
                    published += 1;
                    infer.published(consumed, 1, published - consumed, now)
                }
                2 => {
                    consumed += (published - consumed).div_ceil(2);
                    continue;
                }
                _ if due.is_some_and(|due| due <= now) => infer.looked(consumed, published - consumed, now),
                _ => continue,
            };
            due = match (due.filter(|&due| due > now), verdict.due) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if verdict.notify {
                covered = published;
            }
            prop_assert!(consumed == published || covered == published || due.is_some());
            prop_assert!(due.is_none_or(|due| due <= now + 2 * LONGEST_HOPELESS));
        }
    }
}

/// A sleeper that becomes a poller costs three probes, and one that becomes a sleeper again waits once.
#[test]
fn consumers_change() {
    let mut infer = Infer::new(0, 0, SHORTEST, 0);
    let (mut now, mut head) = (0, 0);
    let mut episode = |infer: &mut Infer, sleeps: bool| {
        now += MILLISECOND;
        let mut verdict = infer.published(head, 1, 1, now);
        let begin = now;
        while sleeps && !verdict.notify {
            now = verdict.due.expect("a thread looks");
            verdict = infer.looked(head, 1, now);
        }
        let wait = now - begin;
        head += 1;
        if let Some(due) = verdict.due {
            now += (due - now).min(10 * MICROSECOND);
            infer.looked(head, 0, now);
        }
        wait
    };
    let waits: Vec<u64> = (0..20).map(|_| episode(&mut infer, true)).collect();
    assert_eq!(waits[..2], [SHORTEST, CONFIRM]);
    assert!(waits[2..15].iter().all(|&wait| wait == 0), "{waits:?}");
    let mut turned = 0;
    while infer.delay() == 0 || infer.probe.is_some() {
        episode(&mut infer, false);
        turned += 1;
    }
    assert!(turned <= 4 * u32::from(PROBE_EVERY), "{turned}");
    while infer.delay() < LONGEST {
        episode(&mut infer, false);
    }
    let back: Vec<u64> = (0..8).map(|_| episode(&mut infer, true)).collect();
    assert!(back[0] <= LONGEST + 10 * MICROSECOND && back[1] <= LONGEST / 32 + 10 * MICROSECOND, "{back:?}");
    assert_eq!(back[7], 0, "{back:?}");
}
