//! Completed requests of a batch whose completions are not published yet.
//!
//! Publishing takes a lock and updates an index in guest memory. Completions of small messages are collected to share
//! that cost. They are never delayed beyond the batch: its end, for whatever reason, publishes them.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

use super::Qp;

/// Maximum number of completions that wait.
const MOST: usize = 8;

/// Maximum size in bytes of a message whose completion can wait for the next one: copying such a message takes less
/// time than publishing a completion.
const SMALL: u64 = 1024;

/// A request that has succeeded.
#[derive(Clone, Copy, Debug)]
struct Ended {
    completion: Completion,
    /// The sender wants the completion.
    wanted: bool,
    /// The request has consumed a receive of the peer.
    received: bool,
}

/// Send completions not yet published.
#[derive(Debug, Default)]
pub(crate) struct PendingCompletions {
    ended: Vec<Ended>,
}

impl PendingCompletions {
    /// Adds a request that has succeeded.
    #[inline]
    pub(super) fn push(&mut self, completion: Completion, wanted: bool, received: bool) {
        if wanted || received {
            self.ended.push(Ended { completion, wanted, received });
        }
    }

    /// Returns `true` if completions must be published now, after a message of `length` bytes.
    #[inline]
    pub(crate) fn is_due(&self, length: u64) -> bool {
        self.ended.len() >= MOST || length > SMALL
    }

    /// Publishes the completions of this side. If the peer's queue had no room for all receives of the batch,
    /// `receives_published` is the number that fitted: the request of the first lost receive fails, and the following
    /// requests are flushed. Returns `false` if a receive was lost.
    #[inline]
    pub(super) fn publish(&mut self, qp: &Qp, view: &DmaView<'_>, receives_published: Option<usize>) -> bool {
        if let Some(published) = receives_published {
            self.lose(published);
        }
        let completions = self.ended.iter().filter(|ended| ended.wanted).map(|ended| ended.completion);
        let mut out = [Completion::new(0, 0, WcOpcode::Send, WcStatus::Success); MOST];
        let mut count = 0;
        for (slot, completion) in out.iter_mut().zip(completions) {
            *slot = completion;
            count += 1;
        }
        if let Some(out) = out.get(..count).filter(|out| !out.is_empty()) {
            // After an overrun the QP is in its error state, which the caller's loop notices.
            let _ = qp.send_cq.push_all(&qp.state, view, out);
        }
        self.ended.clear();
        receives_published.is_none()
    }

    /// Fails the requests whose receives were lost, because the peer's queue only had room for `published` ones.
    #[cold]
    fn lose(&mut self, published: usize) {
        let mut status = WcStatus::RemoteOperation;
        let received = self.ended.iter().enumerate().filter(|(_, ended)| ended.received);
        let lost = received.map(|(at, _)| at).nth(published);
        for ended in self.ended.iter_mut().skip(lost.unwrap_or(usize::MAX)) {
            ended.completion.status = status;
            ended.wanted = true;
            status = WcStatus::Flushed;
        }
    }
}
