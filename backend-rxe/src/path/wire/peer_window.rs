//! Congestion window shared by all connections to one peer.
//!
//! Each requester has its window, but a thousand of them would send a gigabyte before the first learns that most of it
//! was lost. So the connections to one peer share a second window. While there is room in it nobody notices; when there
//! is none they take turns of a few packets, in the order in which they asked.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_verbs::Gid;

use crate::task::Task;

/// PSNs in flight to a peer, about: at the largest path MTU 4 MiB.
const MOST: u64 = 1024;
/// PSNs in a turn. The last one asks for an ACK, so that what a turn takes comes back.
const QUANTUM: u64 = 64;

/// The windows of a device, by peer.
#[derive(Debug, Default)]
pub(crate) struct PeerWindows(Mutex<HashMap<Gid, Weak<PeerWindow>>>);

impl PeerWindows {
    /// The window to a peer.
    fn window(&self, peer: Gid) -> Arc<PeerWindow> {
        let mut windows = self.0.lock();
        if let Some(window) = windows.get(&peer).and_then(Weak::upgrade) {
            return window;
        }
        windows.retain(|_, window| window.strong_count() > 0);
        let window = Arc::default();
        windows.insert(peer, Arc::downgrade(&window));
        window
    }
}

/// The window to one peer.
#[derive(Debug, Default)]
struct PeerWindow {
    in_flight: AtomicU64,
    waiting: AtomicBool,
    queue: Mutex<VecDeque<Arc<Waiter>>>,
}

/// A connection that may have to wait.
#[derive(Debug)]
struct Waiter {
    task: Arc<Task>,
    queued: AtomicBool,
    /// It is its turn; [`QUANTUM`] is counted for it until it begins.
    granted: AtomicBool,
    gone: AtomicBool,
}

impl PeerWindow {
    fn is_full(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) >= MOST
    }

    /// Wakes those at the front of the queue, as far as there is room.
    fn admit(&self) {
        if !self.waiting.load(Ordering::Acquire) {
            return;
        }
        let mut admitted = Vec::new();
        {
            let mut queue = self.queue.lock();
            let mut room = MOST.saturating_sub(self.in_flight.load(Ordering::Acquire));
            while room > 0
                && let Some(waiter) = queue.pop_front()
            {
                waiter.queued.store(false, Ordering::Release);
                if !waiter.gone.load(Ordering::Acquire) {
                    waiter.granted.store(true, Ordering::Release);
                    self.in_flight.fetch_add(QUANTUM, Ordering::AcqRel);
                    admitted.push(Arc::clone(&waiter.task));
                    room = room.saturating_sub(QUANTUM);
                }
            }
            self.waiting.store(!queue.is_empty(), Ordering::Release);
        }
        for task in admitted {
            task.schedule();
        }
    }

    fn enqueue(&self, waiter: &Arc<Waiter>) {
        let mut queue = self.queue.lock();
        waiter.queued.store(true, Ordering::Release);
        queue.push_back(Arc::clone(waiter));
        self.waiting.store(true, Ordering::Release);
    }
}

/// One connection's part of a window.
#[derive(Debug)]
pub(crate) struct WindowShare {
    window: Arc<PeerWindow>,
    waiter: Arc<Waiter>,
    /// PSNs that are counted as ours.
    counted: u64,
    /// PSNs of the turn that are used.
    used: u64,
}

impl WindowShare {
    /// A part of the window to `peer` for the connection that `task` runs.
    pub(crate) fn new(windows: &PeerWindows, peer: Gid, task: &Arc<Task>) -> Self {
        let (queued, granted, gone) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let waiter = Waiter { task: Arc::clone(task), queued, granted, gone };
        Self { window: windows.window(peer), waiter: Arc::new(waiter), counted: 0, used: 0 }
    }

    /// PSNs that are counted as ours.
    pub(crate) const fn counted(&self) -> u64 {
        self.counted
    }

    /// Returns `true` if another packet may be sent. Otherwise the task runs again when it is its turn.
    pub(crate) fn may_send(&mut self) -> bool {
        if self.used > 0 {
            return true;
        }
        if self.waiter.queued.load(Ordering::Acquire) {
            return false;
        }
        if self.take_grant() || !(self.window.is_full() || self.window.waiting.load(Ordering::Acquire)) {
            return true;
        }
        self.window.enqueue(&self.waiter);
        // What made room just now did not see us.
        self.window.admit();
        false
    }

    /// Returns `true` if the next packet is the last of a turn.
    pub(crate) const fn ends_turn(&self) -> bool {
        self.used + 1 >= QUANTUM
    }

    /// A turn goes on with a packet that was sent, after which `in_flight` PSNs are unacked.
    pub(crate) fn sent(&mut self, in_flight: u64) {
        let new = in_flight.saturating_sub(self.counted);
        self.used = if self.used + new >= QUANTUM { 0 } else { self.used + new };
        self.count(in_flight);
    }

    /// Something was acknowledged, and `in_flight` PSNs are left.
    pub(crate) fn acked(&mut self, in_flight: u64) {
        self.count(in_flight);
        self.window.admit();
    }

    /// There is nothing more to send for now.
    pub(crate) fn pause(&mut self, in_flight: u64) {
        self.used = 0;
        self.take_grant();
        self.acked(in_flight);
    }

    fn take_grant(&self) -> bool {
        let granted = self.waiter.granted.swap(false, Ordering::AcqRel);
        if granted {
            self.window.in_flight.fetch_sub(QUANTUM, Ordering::AcqRel);
        }
        granted
    }

    fn count(&mut self, in_flight: u64) {
        if in_flight >= self.counted {
            self.window.in_flight.fetch_add(in_flight - self.counted, Ordering::AcqRel);
        } else {
            self.window.in_flight.fetch_sub(self.counted - in_flight, Ordering::AcqRel);
        }
        self.counted = in_flight;
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        self.waiter.gone.store(true, Ordering::Release);
        self.pause(0);
    }
}
