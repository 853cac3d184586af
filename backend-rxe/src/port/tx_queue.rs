//! A link with a bounded queue in front of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_ether_link::{Frames, Link, LinkInspect};
use pvrdma_verbs::Snapshot;
use serde::Serialize;

use crate::task::Task;

/// Bytes that wait for a link at most. Who builds packets stops when anything waits, so this holds the last batches of
/// those that were in flight.
pub(super) const MAX_WAITING: usize = 4 << 20;

#[derive(Debug, Default)]
struct Backlog {
    frames: Frames,
    /// Nothing is taken.
    closed: bool,
    /// Frames before this have left.
    from: usize,
    /// Who wants to know when there is room, each once: by address.
    waiters: HashMap<usize, Arc<Task>>,
}

/// One direction of one link.
#[derive(Debug)]
pub(crate) struct TxQueue {
    pub(crate) link: Arc<dyn Link>,
    backlog: Mutex<Backlog>,
    /// Something waits.
    full: AtomicBool,
}

/// A link and its queue at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct TxQueueInspect {
    #[serde(flatten)]
    link: LinkInspect,
    /// Frames that wait for the link.
    waiting_frames: Snapshot<usize>,
}

impl TxQueue {
    /// Describes itself.
    pub(crate) fn inspect(&self) -> TxQueueInspect {
        let waiting = self.backlog.try_lock().map(|backlog| backlog.frames.len().saturating_sub(backlog.from));
        TxQueueInspect { link: self.link.inspect(), waiting_frames: waiting.into() }
    }

    pub(crate) fn new(link: Arc<dyn Link>) -> Self {
        Self { link, backlog: Mutex::default(), full: AtomicBool::new(false) }
    }

    /// Returns `true` if the link does not keep up.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Sends frames, or keeps them until there is room. Returns how many were dropped.
    pub(crate) fn send(&self, frames: &Frames) -> u64 {
        let mut backlog = self.backlog.lock();
        if backlog.closed {
            return frames.len() as u64;
        }
        let taken = if self.is_full() { 0 } else { self.link.send(frames, 0) };
        let mut dropped = 0;
        for frame in frames.iter_from(taken) {
            if backlog.frames.bytes().saturating_add(frame.len()) > MAX_WAITING {
                dropped += 1;
            } else {
                backlog.frames.push(frame);
            }
        }
        self.full.store(!backlog.frames.is_empty() || self.link.unsent(), Ordering::Release);
        dropped
    }

    /// Takes nothing any more, or again. When this returns nothing leaves that came before. Returns how many frames of
    /// it were dropped.
    pub(crate) fn set_closed(&self, closed: bool) -> u64 {
        let (dropped, waiters) = {
            let mut backlog = self.backlog.lock();
            backlog.closed = closed;
            let dropped = backlog.frames.len().saturating_sub(backlog.from);
            backlog.frames.clear();
            backlog.from = 0;
            self.full.store(self.link.unsent(), Ordering::Release);
            (dropped as u64, std::mem::take(&mut backlog.waiters))
        };
        for task in waiters.into_values() {
            task.schedule();
        }
        dropped
    }

    /// Schedules `task` when there is room again. Returns `false` if there is room now.
    pub(crate) fn wait_for_room(&self, task: &Arc<Task>) -> bool {
        if !self.is_full() {
            return false;
        }
        let mut backlog = self.backlog.lock();
        // Under the lock: a flush between the two looks would not see us.
        let full = self.is_full();
        if full {
            backlog.waiters.insert(Arc::as_ptr(task).addr(), Arc::clone(task));
        }
        full
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn flush(&self) {
        if !self.is_full() {
            return;
        }
        let waiters = {
            let mut backlog = self.backlog.lock();
            let Backlog { frames, from, waiters, closed: _ } = &mut *backlog;
            *from = from.saturating_add(self.link.send(frames, *from));
            if *from < frames.len() {
                return;
            }
            frames.clear();
            *from = 0;
            if self.link.unsent() {
                return;
            }
            self.full.store(false, Ordering::Release);
            std::mem::take(waiters)
        };
        for task in waiters.into_values() {
            task.schedule();
        }
    }
}
