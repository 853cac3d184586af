//! Shared receive queues.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_handover::WaitFlag;
use pvrdma_verbs::{AsyncEvent, QueueError, RecvSource, SavedRing, SharedReceiveQueue, SrqEvent};
use pvrdma_verbs_types::RecvWr;
use serde::Serialize;
use serde_json::Value;

use crate::adapter::Adapter;
use crate::qp::state::StateCell;
use crate::quota::Permit;

/// A shared receive queue of the engine.
pub(crate) struct Srq {
    adapter: Arc<Adapter>,
    cookie: u32,
    /// Protection domain in which the keys of receives are looked up.
    pub(crate) pd: u64,
    ring: Mutex<Ring>,
    /// Set while `waiters` may have entries, so that a post without waiters takes no lock.
    waiting: WaitFlag,
    _permit: Permit,
}

struct Ring {
    /// `None` after destruction.
    source: Option<Box<dyn RecvSource>>,
    broken: bool,
    limit: u32,
    /// QPs that found no receive.
    waiters: VecDeque<Weak<StateCell>>,
}

impl Ring {
    /// Adds a waiter. QPs that have ended, or wait elsewhere by now, are removed only when the list would have to grow.
    fn add_waiter(&mut self, waiter: Weak<StateCell>, srq: usize) {
        if self.waiters.len() == self.waiters.capacity() {
            let mut kept = HashSet::new();
            self.waiters.retain(|waiter| {
                waiter.upgrade().is_some_and(|qp| qp.is_queued_at_srq(srq)) && kept.insert(waiter.as_ptr())
            });
        }
        self.waiters.push_back(waiter);
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

/// State of a shared receive queue at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct SrqInspect {
    /// The ring can no longer be read.
    broken: bool,
    /// Number of receives below which the guest gets an event; 0 for no event.
    limit: u32,
    /// Number of requesters in this process that found no receive. Some may have ended.
    waiters: usize,
}

impl Srq {
    /// Returns the state of the queue for inspection.
    pub(crate) fn inspect(&self) -> Snapshot<SrqInspect> {
        let ring = self.ring.try_lock();
        ring.map(|ring| SrqInspect { broken: ring.broken, limit: ring.limit, waiters: ring.waiters.len() }).into()
    }

    pub(crate) fn new(
        adapter: Arc<Adapter>,
        cookie: u32,
        pd: u64,
        source: Box<dyn RecvSource>,
        limit: u32,
        permit: Permit,
    ) -> Self {
        let ring = Ring { source: Some(source), broken: false, limit, waiters: VecDeque::new() };
        Self { adapter, cookie, pd, ring: Mutex::new(ring), waiting: WaitFlag::new(), _permit: permit }
    }

    /// Saves the queue: its ring, its limit, and whether the ring is broken. `None`: it was destroyed, or its ring
    /// cannot be saved.
    pub(crate) fn save(&self) -> Option<(SavedRing, u32, bool)> {
        let Self { adapter: _, cookie: _, pd: _, ring, waiting: _, _permit } = self;
        let Ring { source, broken, limit, waiters: _ } = &*ring.lock();
        Some((source.as_ref()?.save()?, *limit, *broken))
    }

    /// Marks the ring as broken.
    pub(crate) fn set_broken(&self) {
        self.ring.lock().broken = true;
    }

    /// Treats the ring as invalid from now on, and reports that once.
    pub(crate) fn break_off(&self, view: &DmaView<'_>) {
        if !std::mem::replace(&mut self.ring.lock().broken, true) {
            self.adapter.events.event(view, AsyncEvent::Srq(SrqEvent::Error, self.cookie));
        }
    }

    /// Returns a value that identifies the queue.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Takes the next receive. If there is none, the next post wakes `waiter`.
    pub(crate) fn pop(
        &self,
        view: &DmaView<'_>,
        work: &mut RecvWr,
        waiter: Option<&Arc<StateCell>>,
    ) -> Result<bool, Option<QueueError>> {
        let mut ring = self.ring.lock();
        let popped = self.pop_ring(&mut ring, view, work)?;
        if popped {
            return Ok(true);
        }
        let Some(waiter) = waiter else { return Ok(false) };
        if waiter.queue_at_srq(self.address()) {
            ring.add_waiter(Arc::downgrade(waiter), self.address());
        }
        // A receive that was posted before the flag was set woke no waiter, so the ring is checked again.
        self.waiting.set();
        self.pop_ring(&mut ring, view, work)
    }

    /// Takes a receive from the ring. `Err(None)`: the queue was broken before.
    fn pop_ring(&self, ring: &mut Ring, view: &DmaView<'_>, work: &mut RecvWr) -> Result<bool, Option<QueueError>> {
        let Some(source) = ring.source.as_mut().filter(|_| !ring.broken) else { return Err(None) };
        let result = source.pop(view, work).and_then(|popped| {
            let low = popped && ring.limit > 0 && source.posted(view)? < ring.limit;
            Ok((popped, low))
        });
        match result {
            Ok((popped, low)) => {
                if low {
                    ring.limit = 0;
                    self.adapter.events.event(view, AsyncEvent::Srq(SrqEvent::LimitReached, self.cookie));
                }
                Ok(popped)
            }
            Err(error) => {
                ring.broken = true;
                self.adapter.events.event(view, AsyncEvent::Srq(SrqEvent::Error, self.cookie));
                Err(Some(error))
            }
        }
    }

    /// Returns the number of entries in the list of waiters.
    #[cfg(test)]
    pub(crate) fn waiters(&self) -> usize {
        self.ring.lock().waiters.len()
    }

    /// Wakes waiters, if there are receives for them.
    pub(crate) fn notify(&self) {
        if !self.waiting.is_set() {
            return;
        }
        let view = self.adapter.memory.view();
        if self.adapter.paused.is_set() {
            return;
        }
        let mut ring = self.ring.lock();
        let posted = match ring.source.as_mut().map(|source| source.posted(&view)) {
            Some(Ok(posted)) => posted as usize,
            // The next caller of `pop` reports the error.
            Some(Err(_)) => usize::MAX,
            None => 0,
        };
        let mut woken = 0;
        while woken < posted
            && let Some(waiter) = ring.waiters.pop_front()
        {
            let Some(qp) = waiter.upgrade() else { continue };
            // A QP that waits elsewhere, or was reset meanwhile, must not consume the wake-up that another one needs.
            if qp.unqueue_at_srq(self.address()) && qp.receives() {
                qp.task().wake();
                woken += 1;
            }
        }
        if ring.waiters.is_empty() {
            self.waiting.clear();
        }
    }
}

/// A shared receive queue. Dropping it destroys the queue.
#[derive(Debug)]
pub struct RxeSrq(pub(crate) Arc<Srq>);

impl SharedReceiveQueue for RxeSrq {
    fn set_limit(&self, limit: u32) {
        self.0.ring.lock().limit = limit;
    }

    fn limit(&self) -> u32 {
        self.0.ring.lock().limit
    }

    fn notify_recv(&self) {
        self.0.notify();
    }

    fn inspect(&self) -> Value {
        serde_json::to_value(self.0.inspect()).unwrap_or_default()
    }

    fn destroy(&self) {
        let mut ring = self.0.ring.lock();
        ring.source = None;
        for waiter in ring.waiters.drain(..) {
            if let Some(qp) = waiter.upgrade() {
                qp.unqueue_at_srq(self.0.address());
            }
        }
    }
}

impl Drop for RxeSrq {
    fn drop(&mut self) {
        self.destroy();
    }
}
