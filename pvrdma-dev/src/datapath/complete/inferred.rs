//! A completion queue whose armings are inferred, and the list of times at which it must be looked at.

use std::sync::Arc;

use super::infer::{Infer, Use, Verdict};
use super::unheard::Unheard;
use crate::due::DueLooks;

/// State of one queue.
#[derive(Debug)]
pub(super) struct Inferred {
    handle: u32,
    infer: Infer,
    looks: Arc<DueLooks>,
    /// Time of the earliest look on the list.
    listed: Option<u64>,
}

impl Inferred {
    /// Creates the state from its known part, the consumer's index and the number of completions in the queue.
    pub(super) fn new(handle: u32, (head, unconsumed): (u32, u32), known: Unheard, looks: Arc<DueLooks>) -> Self {
        let Unheard { announced, delay } = known;
        let now = looks.watcher().now();
        let mut infer = Infer::new(head, unconsumed, delay, now);
        if announced {
            infer.announce();
        }
        let mut inferred = Self { handle, infer, looks, listed: None };
        if unconsumed > 0 && !announced {
            inferred.list(now.saturating_add(inferred.infer.delay()));
        }
        inferred
    }

    /// Records that `count` completions were published. Returns `true` if the guest must be notified.
    pub(super) fn published(&mut self, head: u32, count: u32, unconsumed: u32) -> bool {
        let verdict = self.infer.published(head, count, unconsumed, self.looks.watcher().now());
        let notify = self.obey(verdict);
        self.looks.completed();
        notify
    }

    /// Handles a look that was due. Returns `true` if the guest must be notified.
    pub(super) fn looked(&mut self, head: u32, unconsumed: u32, now: u64) -> bool {
        if self.listed.is_some_and(|at| at <= now) {
            self.listed = None;
        }
        let verdict = self.infer.looked(head, unconsumed, now);
        self.obey(verdict)
    }

    /// Returns `true` if the guest was notified of all completions in the queue.
    pub(super) const fn is_announced(&self) -> bool {
        self.infer.is_announced()
    }

    /// Returns the part of the state that is saved.
    pub(super) const fn unheard(&self) -> Unheard {
        Unheard { announced: self.infer.is_announced(), delay: self.infer.learned() }
    }

    fn obey(&mut self, verdict: Verdict) -> bool {
        match verdict.judged {
            Some(Use::Useful) => self.looks.counts.notifications_useful.increment(),
            Some(Use::Useless) => self.looks.counts.notifications_useless.increment(),
            None => {}
        }
        if let Some(due) = verdict.due {
            self.list(due);
        }
        if verdict.notify {
            self.looks.counts.notifications_inferred.increment();
        }
        verdict.notify
    }

    fn list(&mut self, due: u64) {
        // A look listed earlier determines the next one when it is due.
        if self.listed.is_none_or(|at| due < at) {
            self.listed = Some(due);
            self.looks.add(due, self.handle);
        }
    }
}

impl Drop for Inferred {
    fn drop(&mut self) {
        if self.listed.is_some() {
            self.looks.remove(self.handle);
        }
    }
}
