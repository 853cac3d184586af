//! Doorbell pages that are mapped while their process polls, and trap otherwise: for a VMM with the device in its
//! process.
//!
//! At first a page traps: its doorbells are handled as writes, and arming is exact. A page that is written often
//! without arming is mapped ([`policy`]), and from then on its rings are watched. When nothing has been posted for a
//! while, all pages trap again. No doorbell is lost in either transition: rings are watched before a page is mapped,
//! and are checked once more when it traps again. Arming that was missed is made up for by arming all queues once.

mod policy;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pvrdma_base::DeviceLog;
use pvrdma_pci_function::DoorbellWindow;
use pvrdma_verbs::Hca;

use crate::device::PvrdmaDevice;
use crate::stats::WindowCounters;
use crate::watcher::{Depth, DoorbellWatcher, MappedDoorbells};

pub use policy::{DoorbellMode, Processors, WindowConfigError, WindowPolicy};
use policy::{Heat, Pacer, Step};

/// Clock: nanoseconds of monotonic time.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// Time for which the watcher has nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pause {
    /// No pause.
    None,
    /// Until this time, or until it is woken.
    Until(u64),
    /// Until it is woken.
    Forever,
}

/// Maps the doorbell pages of a device and watches rings in place of doorbells. A thread of the VMM runs it.
pub struct WindowWatcher {
    window: Arc<dyn DoorbellWindow>,
    policy: WindowPolicy,
    clock: Clock,
    log: Arc<DeviceLog>,
    counts: Arc<WindowCounters>,
    /// Doorbell rates, by page.
    heat: Box<[Heat]>,
    /// Held while a page is mapped or unmapped, so that a page that is assigned to a process cannot be mapped on behalf
    /// of its previous one. It is taken after the device's lock for commands, and before all its other locks.
    pages: Mutex<Pages>,
    signal: Mutex<Signal>,
    wakes: Condvar,
}

#[derive(Debug)]
struct Pages {
    mapped: BTreeSet<u32>,
    pacer: Pacer,
}

/// Reasons to wake the watcher. No other lock is taken while this one is held.
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
                // Doorbells of the page's next process will not trap either. So the page stays queued, and that process
                // is watched as soon as it exists.
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
    /// Creates the watcher of a device that has none yet. Nothing is mapped before [`Self::run`].
    pub fn new<H: Hca>(device: &PvrdmaDevice<H>, window: Arc<dyn DoorbellWindow>, policy: WindowPolicy) -> Arc<Self> {
        let start = Instant::now();
        // An overflow takes centuries.
        let clock = move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Self::with_clock(device, window, policy, Box::new(clock))
    }

    /// As [`Self::new`], with another clock. [`Self::run`] waits by the clock of the system, [`Self::turn`] does not
    /// wait.
    pub fn with_clock<H: Hca>(
        device: &PvrdmaDevice<H>,
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

    /// Watches until [`Self::stop`]. `device` must be the one for which the watcher was created; only one thread may
    /// run this.
    pub fn run(&self, device: &dyn MappedDoorbells) {
        while !self.signal.lock().stopped {
            match self.turn(device) {
                Pause::None => {}
                Pause::Until(until) => self.wait(Some(Duration::from_nanos(until.saturating_sub(self.now())))),
                Pause::Forever => self.wait(None),
            }
        }
    }

    /// Ends [`Self::run`], immediately or when it begins.
    pub fn stop(&self) {
        self.signal(|signal| signal.stopped = true);
    }

    /// Returns the pages that are memory.
    pub fn mapped(&self) -> Vec<u32> {
        self.pages.lock().mapped.iter().copied().collect()
    }

    /// Does one pass and its work, and returns the time until there is more to do.
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
                // From here on, a look that becomes due before the time that this pass returns wakes the watcher.
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

    /// Reports that the system cannot make a page trap again.
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

    /// Makes pages memory. Returns `true` if any page is new: requests posted during the change must then be looked for
    /// in all rings immediately.
    fn map(&self, device: &dyn MappedDoorbells, hot: BTreeSet<u32>) -> bool {
        let mut new = false;
        for page in hot {
            let mut pages = self.pages.lock();
            // The rings must be watched before the page stops trapping. Otherwise a request posted in between would be
            // missed.
            if !device.page_mapped(page) {
                if pages.mapped.contains(&page) {
                    // The page could not be unmapped earlier, and its next process does not exist yet, so it is tried
                    // again.
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

    /// Makes all pages trap.
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
                // Try again after another idle period.
                pacer.mapped(self.now());
            }
        }
        // If a page has been assigned to another process meanwhile, each queue of that process is armed once, which
        // does no harm.
        device.pages_trapped(&trapped, self.now());
    }
}

#[cfg(test)]
mod tests;
