//! Requests of a batch that have ended without their completions being out yet.
//!
//! A completion costs a lock and an index in guest memory. Those of small messages wait for each other and share both.
//! They never wait for anything else: whoever leaves a batch, for whatever reason, publishes first.

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Completion, WcOpcode, WcStatus};

use super::Qp;

/// Requests whose completions wait at most.
const MOST: usize = 8;

/// Bytes of a message whose completion may wait for the next: what is copied in less time than a completion takes.
const SMALL: u64 = 1024;

/// A request that has ended with success.
#[derive(Clone, Copy, Debug)]
struct Ended {
    completion: Completion,
    /// Its own side wants the completion.
    wanted: bool,
    /// It used up a receive of the peer.
    received: bool,
}

/// Send completions not yet published.
#[derive(Debug, Default)]
pub(crate) struct PendingCompletions {
    ended: Vec<Ended>,
}

impl PendingCompletions {
    /// Adds a request that has ended with success.
    #[inline]
    pub(super) fn push(&mut self, completion: Completion, wanted: bool, received: bool) {
        if wanted || received {
            self.ended.push(Ended { completion, wanted, received });
        }
    }

    /// Returns `true` if they must be published now that a message of `length` bytes has ended.
    #[inline]
    pub(crate) fn is_due(&self, length: u64) -> bool {
        self.ended.len() >= MOST || length > SMALL
    }

    /// Publishes the completions of this side. `receives_published` is how many receives of the batch the peer's queue
    /// had room for, if not all: the request behind the first that got lost fails, and those behind it are flushed.
    /// Returns `false` if there is one.
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
            // An overrun has put the QP into the error state, which the caller's loop sees.
            let _ = qp.send_cq.push_all(&qp.state, view, out);
        }
        self.ended.clear();
        receives_published.is_none()
    }

    /// The peer's queue had room for `published` receives only.
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
