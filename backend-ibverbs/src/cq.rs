//! Completion queues.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{CompletionSink, VerbsError};
use pvrdma_verbs_types::Completion;
use serde::Serialize;

use crate::adapter::Adapter;
use crate::counters::bump;
use crate::directory::Directory;
use crate::sys::Wc;
use crate::verbs::HostCq;

/// Maximum number of completions taken from the host in one call.
pub(crate) const BATCH: usize = 32;
/// Number of entries of a queue that has no queue pairs yet.
const FIRST_ENTRIES: u32 = 256;

/// A completion queue of the host, and the guest's queue that it feeds.
pub(crate) struct Cq {
    cqs: Arc<Directory<usize, Self>>,
    pub(crate) host: Arc<HostCq>,
    sink: Arc<dyn CompletionSink>,
    /// Set once the guest's queue has overrun, after which it accepts no completions.
    dead: AtomicBool,
    /// The host's queue is armed: the next completion raises an event.
    armed: AtomicBool,
    /// The guest has requested an event while the host's queue was already armed.
    arm_again: AtomicBool,
    /// Number of times the guest has polled an empty queue.
    guest_polls: AtomicU64,
    /// Locked by the thread that takes completions.
    state: Mutex<State>,
}

struct State {
    entries: Box<[Wc; BATCH]>,
    /// Maximum number of requests that may complete here at the same time.
    needed: u32,
}

/// Snapshot of a completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct CqInspect {
    /// Size of the host's queue, and how much of it is reserved.
    host: Snapshot<CqRoom>,
    /// The next completion raises an event.
    armed: bool,
    /// The guest's queue has overrun or was destroyed, and accepts no completions.
    dead: bool,
    /// Number of times the guest has polled an empty queue.
    guest_polls: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct CqRoom {
    /// Number of entries of the host's queue.
    entries: u32,
    /// Maximum number of requests that may complete here at the same time.
    needed: u32,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Cq {
    /// Creates an armed queue.
    pub(crate) fn create(
        adapter: &Adapter,
        cqs: &Arc<Directory<usize, Self>>,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Arc<Self>, VerbsError> {
        let cq = Arc::new(Self {
            cqs: Arc::clone(cqs),
            host: Arc::new(HostCq::new(&adapter.channel, FIRST_ENTRIES)?),
            sink,
            dead: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            arm_again: AtomicBool::new(false),
            guest_polls: AtomicU64::new(0),
            state: Mutex::new(State { entries: Box::new([Wc::default(); BATCH]), needed: 0 }),
        });
        cqs.insert(cq.host.address(), &cq);
        cq.arm()?;
        Ok(cq)
    }

    /// Returns a snapshot. Does not wait for locks.
    pub(crate) fn inspect(&self) -> CqInspect {
        // The lock prevents the host's queue from being resized.
        let host = self.state.try_lock().map(|state| CqRoom { entries: self.host.entries(), needed: state.needed });
        CqInspect { host: host.into(), armed: self.is_armed(), dead: self.is_dead(), guest_polls: self.guest_polls() }
    }

    /// Arms the host's queue: the next completion raises an event. The caller must take earlier completions itself.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // A thread that finds the queue armed relies on an event that is still to come.
        if self.armed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // Requests made before this point are satisfied by the event that is now armed.
        self.arm_again.store(false, Ordering::SeqCst);
        self.host.arm().inspect_err(|_| self.armed.store(false, Ordering::SeqCst))
    }

    /// Notes that the event was raised, so the queue is no longer armed.
    pub(crate) fn event_came(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Returns `true` if the next completion raises an event, or if an event has been raised and not been read yet.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// Requests an event for the guest. Returns `true` if the queue is armed. The event may be that of a completion
    /// that the guest already has, so the thread that reads the event then checks [`Self::is_arm_wanted`].
    pub(crate) fn rely_on_event(&self) -> bool {
        if !self.is_armed() {
            return false;
        }
        self.arm_again.store(true, Ordering::SeqCst);
        // A thread that read the event before the store above missed the request. All these accesses are sequentially
        // consistent, so either that thread sees the request, or this one sees that the queue is not armed.
        self.is_armed()
    }

    /// Returns `true` if the guest has requested an event since the queue was last armed. Called after reading the
    /// event.
    pub(crate) fn is_arm_wanted(&self) -> bool {
        self.arm_again.load(Ordering::SeqCst)
    }

    /// Notes that the guest has polled an empty queue and reported that by a doorbell.
    pub(crate) fn guest_polled(&self) {
        self.guest_polls.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of such polls.
    pub(crate) fn guest_polls(&self) -> u64 {
        self.guest_polls.load(Ordering::Relaxed)
    }

    /// Reserves room for the completions of a queue that is about to use this one.
    pub(crate) fn reserve(&self, count: u32) -> Result<(), VerbsError> {
        let mut state = self.state.lock();
        let needed = state.needed.saturating_add(count);
        if needed > self.host.entries() {
            let entries = needed.checked_next_power_of_two().ok_or(VerbsError::Exhausted("completion queue entry"))?;
            self.host.resize(entries)?;
        }
        state.needed = needed;
        Ok(())
    }

    /// Releases reserved room.
    pub(crate) fn release(&self, count: u32) {
        let mut state = self.state.lock();
        state.needed = state.needed.saturating_sub(count);
    }

    /// Publishes a completion to the guest. After an overrun, the queue accepts no completions, and each of its QPs
    /// enters its error state with its next one.
    pub(crate) fn publish(&self, adapter: &Adapter, view: &DmaView<'_>, completion: &Completion) {
        if self.dead.load(Ordering::Relaxed) {
            return;
        }
        bump(&adapter.counters.completions);
        if self.sink.complete(view, completion).is_err() && !self.dead.swap(true, Ordering::AcqRel) {
            bump(&adapter.counters.cq_overruns);
        }
    }

    /// Ends the queue: no more completions are published.
    pub(crate) fn end(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Returns `true` if the queue has overrun.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Waits until no other thread takes completions. The caller holds no view of guest memory.
    pub(crate) fn lock(&self) -> Completions<'_> {
        Completions { host: &self.host, state: self.state.lock() }
    }

    /// Returns `None` if another thread takes completions now.
    pub(crate) fn try_lock(&self) -> Option<Completions<'_>> {
        self.state.try_lock().map(|state| Completions { host: &self.host, state })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.cqs.remove(self.host.address());
    }
}

/// Exclusive right to take completions of the host's queue.
pub(crate) struct Completions<'a> {
    host: &'a HostCq,
    state: MutexGuard<'a, State>,
}

impl Completions<'_> {
    /// Takes the next completions, at most [`BATCH`].
    ///
    /// # Errors
    /// The host's queue cannot be polled.
    pub(crate) fn take(&mut self) -> io::Result<&[Wc]> {
        let entries = &mut self.state.entries[..];
        let count = self.host.poll(entries)?;
        Ok(entries.get(..count).unwrap_or_default())
    }
}
