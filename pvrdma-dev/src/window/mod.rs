//! Doorbell pages that are memory while their process polls, and trap otherwise: for a VMM with the device in process.
//!
//! A page traps at first: its doorbells are messages, arming is exact. One that rings often and arms nothing becomes
//! memory ([`policy`]); from then on its rings are watched. When nothing has been posted for a while all pages trap
//! again. Neither way is anything lost: rings are watched before a page becomes memory, and are looked at once more
//! when it traps again; what was armed meanwhile is made good by arming all once.

mod policy;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pvrdma_pci_function::DoorbellWindow;
use pvrdma_verbs::{Backend, DeviceLog};

use crate::device::PvrdmaDevice;
use crate::stats::WindowCounters;
use crate::watcher::{Depth, DoorbellWatcher, MappedDoorbells};

pub use policy::{DoorbellMode, Processors, WindowConfigError, WindowPolicy};
use policy::{Heat, Pacer, Step};

/// Nanoseconds on a clock that never goes back.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// How long the watcher does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pause {
    /// Not at all.
    None,
    /// Until this time, or until something wakes it.
    Until(u64),
    /// Until something wakes it.
    Forever,
}

/// Maps the doorbell pages of a device, and watches in place of doorbells. A thread of the VMM runs it.
pub struct WindowWatcher {
    window: Arc<dyn DoorbellWindow>,
    policy: WindowPolicy,
    clock: Clock,
    log: Arc<DeviceLog>,
    counts: Arc<WindowCounters>,
    /// By page.
    heat: Box<[Heat]>,
    /// Held while a page becomes memory or ceases to be, so that a page that is given to a process is not mapped for
    /// its last one. Inside of the device's lock for commands, outside of all its others.
    pages: Mutex<Pages>,
    signal: Mutex<Signal>,
    wakes: Condvar,
}

#[derive(Debug)]
struct Pages {
    mapped: BTreeSet<u32>,
    pacer: Pacer,
}

/// What the watcher wakes up for. A leaf among the locks.
#[derive(Debug, Default)]
struct Signal {
    /// Pages that are to become memory.
    hot: BTreeSet<u32>,
    woken: bool,
    stopped: bool,
}

impl fmt::Debug for WindowWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowWatcher").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl DoorbellWatcher for WindowWatcher {
    fn now(&self) -> u64 {
        (self.clock)()
    }

    fn wake(&self) {
        self.signal(|_| {});
    }

    fn renew(&self, page: u32) {
        let mut pages = self.pages.lock();
        if let Some(heat) = self.page(page) {
            heat.forget();
        }
        self.signal.lock().hot.remove(&page);
        if !pages.mapped.contains(&page) {
            return;
        }
        match self.window.unmap(page) {
            Ok(()) => _ = pages.mapped.remove(&page),
            Err(error) => {
                // Whoever has it next rings doorbells that nobody hears, so he is watched as soon as he is there.
                self.stays_memory(page, &error);
                self.signal(|signal| _ = signal.hot.insert(page));
            }
        }
    }

    fn heard(&self, page: u32, arms: bool) {
        let hot = self.page(page).is_some_and(|heat| heat.heard(&self.policy, arms, &self.clock));
        if hot {
            self.signal(|signal| _ = signal.hot.insert(page));
        }
    }
}

impl WindowWatcher {
    /// The watcher of a device that has none yet. Nothing is mapped before [`Self::run`].
    pub fn new<B: Backend>(
        device: &PvrdmaDevice<B>,
        window: Arc<dyn DoorbellWindow>,
        policy: WindowPolicy,
    ) -> Arc<Self> {
        let start = Instant::now();
        // It takes centuries until this is too long.
        let clock = move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Self::with_clock(device, window, policy, Box::new(clock))
    }

    /// The same with another clock. [`Self::run`] waits by that of the system, [`Self::turn`] not at all.
    pub fn with_clock<B: Backend>(
        device: &PvrdmaDevice<B>,
        window: Arc<dyn DoorbellWindow>,
        policy: WindowPolicy,
        clock: Clock,
    ) -> Arc<Self> {
        let heat = (0..device.core().limits().max_uar).map(|_| Heat::default()).collect();
        let pages = Mutex::new(Pages { mapped: BTreeSet::new(), pacer: Pacer::new(&policy) });
        let (signal, wakes) = (Mutex::default(), Condvar::new());
        let (log, counts) = (Arc::clone(&device.core().log), Arc::clone(&device.core().watch.window));
        let watcher = Arc::new(Self { window, policy, clock, log, counts, heat, pages, signal, wakes });
        device.set_doorbell_watcher(Arc::<Self>::clone(&watcher));
        watcher
    }

    /// Watches until [`Self::stop`]. `device` is the one that this was made for; one thread runs this.
    pub fn run(&self, device: &dyn MappedDoorbells) {
        while !self.signal.lock().stopped {
            match self.turn(device) {
                Pause::None => {}
                Pause::Until(until) => self.wait(Some(Duration::from_nanos(until.saturating_sub(self.now())))),
                Pause::Forever => self.wait(None),
            }
        }
    }

    /// Ends [`Self::run`], now or when it begins.
    pub fn stop(&self) {
        self.signal(|signal| signal.stopped = true);
    }

    /// Pages that are memory.
    pub fn mapped(&self) -> Vec<u32> {
        self.pages.lock().mapped.iter().copied().collect()
    }

    /// Looks once, does what there is to do, and returns how long there is nothing else.
    pub fn turn(&self, device: &dyn MappedDoorbells) -> Pause {
        let hot = std::mem::take(&mut self.signal.lock().hot);
        let depth = if self.map(device, hot) { Depth::All } else { Depth::Hot };
        let outcome = device.poll_doorbells(self.now(), depth);
        let step = {
            let Pages { mapped, pacer } = &mut *self.pages.lock();
            pacer.next(self.now(), outcome.moved, !mapped.is_empty())
        };
        match step {
            Step::Spin => Pause::None,
            Step::Nap(time) => {
                let end = self.now().saturating_add(time);
                Pause::Until(outcome.due.map_or(end, |due| due.min(end)))
            }
            Step::Retire => {
                self.retire(device);
                Pause::None
            }
            Step::Sleep => {
                // What is due earlier than this says wakes from here on.
                let outcome = device.poll_doorbells(self.now(), Depth::All);
                match outcome.due {
                    _ if outcome.moved > 0 => Pause::None,
                    Some(due) => Pause::Until(due),
                    None => Pause::Forever,
                }
            }
        }
    }

    fn page(&self, page: u32) -> Option<&Heat> {
        self.heat.get(usize::try_from(page).ok()?)
    }

    /// The system does not let a page trap again.
    fn stays_memory(&self, page: u32, error: &io::Error) {
        self.counts.doorbells_unmap_refused.increment();
        self.log.warn(module_path!(), format_args!("doorbell page {page} cannot be made to trap: {error}"));
    }

    fn signal(&self, change: impl FnOnce(&mut Signal)) {
        let mut signal = self.signal.lock();
        change(&mut signal);
        signal.woken = true;
        self.wakes.notify_one();
    }

    fn wait(&self, longest: Option<Duration>) {
        let mut signal = self.signal.lock();
        if !signal.woken {
            match longest {
                Some(longest) => drop(self.wakes.wait_for(&mut signal, longest)),
                None => self.wakes.wait(&mut signal),
            }
        }
        signal.woken = false;
    }

    /// Lets pages be memory. Returns `true` if there is a new one: what was posted around that moment is not to wait
    /// for its turn.
    fn map(&self, device: &dyn MappedDoorbells, hot: BTreeSet<u32>) -> bool {
        let mut new = false;
        for page in hot {
            let mut pages = self.pages.lock();
            // First the rings are watched, then nothing is heard.
            if !device.page_mapped(page) {
                if pages.mapped.contains(&page) {
                    // It could not be taken away. Its next process is not there yet.
                    self.signal.lock().hot.insert(page);
                }
                continue;
            }
            match self.window.map(page) {
                Ok(()) => {
                    new = true;
                    pages.mapped.insert(page);
                    pages.pacer.mapped(self.now());
                }
                Err(error) => {
                    self.counts.doorbells_map_refused.increment();
                    self.log.warn(module_path!(), format_args!("doorbell page {page} cannot be memory: {error}"));
                    if let Some(heat) = self.page(page) {
                        heat.refused(self.now());
                    }
                    pages.mapped.remove(&page);
                    drop(pages);
                    device.pages_trapped(&[page], self.now());
                }
            }
        }
        new
    }

    /// Lets all pages trap.
    fn retire(&self, device: &dyn MappedDoorbells) {
        let mut trapped = Vec::new();
        {
            let Pages { mapped, pacer } = &mut *self.pages.lock();
            mapped.retain(|&page| match self.window.unmap(page) {
                Ok(()) => {
                    trapped.push(page);
                    false
                }
                Err(error) => {
                    self.stays_memory(page, &error);
                    true
                }
            });
            if !mapped.is_empty() {
                // Another attempt after another while.
                pacer.mapped(self.now());
            }
        }
        // A process that got one of them meanwhile has each of its queues armed once.
        device.pages_trapped(&trapped, self.now());
    }
}

#[cfg(test)]
mod tests;
