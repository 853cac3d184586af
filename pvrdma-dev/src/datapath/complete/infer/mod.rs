//! When to notify of completions whose consumer cannot say that it waits.
//!
//! The doorbell that arms a queue is a store to memory when the doorbell page is mapped, and leaves no trace there.
//! What can be seen is whether completions are consumed. So the rule is: *what nobody consumes for a while is
//! announced*. The while, [`Infer::delay`], is learned: a consumer that takes completions only after it was notified is
//! a sleeper, and is notified at once; one that takes them without is a poller, and is notified ever later. A sleeper
//! is always woken; a poller gets events that it did not ask for, a bounded number.
//!
//! This is a value: no clock, no memory, no locks. Times are nanoseconds of one clock.

/// Delay of a new queue, and the shortest that is not 0.
pub(crate) const SHORTEST: u64 = 20_000;
/// Delay of a queue whose consumer is known to poll.
pub(crate) const POLLED: u64 = 1_000_000;
/// Longest delay. A consumer waits for a notification at most twice as long: the last look may have come just before
/// its last step.
pub(crate) const LONGEST: u64 = 50_000_000;
/// The same once [`HOPELESS`] notifications were of no use.
pub(crate) const LONGEST_HOPELESS: u64 = 500_000_000;
/// Notifications of no use, without two useful ones in a row between them, that make a queue hopeless.
const HOPELESS: u16 = 4096;
/// A consumer that moves within this time of a notification was woken by it, or so it seems.
const WINDOW: u64 = 500_000;
/// Useful notifications in a row that make a sleeper.
const NEED: u8 = 2;
/// The same for a consumer that turned out to be none, again and again.
const MOST_NEED: u8 = 64;
/// Every this many times that an empty queue of a sleeper gets something, the notification is held back to see whether
/// it is needed.
const PROBE_EVERY: u16 = 16;
/// Short probes in a row that found a consumer awake which make a poller of a sleeper.
const PROBES: u8 = 3;
/// Every this many times the probe lasts for [`CONFIRM`].
const LONG_PROBE_EVERY: u16 = 1024;
/// A consumer is taken for a sleeper only after it has left something alone for so long and came when it was notified:
/// one that polls in shorter steps would look like one else. A sleeper waits for that once, and in long probes.
pub(crate) const CONFIRM: u64 = 4_000_000;
/// Times that a sleeper's queue got something, after which less is needed again to take it for a sleeper: several long
/// probes later.
const QUIET: u16 = 8 * LONG_PROBE_EVERY;

/// What is to be done about a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Verdict {
    /// Notify now.
    pub(crate) notify: bool,
    /// Look again at this time.
    pub(crate) due: Option<u64>,
    /// What became of an earlier notification.
    pub(crate) judged: Option<Use>,
}

/// What a notification was good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// The consumer moved soon after it.
    Useful,
    /// It did not.
    Useless,
}

/// A notification whose use is not known yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    until: u64,
    window: u64,
}

/// What is known about the consumer of a queue.
#[derive(Clone, Debug)]
pub(crate) struct Infer {
    delay: u64,
    /// How long a notification may take to show.
    window: u64,
    need: u8,
    /// Useful notifications in a row.
    streak: u8,
    useless: u16,
    /// Consumer's index as last seen.
    head: u32,
    /// Since when it is there as far as anybody looked, or the guest was notified if that was later.
    since: u64,
    /// Completions published so far, and how many had been when the guest was notified last. Counts, because indices
    /// come back to the same value.
    published: u64,
    notified: u64,
    pending: Option<Pending>,
    /// The guest was notified since its consumer moved last.
    announced: bool,
    /// Times that a sleeper's queue got something while empty.
    episodes: u16,
    quiet: u16,
    probe: Option<Probe>,
    /// Short probes in a row that found the consumer awake.
    awake: u8,
}

/// A notification to a sleeper that is held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    Short,
    Long,
}

impl Infer {
    /// Nothing is known but a delay to begin with. `head` is the consumer's index, and `unconsumed` completions wait
    /// already.
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

    /// How long completions stay unconsumed before the guest is notified.
    pub(crate) const fn delay(&self) -> u64 {
        match self.probe {
            Some(Probe::Short) => SHORTEST,
            Some(Probe::Long) => CONFIRM,
            None => self.delay,
        }
    }

    /// Returns `true` if the guest was notified since something was published last.
    pub(crate) const fn is_announced(&self) -> bool {
        self.notified == self.published
    }

    /// `count` completions were published, `unconsumed` are there now.
    pub(crate) fn published(&mut self, head: u32, count: u32, unconsumed: u32, now: u64) -> Verdict {
        let judged = self.saw(head, now);
        self.published = self.published.wrapping_add(count.into());
        if unconsumed <= count {
            self.since = now;
            self.begin_episode();
        }
        self.decide(unconsumed, now, judged)
    }

    /// Somebody looked, because it was due.
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
        // One that comes late may have been woken all the same.
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
        // What is published from now on is announced after another delay.
        self.since = now;
        // Of a sleeper it is known what notifications are good for.
        if self.delay() != 0 && self.pending.is_none() {
            let window = self.window.max(self.delay / 4);
            self.pending = Some(Pending { until: now.saturating_add(window), window });
        }
        Verdict { notify: true, due: self.pending.map(|pending| pending.until), judged }
    }

    /// An empty queue got something.
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

    /// The consumer moved soon after a notification, within `window`.
    fn was_useful(&mut self, window: u64) {
        if self.delay == 0 {
            self.slept();
            return;
        }
        self.streak = self.streak.saturating_add(1);
        // What comes back slowly because its machine is busy comes back as slowly next time.
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

    /// The consumer did not move after a notification.
    fn was_useless(&mut self) {
        if self.delay == 0 {
            self.slept();
            return;
        }
        self.useless = self.useless.saturating_add(1);
        self.streak = 0;
        self.later();
    }

    /// The consumer moved by itself.
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

    /// A probe found a sleeper asleep.
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
