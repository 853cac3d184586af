//! Completion queues.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Completion, CompletionSink, Snapshot, VerbsError};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::counters::bump;
use crate::directory::Directory;
use crate::sys::Wc;
use crate::verbs::HostCq;

/// Completions taken from the host at once.
pub(crate) const BATCH: usize = 32;
/// Entries of a queue before it has queue pairs.
const FIRST_ENTRIES: u32 = 256;

/// A completion queue of the host and the guest's behind it.
pub(crate) struct Cq {
    cqs: Arc<Directory<usize, Self>>,
    pub(crate) host: Arc<HostCq>,
    sink: Arc<dyn CompletionSink>,
    /// The guest's queue was full once. It takes nothing any more.
    dead: AtomicBool,
    /// The host's queue is armed: an event comes with the next completion.
    armed: AtomicBool,
    /// The guest asked for an event when the host's queue was armed already.
    arm_again: AtomicBool,
    /// How often the guest polled an empty queue.
    guest_polls: AtomicU64,
    /// Held by who takes completions.
    state: Mutex<State>,
}

struct State {
    entries: Box<[Wc; BATCH]>,
    /// Requests that may complete here at the same time.
    needed: u32,
}

/// A completion queue at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct CqInspect {
    /// Room in the host's queue, and how much of it is spoken for.
    host: Snapshot<CqRoom>,
    /// An event comes with the next completion.
    armed: bool,
    /// The guest's queue was full once, or it ended. It takes nothing any more.
    dead: bool,
    /// How often the guest polled an empty queue.
    guest_polls: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct CqRoom {
    /// Entries of the host's queue.
    entries: u32,
    /// Requests that may complete here at the same time.
    needed: u32,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Cq {
    /// Makes a queue that is armed.
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

    /// Describes itself. Waits for nobody.
    pub(crate) fn inspect(&self) -> CqInspect {
        // The lock keeps the host's queue from being resized.
        let host = self.state.try_lock().map(|state| CqRoom { entries: self.host.entries(), needed: state.needed });
        CqInspect { host: host.into(), armed: self.is_armed(), dead: self.is_dead(), guest_polls: self.guest_polls() }
    }

    /// Arms the host's queue: an event comes with the next completion. What came before is for the caller to take.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // Who finds it armed already relies on an event that is still to come.
        if self.armed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // Who asked before this has what they wanted.
        self.arm_again.store(false, Ordering::SeqCst);
        self.host.arm().inspect_err(|_| self.armed.store(false, Ordering::SeqCst))
    }

    /// The event came, so the queue is not armed any more.
    pub(crate) fn event_came(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Returns `true` if an event comes with the next completion, or has come and nobody has read it.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// The guest asks for an event. Returns `true` if the queue is armed; whoever reads its event, which may be that of
    /// a completion that the guest has, is then told by [`Self::is_arm_wanted`].
    pub(crate) fn rely_on_event(&self) -> bool {
        if !self.is_armed() {
            return false;
        }
        self.arm_again.store(true, Ordering::SeqCst);
        // Who read the event before that was not told. All these are sequentially consistent, so one of us sees the
        // other.
        self.is_armed()
    }

    /// Returns `true` if the guest has asked for an event since the queue was last armed, for who has read its event.
    pub(crate) fn is_arm_wanted(&self) -> bool {
        self.arm_again.load(Ordering::SeqCst)
    }

    /// The guest polled, found nothing and said so by a doorbell.
    pub(crate) fn guest_polled(&self) {
        self.guest_polls.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often it did.
    pub(crate) fn guest_polls(&self) -> u64 {
        self.guest_polls.load(Ordering::Relaxed)
    }

    /// Makes room for the completions of a queue that is about to use this one.
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

    /// Takes back what was reserved.
    pub(crate) fn release(&self, count: u32) {
        let mut state = self.state.lock();
        state.needed = state.needed.saturating_sub(count);
    }

    /// Publishes to the guest. When there is no room, every QP of this queue goes to its error state.
    pub(crate) fn publish(&self, adapter: &Adapter, view: &DmaView<'_>, completion: &Completion) {
        if self.dead.load(Ordering::Relaxed) {
            return;
        }
        bump(&adapter.counters.completions);
        if self.sink.complete(view, completion).is_err() && !self.dead.swap(true, Ordering::AcqRel) {
            bump(&adapter.counters.cq_overruns);
        }
    }

    /// Nothing is published any more.
    pub(crate) fn end(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Returns `true` if an overrun ended it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Waits until nobody else takes completions. The caller holds no view.
    pub(crate) fn lock(&self) -> Completions<'_> {
        Completions { host: &self.host, state: self.state.lock() }
    }

    /// Returns `None` if somebody takes completions now.
    pub(crate) fn try_lock(&self) -> Option<Completions<'_>> {
        self.state.try_lock().map(|state| Completions { host: &self.host, state })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.cqs.remove(self.host.address());
    }
}

/// The right to take completions of the host's queue.
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
