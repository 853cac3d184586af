//! A link with a bounded queue in front of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_handover as handover;
use pvrdma_link::{Frames, Link, LinkInspect, Offload};
use serde::Serialize;

use crate::task::Task;

/// Maximum number of bytes that wait for a link. Threads stop building packets once anything waits, so this has room
/// for the batches that were being built.
pub(super) const MAX_WAITING: usize = 4 << 20;
/// Maximum number of urgent bytes that wait for a link.
const MAX_URGENT: usize = 64 << 10;

#[derive(Debug, Default)]
struct Backlog {
    /// Frames that go first, and all others.
    urgent: Waiting,
    bulk: Waiting,
    /// Frames are refused.
    closed: bool,
}

#[derive(Debug, Default)]
struct Waiting {
    frames: Frames,
    /// Index of the first frame that has not left.
    from: usize,
}

impl Waiting {
    fn len(&self) -> usize {
        self.frames.len().saturating_sub(self.from)
    }

    fn clear(&mut self) {
        self.frames.clear();
        self.from = 0;
    }

    /// Keeps frames up to `most` bytes. Returns the number of frames that were dropped.
    fn push<'f>(&mut self, frames: impl Iterator<Item = (&'f [u8], Offload)>, most: usize) -> u64 {
        let mut dropped = 0;
        for (frame, offload) in frames {
            if self.frames.bytes().saturating_add(frame.len()) > most {
                dropped += 1;
            } else {
                self.frames.push_with_offload(frame, offload);
            }
        }
        dropped
    }

    /// Sends as many frames as the link has room for. Returns `true` if none is left.
    fn flush(&mut self, link: &dyn Link) -> bool {
        if self.len() > 0 {
            self.from = self.from.saturating_add(link.send(&self.frames, self.from));
        }
        let empty = self.len() == 0;
        if empty {
            self.clear();
        }
        empty
    }
}

/// Backpressure shared by all queues in front of a link. Without room, no packets are built. When there is room again,
/// all waiting tasks are scheduled together, so the ready queue decides their order.
pub(crate) type Room = handover::Room<Waiters>;

/// Tasks to schedule when there is room, each once, by address.
type Waiters = HashMap<usize, Arc<Task>>;

/// Transmit direction of a link.
#[derive(Debug)]
pub(crate) struct TxQueue {
    pub(crate) link: Arc<dyn Link>,
    backlog: Mutex<Backlog>,
    /// Set while something waits in this queue. Only changes with `backlog` locked.
    blocked: AtomicBool,
    room: Arc<Room>,
}

/// State of a link and its queue at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct TxQueueInspect {
    #[serde(flatten)]
    link: LinkInspect,
    /// Number of frames that wait for the link.
    waiting_frames: Snapshot<usize>,
}

impl TxQueue {
    /// Returns the state of the queue and its link for inspection.
    pub(crate) fn inspect(&self) -> TxQueueInspect {
        let waiting = self.backlog.try_lock().map(|backlog| backlog.urgent.len() + backlog.bulk.len());
        TxQueueInspect { link: self.link.inspect(), waiting_frames: waiting.into() }
    }

    pub(crate) fn new(link: Arc<dyn Link>, room: Arc<Room>) -> Self {
        Self { link, backlog: Mutex::default(), blocked: AtomicBool::new(false), room }
    }

    /// Returns `true` if the link does not keep up.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.room.is_full()
    }

    /// Returns `true` if something waits in this queue, not only in other queues in front of the same link.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Sends frames, or keeps them until there is room. Returns the number of frames that were dropped.
    pub(crate) fn send(&self, frames: &Frames) -> u64 {
        self.send_or_keep(frames, |backlog| (&mut backlog.bulk, MAX_WAITING))
    }

    /// Sends frames in front of all waiting frames. They must not belong to a flow of the waiting frames, which would
    /// be reordered. Returns the number of frames that were dropped.
    pub(crate) fn send_urgent(&self, frames: &Frames) -> u64 {
        self.send_or_keep(frames, |backlog| (&mut backlog.urgent, MAX_URGENT))
    }

    fn send_or_keep(&self, frames: &Frames, place: impl FnOnce(&mut Backlog) -> (&mut Waiting, usize)) -> u64 {
        let mut backlog = self.backlog.lock();
        if backlog.closed {
            return frames.len() as u64;
        }
        let taken = if self.is_blocked() { 0 } else { self.link.send(frames, 0) };
        let (waiting, most) = place(&mut backlog);
        let dropped = waiting.push(frames.iter_with_offloads(taken), most);
        let blocked = backlog.urgent.len() + backlog.bulk.len() > 0 || self.link.unsent();
        let waiters = self.set_blocked(blocked);
        drop(backlog);
        schedule(waiters);
        dropped
    }

    /// Updates `blocked`; the caller holds `backlog`. Returns the tasks that the caller has to schedule after it has
    /// released the lock.
    fn set_blocked(&self, blocked: bool) -> Option<Waiters> {
        if blocked == self.is_blocked() {
            return None;
        }
        self.blocked.store(blocked, Ordering::Release);
        if !blocked {
            return self.room.open();
        }
        self.room.fill();
        None
    }

    /// Closes or opens the queue. Once this has returned from closing it, no frame that was waiting leaves. Returns the
    /// number of waiting frames that were dropped.
    pub(crate) fn set_closed(&self, closed: bool) -> u64 {
        let mut backlog = self.backlog.lock();
        backlog.closed = closed;
        let dropped = backlog.urgent.len() + backlog.bulk.len();
        backlog.urgent.clear();
        backlog.bulk.clear();
        let waiters = self.set_blocked(self.link.unsent());
        drop(backlog);
        schedule(waiters);
        dropped as u64
    }

    /// Schedules `task` when there is room again. Returns `false` if there is room now.
    pub(crate) fn wait_for_room(&self, task: &Arc<Task>) -> bool {
        self.room.wait(|waiters| _ = waiters.insert(Arc::as_ptr(task).addr(), Arc::clone(task)))
    }

    /// Sends waiting frames as far as there is room.
    pub(crate) fn flush(&self) {
        if !self.is_blocked() {
            return;
        }
        let mut backlog = self.backlog.lock();
        let Backlog { urgent, bulk, closed: _ } = &mut *backlog;
        if urgent.len() + bulk.len() == 0 {
            // The link itself may have buffered frames.
            self.link.send(&bulk.frames, 0);
        }
        if !urgent.flush(&*self.link) || !bulk.flush(&*self.link) {
            return;
        }
        if !self.link.unsent() {
            let waiters = self.set_blocked(false);
            drop(backlog);
            schedule(waiters);
        }
    }
}

fn schedule(waiters: Option<Waiters>) {
    for task in waiters.into_iter().flat_map(Waiters::into_values) {
        task.schedule();
    }
}

impl Drop for TxQueue {
    fn drop(&mut self) {
        // The frames in this queue are lost, so no task must wait for them any longer.
        schedule(self.set_blocked(false));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use pvrdma_link::{LinkInspect, Readiness};

    use super::*;

    /// A link that takes a few frames at a time, if any.
    #[derive(Debug, Default)]
    struct Slow {
        open: AtomicBool,
        sent: Mutex<Vec<u8>>,
    }

    impl Link for Slow {
        fn receive(&self, _frames: &mut Frames, _most: usize) {}

        fn send(&self, frames: &Frames, from: usize) -> usize {
            let most = if self.open.load(Ordering::Relaxed) { 2 } else { 0 };
            let mut sent = self.sent.lock();
            let before = sent.len();
            sent.extend(frames.iter_from(from).take(most).map(|frame| frame[0]));
            sent.len() - before
        }

        fn readiness(&self) -> Readiness {
            Readiness::default()
        }

        fn lost(&self) -> u64 {
            0
        }

        fn inspect(&self) -> LinkInspect {
            LinkInspect { kind: "slow", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) }
        }
    }

    fn frames(numbers: impl IntoIterator<Item = u8>, len: usize) -> Frames {
        let mut frames = Frames::default();
        numbers.into_iter().for_each(|number| frames.push(&vec![number; len]));
        frames
    }

    /// A congestion notification must not wait behind the frames that cause the congestion.
    #[test]
    fn urgent_packets_do_not_wait_behind_bulk() {
        let link = Arc::new(Slow::default());
        let queue = TxQueue::new(Arc::clone(&link) as _, Arc::default());
        assert_eq!((queue.send(&frames(1..=5, 100)), queue.send_urgent(&frames([100, 101], 100))), (0, 0));
        assert!(queue.is_blocked());
        link.open.store(true, Ordering::Relaxed);
        while queue.is_blocked() {
            queue.flush();
        }
        assert_eq!(*link.sent.lock(), [100, 101, 1, 2, 3, 4, 5]);
        // Urgent frames have a limit of their own.
        link.open.store(false, Ordering::Relaxed);
        assert_eq!(queue.send_urgent(&frames([1; 100], 1000)), 100 - 65);
        assert_eq!(queue.send(&frames([2], 100)), 0);
        assert_eq!(queue.set_closed(true), 66);
    }
}
