//! Decides when the watcher spins, naps, takes the pages away and sleeps. It has no clock and no I/O: the caller passes
//! the time in nanoseconds.

/// The watcher's next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Poll again immediately.
    Spin,
    /// Poll again after this number of nanoseconds.
    Nap(u64),
    /// Poll now, and again after this number of nanoseconds, or as soon as a request completes or a page is touched.
    Rest(u64),
    /// Take the pages away and poll everything once more.
    Arm,
    /// Sleep until a page is touched or a deadline passes.
    Block,
}

/// Time in nanoseconds for which the watcher spins after it has found work.
const SPIN: u64 = 50_000;
/// Shortest nap while there is occasional work.
const NAP: u64 = 20_000;
/// Longest nap.
const LONGEST_NAP: u64 = 50_000;
/// Idle time after which the pages are taken away.
const WARM: u64 = 2_000_000;
/// A process whose page is touched within this time after it was taken away polls the page by storing to it.
const SPINNER: u64 = 100_000;
/// Number of touches, without work in between, after which one of the processes is taken to poll its page.
const VAIN: u32 = 4;
/// Divisor of the time since the last activity: the result is the length of a rest while a process stores to its page
/// without posting work. A later post is thus delayed by at most this fraction of the time that its process has waited.
const REST_PART: u64 = 8;
/// Longest rest, which also limits that delay.
const LONGEST_REST: u64 = 2_000_000;
/// Spinning time after which its effect on other threads is evaluated.
const JUDGED: u64 = 10_000_000;
/// Divisor of the evaluated time: a watcher that lacked a processor for longer than the result delays other threads.
const CROWDED: u64 = 20;
/// Time for which a watcher that delays other threads stops spinning: first value and maximum.
const PAUSE: (u64, u64) = (1_000_000_000, 60_000_000_000);
/// First time for which the pages are left to a process that stores to them without posting work. It doubles up to the
/// maximum below.
const POLLED: u64 = 10_000_000;
const LONGEST_POLLED: u64 = 100_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The pages are away, and there is no activity.
    Cold { since: u64 },
    /// There was work recently.
    Warm { work: u64, nap: u64 },
    /// A process touches pages and posts no work.
    Polled { until: u64 },
}

/// Chooses the steps.
#[derive(Debug)]
pub(super) struct Pacer {
    state: State,
    /// There may be a processor to spare.
    spins: bool,
    /// Time spent spinning since the last evaluation, and the part of it without a processor.
    spun: u64,
    lost: u64,
    /// End of the current pause in spinning, and length of the next one.
    crowded: u64,
    pause: u64,
    /// Length of the next `Polled` period.
    polled: u64,
    /// Time at which work was last found, or a request completed during a `Polled` period.
    last_activity: u64,
    /// Touches since work was last found.
    vain: u32,
}

impl Pacer {
    /// Creates a pacer. `spins`: a processor may be free for spinning. The caller reports the effect of spinning to
    /// [`Self::spun`].
    pub(super) const fn new(spins: bool) -> Self {
        let state = State::Cold { since: 0 };
        Self { state, spins, spun: 0, lost: 0, crowded: 0, pause: PAUSE.0, polled: POLLED, last_activity: 0, vain: 0 }
    }

    /// Returns `true` if it may spin now.
    const fn spins(&self, now: u64) -> bool {
        self.spins && now >= self.crowded
    }

    /// Records that the watcher spun for `time`, and had a processor for `ran` of it. A watcher that waits for a
    /// processor also delays other threads.
    pub(super) fn spun(&mut self, now: u64, time: u64, ran: u64) {
        self.spun = self.spun.saturating_add(time);
        self.lost = self.lost.saturating_add(time.saturating_sub(ran));
        if self.spun < JUDGED {
            return;
        }
        if self.lost > self.spun / CROWDED {
            self.crowded = now.saturating_add(self.pause);
            self.pause = self.pause.saturating_mul(2).min(PAUSE.1);
        } else {
            self.pause = PAUSE.0;
        }
        (self.spun, self.lost) = (0, 0);
    }

    /// Returns the next step.
    pub(super) fn next(&self, now: u64) -> Step {
        match self.state {
            State::Cold { .. } => Step::Block,
            State::Warm { work, .. } if self.spins(now) && now.saturating_sub(work) < SPIN => Step::Spin,
            State::Warm { work, nap } if now.saturating_sub(work) < WARM => Step::Nap(nap),
            State::Polled { until } if now < until => Step::Rest(self.rest(now)),
            State::Warm { .. } | State::Polled { .. } => Step::Arm,
        }
    }

    fn rest(&self, now: u64) -> u64 {
        (now.saturating_sub(self.last_activity) / REST_PART).clamp(NAP, LONGEST_REST)
    }

    /// Records that a request has completed: a process that polls for it is likely to post more.
    pub(super) const fn completed(&mut self, now: u64) {
        self.last_activity = now;
    }

    /// Records that work was found: the indices of a ring moved.
    pub(super) const fn worked(&mut self, now: u64) {
        (self.last_activity, self.vain) = (now, 0);
        self.polled = POLLED;
        self.state = State::Warm { work: now, nap: NAP };
    }

    /// Records that no work was found, and no page was touched that was away.
    pub(super) fn idled(&mut self) {
        if let State::Warm { nap, .. } = &mut self.state {
            *nap = nap.saturating_mul(2).min(LONGEST_NAP);
        }
    }

    /// Records that all pages were taken away, and that no work was found and no page was touched since.
    pub(super) const fn armed(&mut self, now: u64) {
        self.state = State::Cold { since: now };
    }

    /// Records that pages were taken away and no work was found since, but that some pages are still present.
    pub(super) fn refused(&mut self, now: u64) {
        let until = now.saturating_add(self.polled);
        self.polled = self.polled.saturating_mul(2).min(LONGEST_POLLED);
        self.state = State::Polled { until };
    }

    /// Records that a page was touched at `at` while all were away, and that no work was found.
    pub(super) fn touched(&mut self, at: u64, now: u64) {
        let State::Cold { since } = self.state else { return };
        self.vain = self.vain.saturating_add(1);
        if at.saturating_sub(since) > SPINNER && self.vain < VAIN {
            self.polled = POLLED;
            self.state = State::Warm { work: now, nap: NAP };
        } else {
            self.refused(now);
        }
    }

    /// Returns the state as a word for the status.
    pub(super) const fn word(&self, now: u64) -> &'static str {
        match self.state {
            State::Cold { .. } => "cold",
            State::Warm { .. } if self.spins(now) => "hot",
            State::Warm { .. } => "warm",
            State::Polled { .. } => "polled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    #[test]
    fn it_sleeps_until_a_page_is_touched() {
        let mut pacer = Pacer::new(false);
        assert_eq!(pacer.next(1_000 * MILLISECOND), Step::Block);
        pacer.touched(1_000 * MILLISECOND, 1_001 * MILLISECOND);
        assert_eq!((pacer.next(1_001 * MILLISECOND), pacer.word(1_001 * MILLISECOND)), (Step::Nap(NAP), "warm"));
    }

    #[test]
    fn it_takes_the_pages_away_when_nothing_comes() {
        let mut pacer = Pacer::new(false);
        let mut now = MILLISECOND;
        pacer.worked(now);
        let mut naps = Vec::new();
        while let Step::Nap(nap) = pacer.next(now) {
            naps.push(nap);
            now += nap;
            pacer.idled();
        }
        assert_eq!((&naps[..3], pacer.next(now)), (&[20_000, 40_000, 50_000][..], Step::Arm));
        assert!(naps[2..].iter().all(|&nap| nap == LONGEST_NAP) && now <= MILLISECOND + WARM + LONGEST_NAP);
        pacer.armed(now);
        assert_eq!(pacer.next(now), Step::Block);
    }

    /// Work keeps the pages present: each time it is found, the time to take them away starts again.
    #[test]
    fn it_stays_awake_while_work_comes() {
        let mut pacer = Pacer::new(false);
        let mut now = 0;
        for _ in 0..1_000 {
            pacer.worked(now);
            now += WARM - 1;
            assert!(matches!(pacer.next(now), Step::Nap(_)));
        }
        assert_eq!(pacer.next(now + 1), Step::Arm);
    }

    #[test]
    fn it_spins_only_with_a_processor_to_spare() {
        let mut pacer = Pacer::new(true);
        pacer.worked(5);
        let steps = [5, 5 + SPIN - 1, 5 + SPIN].map(|now| pacer.next(now));
        assert_eq!(steps, [Step::Spin, Step::Spin, Step::Nap(NAP)]);
        let mut pacer = Pacer::new(false);
        pacer.worked(5);
        assert_eq!(pacer.next(5), Step::Nap(NAP));
    }

    /// A spinning watcher that waits for a processor delays other threads, which have the work to do: it naps for a
    /// while, longer each time.
    #[test]
    fn it_does_not_spin_in_a_crowd() {
        let spins = |pacer: &mut Pacer, now| {
            pacer.worked(now);
            pacer.next(now) == Step::Spin
        };
        let mut pacer = Pacer::new(true);
        let mut now = 5;
        // A twentieth does not count, and neither does a period that is too short to evaluate.
        pacer.spun(now, JUDGED, JUDGED - JUDGED / CROWDED);
        pacer.spun(now, JUDGED - 1, 0);
        assert!(spins(&mut pacer, now));
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            pacer.spun(now, JUDGED, JUDGED / 2);
            assert!(!spins(&mut pacer, now) && pacer.word(now) == "warm", "{pause}");
            now += pause * 1_000 * MILLISECOND;
            assert!(!spins(&mut pacer, now - 1) && spins(&mut pacer, now) && pacer.word(now) == "hot", "{pause}");
        }
        pacer.spun(now, JUDGED, JUDGED);
        pacer.spun(now, JUDGED, 0);
        assert!(!spins(&mut pacer, now) && spins(&mut pacer, now + PAUSE.0));
    }

    /// A process that polls does not slow down the other processes, which post work.
    #[test]
    fn a_touch_during_work_does_not_end_it() {
        let mut pacer = Pacer::new(false);
        pacer.worked(100);
        pacer.touched(150, 160);
        assert_eq!((pacer.word(170), pacer.next(170)), ("warm", Step::Nap(NAP)));
    }

    /// While a page cannot be taken away, stores to it cause no request, so the watcher must not sleep.
    #[test]
    fn a_page_that_stays_is_looked_after() {
        let mut pacer = Pacer::new(false);
        let (mut now, mut naps) = (0, 0);
        pacer.worked(now);
        while now < 1_000 * MILLISECOND {
            match pacer.next(now) {
                Step::Nap(nap) | Step::Rest(nap) => (now, naps) = (now + nap, naps + 1),
                Step::Arm => pacer.refused(now),
                step => unreachable!("{step:?}"),
            }
        }
        assert!(naps > 400);
    }

    /// A process that stores to its page all the time causes naps and ever fewer invalidations, but no spinning.
    #[test]
    fn a_process_that_only_touches_causes_little_work() {
        let mut pacer = Pacer::new(true);
        let (mut now, mut naps, mut arms) = (MILLISECOND, 0_u64, 0_u64);
        pacer.touched(now, now);
        while now < 10_000 * MILLISECOND {
            match pacer.next(now) {
                Step::Spin => now += 1_000,
                Step::Nap(nap) | Step::Rest(nap) => {
                    (now, naps) = (now + nap, naps + 1);
                    pacer.idled();
                }
                Step::Arm => {
                    (now, arms) = (now + 10_000, arms + 1);
                    pacer.refused(now);
                }
                Step::Block => unreachable!("a page is touched"),
            }
        }
        assert!(naps <= 10_000 * MILLISECOND / LONGEST_REST + 100, "{naps}");
        assert!(arms <= 110, "{arms} in ten seconds");
        assert_eq!(pacer.word(now), "polled");
        pacer.worked(now);
        assert_eq!(pacer.word(now), "hot");
    }

    /// The same holds when each touch comes a moment after the pages were taken away.
    #[test]
    fn a_touch_at_once_shows_a_spinning_process() {
        let mut pacer = Pacer::new(true);
        pacer.armed(1_000);
        pacer.touched(1_000 + SPINNER, 5 * MILLISECOND);
        assert_eq!((pacer.word(5 * MILLISECOND), pacer.next(5 * MILLISECOND)), ("polled", Step::Rest(625_000)));
        pacer.armed(6 * MILLISECOND);
        pacer.touched(6 * MILLISECOND + SPINNER + 1, 7 * MILLISECOND);
        assert_eq!(pacer.word(5_000 * MILLISECOND), "hot");
    }

    /// On a busy machine even a process that stores all the time touches its page late.
    #[test]
    fn repeated_touches_in_vain_show_a_spinning_process() {
        let mut pacer = Pacer::new(true);
        let touched = |pacer: &mut Pacer, now| {
            pacer.armed(now);
            pacer.touched(now + MILLISECOND, now + MILLISECOND);
            pacer.word(now + MILLISECOND)
        };
        for round in 0..2 {
            let words = [0, 10, 20, 30, 40].map(|ms| touched(&mut pacer, (round * 50 + ms) * MILLISECOND));
            assert_eq!(words, ["hot", "hot", "hot", "polled", "polled"]);
            pacer.worked((round * 50 + 45) * MILLISECOND);
        }
    }

    /// The delay until a post is found is a fraction of the time that its process has waited, unless one of its
    /// requests completes.
    #[test]
    fn polling_in_vain_rests_ever_longer() {
        let mut pacer = Pacer::new(true);
        pacer.worked(0);
        pacer.refused(2 * MILLISECOND);
        let rest = |pacer: &Pacer, now| match pacer.next(now) {
            Step::Rest(rest) => rest,
            step => unreachable!("{step:?}"),
        };
        let rests = [2, 4, 8, 11].map(|now| rest(&pacer, now * MILLISECOND));
        assert_eq!(rests, [250_000, 500_000, 1_000_000, 1_375_000]);
        pacer.refused(100 * MILLISECOND);
        assert_eq!(rest(&pacer, 100 * MILLISECOND), LONGEST_REST);
        pacer.completed(101 * MILLISECOND);
        let rests = [101, 102, 103].map(|now| rest(&pacer, now * MILLISECOND));
        assert_eq!(rests, [NAP, 125_000, 250_000]);
    }
}
