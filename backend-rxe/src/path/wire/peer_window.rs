//! How much all connections to one host have under way together.
//!
//! Each requester has its window, but a thousand of them would send a gigabyte before the first learns that most of it was
//! lost. So the connections to one peer share a second window. While there is room in it nobody notices; when there is
//! none they take turns of a few packets, in the order in which they asked.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::qp::Qp;

/// PSNs under way to a peer, about: at the largest path MTU 4 MiB.
const MOST: u64 = 1024;
/// PSNs in a turn. The last one asks for an ACK, so that what a turn takes comes back.
const QUANTUM: u64 = 64;

/// The window to one peer.
#[derive(Debug, Default)]
pub(crate) struct PeerWindow {
    under_way: AtomicU64,
    waiting: AtomicBool,
    queue: Mutex<VecDeque<Arc<Waiter>>>,
}

/// A connection that may have to wait.
#[derive(Debug)]
struct Waiter {
    qp: Weak<Qp>,
    queued: AtomicBool,
    /// It is its turn; [`QUANTUM`] is counted for it until it begins.
    granted: AtomicBool,
    gone: AtomicBool,
}

impl PeerWindow {
    fn is_full(&self) -> bool {
        self.under_way.load(Ordering::Acquire) >= MOST
    }

    /// Wakes those at the front of the queue, as far as there is room.
    fn admit(&self) {
        if !self.waiting.load(Ordering::Acquire) {
            return;
        }
        let mut admitted = Vec::new();
        {
            let mut queue = self.queue.lock();
            let mut room = MOST.saturating_sub(self.under_way.load(Ordering::Acquire));
            while room > 0
                && let Some(waiter) = queue.pop_front()
            {
                waiter.queued.store(false, Ordering::Release);
                if !waiter.gone.load(Ordering::Acquire) {
                    waiter.granted.store(true, Ordering::Release);
                    self.under_way.fetch_add(QUANTUM, Ordering::AcqRel);
                    admitted.extend(waiter.qp.upgrade());
                    room = room.saturating_sub(QUANTUM);
                }
            }
            self.waiting.store(!queue.is_empty(), Ordering::Release);
        }
        for qp in admitted {
            qp.kick();
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
    flight: Arc<PeerWindow>,
    waiter: Arc<Waiter>,
    /// PSNs that are counted as ours.
    counted: u64,
    /// PSNs of the turn that are used.
    used: u64,
}

impl WindowShare {
    pub(crate) fn new(flight: Arc<PeerWindow>, qp: &Qp) -> Self {
        let (queued, granted, gone) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let waiter = Waiter { qp: Weak::clone(&qp.me), queued, granted, gone };
        Self { flight, waiter: Arc::new(waiter), counted: 0, used: 0 }
    }

    /// Whether another packet may be sent. `false`: the QP runs again when it is its turn.
    pub(crate) fn may_send(&mut self) -> bool {
        if self.used > 0 {
            return true;
        }
        if self.waiter.queued.load(Ordering::Acquire) {
            return false;
        }
        if self.take_grant() || !(self.flight.is_full() || self.flight.waiting.load(Ordering::Acquire)) {
            return true;
        }
        self.flight.enqueue(&self.waiter);
        // What made room just now did not see us.
        self.flight.admit();
        false
    }

    /// Whether the next packet is the last of a turn.
    pub(crate) const fn ends_turn(&self) -> bool {
        self.used + 1 >= QUANTUM
    }

    /// A turn goes on with a packet that was sent, after which `under_way` PSNs are unconfirmed.
    pub(crate) fn sent(&mut self, under_way: u64) {
        let new = under_way.saturating_sub(self.counted);
        self.used = if self.used + new >= QUANTUM { 0 } else { self.used + new };
        self.count(under_way);
    }

    /// Something was confirmed.
    pub(crate) fn confirmed(&mut self, under_way: u64) {
        self.count(under_way);
        self.flight.admit();
    }

    /// There is nothing more to send for now.
    pub(crate) fn pause(&mut self, under_way: u64) {
        self.used = 0;
        self.take_grant();
        self.confirmed(under_way);
    }

    fn take_grant(&self) -> bool {
        let granted = self.waiter.granted.swap(false, Ordering::AcqRel);
        if granted {
            self.flight.under_way.fetch_sub(QUANTUM, Ordering::AcqRel);
        }
        granted
    }

    fn count(&mut self, under_way: u64) {
        if under_way >= self.counted {
            self.flight.under_way.fetch_add(under_way - self.counted, Ordering::AcqRel);
        } else {
            self.flight.under_way.fetch_sub(self.counted - under_way, Ordering::AcqRel);
        }
        self.counted = under_way;
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        self.waiter.gone.store(true, Ordering::Release);
        self.pause(0);
    }
}
