//! A link with a bounded queue in front of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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
}

/// Whether there is room, for all queues in front of one link: when there is none, nobody builds packets, and when
/// there is, all that wait are scheduled at once, so that the ready queue decides whose turn it is.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Queues in which something waits.
    full: AtomicUsize,
    waiters: Mutex<Waiters>,
}

/// Who wants to know when there is room, each once: by address.
type Waiters = HashMap<usize, Arc<Task>>;

impl Room {
    /// Nothing waits in one of the queues any more. Returns who is to be scheduled.
    fn open(&self) -> Waiters {
        // Under the lock: who looks there and finds no room is seen.
        let mut waiters = self.waiters.lock();
        if self.full.fetch_sub(1, Ordering::AcqRel) > 1 { Waiters::new() } else { std::mem::take(&mut *waiters) }
    }
}

/// One direction of one link.
#[derive(Debug)]
pub(crate) struct TxQueue {
    pub(crate) link: Arc<dyn Link>,
    backlog: Mutex<Backlog>,
    /// Something waits in this queue. Changes with `backlog` locked.
    blocked: AtomicBool,
    room: Arc<Room>,
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

    pub(crate) fn new(link: Arc<dyn Link>, room: Arc<Room>) -> Self {
        Self { link, backlog: Mutex::default(), blocked: AtomicBool::new(false), room }
    }

    /// Returns `true` if the link does not keep up.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.room.full.load(Ordering::Acquire) > 0
    }

    /// Returns `true` if something waits in this queue, and not only in others in front of the same link.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Sends frames, or keeps them until there is room. Returns how many were dropped.
    pub(crate) fn send(&self, frames: &Frames) -> u64 {
        let mut backlog = self.backlog.lock();
        if backlog.closed {
            return frames.len() as u64;
        }
        let taken = if self.is_blocked() { 0 } else { self.link.send(frames, 0) };
        let mut dropped = 0;
        for (frame, offload) in frames.iter_with_offloads(taken) {
            if backlog.frames.bytes().saturating_add(frame.len()) > MAX_WAITING {
                dropped += 1;
            } else {
                backlog.frames.push_with_offload(frame, offload);
            }
        }
        let blocked = !backlog.frames.is_empty() || self.link.unsent();
        let waiters = self.set_blocked(blocked);
        drop(backlog);
        schedule(waiters);
        dropped
    }

    /// With `backlog` locked. Returns who is to be scheduled when it is not any more.
    fn set_blocked(&self, blocked: bool) -> Waiters {
        if blocked == self.is_blocked() {
            return Waiters::new();
        }
        self.blocked.store(blocked, Ordering::Release);
        if !blocked {
            return self.room.open();
        }
        self.room.full.fetch_add(1, Ordering::AcqRel);
        Waiters::new()
    }

    /// Takes nothing any more, or again. When this returns nothing leaves that came before. Returns how many frames of
    /// it were dropped.
    pub(crate) fn set_closed(&self, closed: bool) -> u64 {
        let mut backlog = self.backlog.lock();
        backlog.closed = closed;
        let dropped = backlog.frames.len().saturating_sub(backlog.from);
        backlog.frames.clear();
        backlog.from = 0;
        let waiters = self.set_blocked(self.link.unsent());
        drop(backlog);
        schedule(waiters);
        dropped as u64
    }

    /// Schedules `task` when there is room again. Returns `false` if there is room now.
    pub(crate) fn wait_for_room(&self, task: &Arc<Task>) -> bool {
        if !self.is_full() {
            return false;
        }
        let mut waiters = self.room.waiters.lock();
        // Under the lock: a flush between the two looks would not see us.
        let full = self.is_full();
        if full {
            waiters.insert(Arc::as_ptr(task).addr(), Arc::clone(task));
        }
        full
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn flush(&self) {
        if !self.is_blocked() {
            return;
        }
        let mut backlog = self.backlog.lock();
        let Backlog { frames, from, closed: _ } = &mut *backlog;
        *from = from.saturating_add(self.link.send(frames, *from));
        if *from < frames.len() {
            return;
        }
        frames.clear();
        *from = 0;
        if !self.link.unsent() {
            let waiters = self.set_blocked(false);
            drop(backlog);
            schedule(waiters);
        }
    }
}

fn schedule(waiters: Waiters) {
    for task in waiters.into_values() {
        task.schedule();
    }
}

impl Drop for TxQueue {
    fn drop(&mut self) {
        // What waits in here is lost; nobody else waits for it.
        schedule(self.set_blocked(false));
    }
}
