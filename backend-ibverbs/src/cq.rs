//! Completion queues.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Completion, CompletionQueue, CompletionSink, VerbsError};

use crate::adapter::{Adapter, bump};
use crate::qp::Qp;
use crate::sys::Wc;
use crate::verbs::HostCq;

/// Completions taken from the host at once.
const BATCH: usize = 32;
/// Entries of a queue before it has queue pairs.
const FIRST_ENTRIES: u32 = 256;

/// A completion queue of the host and the guest's behind it.
pub(crate) struct Cq {
    adapter: Weak<Adapter>,
    pub(crate) host: Arc<HostCq>,
    sink: Arc<dyn CompletionSink>,
    /// The guest's queue was full once. It takes nothing any more.
    dead: AtomicBool,
    /// The host announces the next completion.
    armed: AtomicBool,
    /// How often the guest looked.
    looks: AtomicU64,
    /// Held by who takes completions.
    state: Mutex<State>,
}

struct State {
    entries: Box<[Wc; BATCH]>,
    /// Requests that may complete here at the same time.
    needed: u32,
    /// Queue pairs of this batch that may go on.
    kicked: Vec<Arc<Qp>>,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn create(adapter: &Arc<Adapter>, sink: Arc<dyn CompletionSink>) -> Result<Arc<Self>, VerbsError> {
        let host = Arc::new(HostCq::new(&adapter.channel, FIRST_ENTRIES)?);
        let state = State { entries: Box::new([Wc::default(); BATCH]), needed: 0, kicked: Vec::new() };
        let cq = Arc::new(Self {
            adapter: Arc::downgrade(adapter),
            host,
            sink,
            dead: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            state: Mutex::new(state),
        });
        adapter.cqs.write().insert(cq.host.address(), Arc::downgrade(&cq));
        cq.arm()?;
        Ok(cq)
    }

    /// Asks the host to announce the next completion. What came before is for the caller to take.
    fn arm(&self) -> Result<(), VerbsError> {
        // Who finds it armed already relies on an announcement that is still to come.
        if self.armed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        Ok(self.host.arm().inspect_err(|_| self.armed.store(false, Ordering::Release))?)
    }

    /// The host made its announcement; the next one has to be asked for.
    pub(crate) fn announced(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Whether the host announces the next completion.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire)
    }

    /// How often the guest looked, by a doorbell.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Has the next completion announced and takes what came before that. Whether there was any.
    pub(crate) fn watch(&self, adapter: &Adapter) -> bool {
        match self.arm() {
            Ok(()) => self.drain(adapter) > 0,
            Err(error) => {
                log::error!("{}: a completion queue of the host cannot be watched: {error}", adapter.name);
                false
            }
        }
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

    /// Gives that room back.
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

    /// Whether an overrun ended it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The host's queue overran: its queue pairs are in the error state, and so are ours.
    pub(crate) fn fail(&self, adapter: &Adapter) {
        self.dead.store(true, Ordering::Release);
        let qps: Vec<_> = adapter.qps.read().values().filter_map(Weak::upgrade).collect();
        for qp in qps.iter().filter(|qp| qp.uses(self)) {
            qp.host_event(pvrdma_verbs::QpEvent::Fatal);
        }
    }

    /// Takes what the host has, unless somebody does so now.
    fn try_drain(&self, adapter: &Adapter, rounds: usize) -> usize {
        self.state.try_lock().map_or(0, |state| self.drain_locked(adapter, state, rounds))
    }

    /// Takes all that the host has. The caller holds no view.
    pub(crate) fn drain(&self, adapter: &Adapter) -> usize {
        self.drain_locked(adapter, self.state.lock(), usize::MAX)
    }

    fn drain_locked(&self, adapter: &Adapter, mut guard: parking_lot::MutexGuard<'_, State>, rounds: usize) -> usize {
        let mut total = 0;
        let State { entries, kicked, .. } = &mut *guard;
        for _ in 0..rounds {
            let count = match self.host.poll(&mut entries[..]) {
                Ok(count) => count,
                Err(error) => {
                    log::error!("{}: {error}", adapter.name);
                    0
                }
            };
            if count == 0 {
                break;
            }
            total += count;
            let view = adapter.memory.view();
            for wc in entries.iter().take(count) {
                match adapter.qp(wc.qp_num) {
                    Some(qp) => {
                        if qp.complete(self, &view, wc) && !kicked.iter().any(|known| Arc::ptr_eq(known, &qp)) {
                            kicked.push(qp);
                        }
                    }
                    None => bump(&adapter.counters.stale_completions),
                }
            }
            if count < BATCH {
                break;
            }
        }
        if kicked.is_empty() {
            return total;
        }
        let kicked = std::mem::take(kicked);
        // Going on takes locks that may be held by who waits for this one.
        drop(guard);
        for qp in kicked {
            qp.kick();
        }
        total
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if let Some(adapter) = self.adapter.upgrade() {
            adapter.cqs.write().remove(&self.host.address());
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct IbvCq(pub(crate) Arc<Cq>);

impl CompletionQueue for IbvCq {
    fn notify_poll(&self) {
        self.0.looks.fetch_add(1, Ordering::Relaxed);
        if let Some(adapter) = self.0.adapter.upgrade() {
            self.0.try_drain(&adapter, 1);
        }
    }

    fn notify_arm(&self) {
        if let Some(adapter) = self.0.adapter.upgrade()
            && !self.0.is_armed()
        {
            self.0.watch(&adapter);
        }
    }
}
