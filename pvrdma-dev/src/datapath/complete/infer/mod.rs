//! Timing of notifications for a completion queue whose arming is not visible.
//!
//! If the doorbell page is mapped, the doorbell that arms a queue is a store to memory and leaves no trace. The device
//! can see only whether completions are consumed. The rule is therefore: *notify of completions that are not consumed
//! for a while*. The delay, [`Infer::delay`], is learned: a consumer that takes completions only after a notification
//! is a sleeper, and is notified at once; one that takes them without is a poller, and is notified later and later. A
//! sleeper is always woken; a poller gets a bounded number of events that it did not request.
//!
//! This is a pure state machine: no clock, no memory, no locks. Times are nanoseconds of one clock.

/// Delay of a new queue, and the minimum delay other than 0.
pub(crate) const SHORTEST: u64 = 20_000;
/// Delay of a queue whose consumer is known to poll.
pub(crate) const POLLED: u64 = 1_000_000;
/// Maximum delay. A consumer waits for a notification at most twice as long: the last look may have come just before
/// the consumer's last step.
pub(crate) const LONGEST: u64 = 50_000_000;
/// Maximum delay after [`HOPELESS`] useless notifications.
pub(crate) const LONGEST_HOPELESS: u64 = 500_000_000;
/// Number of useless notifications, without two useful ones in a row between them, after which a queue is hopeless.
const HOPELESS: u16 = 4096;
/// A consumer that moves within this time after a notification is assumed to have been woken by it.
const WINDOW: u64 = 500_000;
/// Useful notifications in a row that make a consumer a sleeper.
const NEED: u8 = 2;
/// Maximum of the same, for a consumer that repeatedly turned out not to be a sleeper.
const MOST_NEED: u8 = 64;
/// Interval of short probes, in episodes: an episode begins when an empty queue of a sleeper gets completions. A probe
/// holds the notification back to test whether it is needed.
const PROBE_EVERY: u16 = 16;
/// Short probes in a row that find a consumer awake and make a sleeper a poller.
const PROBES: u8 = 3;
/// Interval, in episodes, of probes that last for [`CONFIRM`].
const LONG_PROBE_EVERY: u16 = 1024;
/// Time for which a consumer must leave completions alone, and then move when it is notified, before it counts as a
/// sleeper: otherwise a consumer that polls at shorter intervals would look like one. A sleeper waits for this time
/// once, and in long probes.
pub(crate) const CONFIRM: u64 = 4_000_000;
/// Number of episodes after which fewer useful notifications suffice again to make a consumer a sleeper: several long
/// probes.
const QUIET: u16 = 8 * LONG_PROBE_EVERY;

/// Decision about a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Verdict {
    /// Notify now.
    pub(crate) notify: bool,
    /// Time of the next look.
    pub(crate) due: Option<u64>,
    /// Result of an earlier notification.
    pub(crate) judged: Option<Use>,
}

/// Effect of a notification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// The consumer moved soon after the notification.
    Useful,
    /// The consumer did not move.
    Useless,
}

/// Notification whose effect is not known yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    until: u64,
    window: u64,
}

/// Knowledge about the consumer of a queue.
#[derive(Clone, Debug)]
pub(crate) struct Infer {
    delay: u64,
    /// Time within which the effect of a notification may show.
    window: u64,
    need: u8,
    /// Useful notifications in a row.
    streak: u8,
    useless: u16,
    /// Consumer's index as of the last look.
    head: u32,
    /// Time of the first look at which the index had this value, or of the last notification if that was later.
    since: u64,
    /// Number of completions published so far, and its value at the last notification. These are counts because indices
    /// wrap.
    published: u64,
    notified: u64,
    pending: Option<Pending>,
    /// `true` if the guest was notified since its consumer last moved.
    announced: bool,
    /// Number of episodes: times that a sleeper's empty queue got completions.
    episodes: u16,
    quiet: u16,
    probe: Option<Probe>,
    /// Short probes in a row that found the consumer awake.
    awake: u8,
}

/// Probe: a notification to a sleeper is held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    Short,
    Long,
}

impl Infer {
    /// Creates the state with a first delay and no other knowledge. `head` is the consumer's index, and `unconsumed`
    /// completions are already in the queue.
    pub(crate) fn new(head: u32, unconsumed: u32, delay: u64, now: u64) -> Self {
        Self {
            delay,
            window: WINDOW,
            need: NEED,
            streak: 0,
            useless: 0,
            head,
            since: now,
            published: unconsumed.into(),
            notified: 0,
            pending: None,
            announced: false,
            episodes: 0,
            quiet: 0,
            probe: None,
            awake: 0,
        }
    }

    /// Returns the time for which completions stay unconsumed before the guest is notified.
    pub(crate) const fn delay(&self) -> u64 {
        match self.probe {
            Some(Probe::Short) => SHORTEST,
            Some(Probe::Long) => CONFIRM,
            None => self.delay,
        }
    }

    /// Returns the delay apart from probes.
    pub(crate) const fn learned(&self) -> u64 {
        self.delay
    }

    /// Records that the guest was notified of all completions before the queue had this state.
    pub(crate) const fn announce(&mut self) {
        self.notified = self.published;
        self.announced = true;
    }

    /// Returns `true` if the guest was notified since the last completion was published.
    pub(crate) const fn is_announced(&self) -> bool {
        self.notified == self.published
    }

    /// Records that `count` completions were published and that the queue now holds `unconsumed`.
    pub(crate) fn published(&mut self, head: u32, count: u32, unconsumed: u32, now: u64) -> Verdict {
        let judged = self.saw(head, now);
        self.published = self.published.wrapping_add(count.into());
        if unconsumed <= count {
            self.since = now;
            self.begin_episode();
        }
        self.decide(unconsumed, now, judged)
    }

    /// Records a look that was due.
    pub(crate) fn looked(&mut self, head: u32, unconsumed: u32, now: u64) -> Verdict {
        let mut judged = self.saw(head, now);
        if self.pending.is_some_and(|pending| now >= pending.until) {
            self.pending = None;
            self.was_useless();
            judged = Some(Use::Useless);
        }
        self.decide(unconsumed, now, judged)
    }

    fn saw(&mut self, head: u32, now: u64) -> Option<Use> {
        if head == self.head {
            return None;
        }
        (self.head, self.since) = (head, now);
        let announced = std::mem::take(&mut self.announced);
        if let Some(pending) = self.pending.take() {
            self.was_useful(pending.window);
            return Some(Use::Useful);
        }
        // A consumer that moves late after a notification may still have been woken by it, so it does not count as
        // awake.
        if !announced {
            self.was_awake();
        }
        None
    }

    fn decide(&mut self, unconsumed: u32, now: u64, judged: Option<Use>) -> Verdict {
        let quiet = Verdict { notify: false, due: None, judged };
        if unconsumed == 0 {
            return quiet;
        }
        if self.is_announced() {
            return Verdict { due: self.pending.map(|pending| pending.until), ..quiet };
        }
        let due = self.since.saturating_add(self.delay());
        if now < due {
            return Verdict { due: Some(due), ..quiet };
        }
        self.notified = self.published;
        self.announced = true;
        // Completions published from now on are announced after another delay.
        self.since = now;
        // The effect of notifications to a sleeper (delay 0) is known already and need not be measured.
        if self.delay() != 0 && self.pending.is_none() {
            let window = self.window.max(self.delay / 4);
            self.pending = Some(Pending { until: now.saturating_add(window), window });
        }
        Verdict { notify: true, due: self.pending.map(|pending| pending.until), judged }
    }

    /// Begins an episode: an empty queue got completions.
    fn begin_episode(&mut self) {
        if self.delay != 0 {
            return;
        }
        self.episodes = (self.episodes + 1) % LONG_PROBE_EVERY;
        self.probe = match self.episodes {
            0 => Some(Probe::Long),
            count if count % PROBE_EVERY == 0 => Some(Probe::Short),
            _ => None,
        };
        self.quiet = self.quiet.saturating_add(1);
        if self.quiet >= QUIET {
            self.quiet = 0;
            self.need = (self.need / 2).max(NEED);
        }
    }

    /// Records that the consumer moved soon after a notification, within `window`.
    fn was_useful(&mut self, window: u64) {
        if self.delay == 0 {
            self.slept();
            return;
        }
        self.streak = self.streak.saturating_add(1);
        // Keep the larger window: a consumer that reacts slowly because its machine is busy will do so next time, too.
        self.window = self.window.max(window);
        if self.streak + 1 == self.need {
            self.delay = CONFIRM;
        } else if self.streak < self.need {
            self.delay = (self.delay / 32).max(SHORTEST);
        } else {
            (self.delay, self.episodes, self.quiet, self.awake, self.useless) = (0, 0, 0, 0, 0);
        }
        if self.streak >= NEED {
            self.useless = 0;
        }
    }

    /// Records that the consumer did not move after a notification.
    fn was_useless(&mut self) {
        if self.delay == 0 {
            self.slept();
            return;
        }
        self.useless = self.useless.saturating_add(1);
        self.streak = 0;
        self.later();
    }

    /// Records that the consumer moved without a notification.
    fn was_awake(&mut self) {
        if self.delay != 0 {
            (self.streak, self.window) = (0, WINDOW);
            self.later();
        } else if let Some(probe) = self.probe.take() {
            self.awake += 1;
            if self.awake >= PROBES || probe == Probe::Long {
                (self.awake, self.streak, self.window) = (0, 0, WINDOW);
                self.delay = SHORTEST;
                self.need = self.need.saturating_mul(2).min(MOST_NEED);
            }
        }
    }

    /// Records that a probe found the sleeper asleep.
    fn slept(&mut self) {
        if self.probe.take().is_some() {
            self.awake = 0;
        }
    }

    fn later(&mut self) {
        let longest = if self.useless >= HOPELESS { LONGEST_HOPELESS } else { LONGEST };
        self.delay = self.delay.saturating_mul(2).min(longest);
    }
}

#[cfg(test)]
mod tests;
