//! Doorbell pages that are memory temporarily, without a kernel that maps them.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, Deferred, DoorbellPages, DoorbellWindow, MsixPlace, PciFunction};
use pvrdma_verbs::Hca;

use crate::device::PvrdmaDevice;
use crate::watcher::MappedDoorbells;
use crate::window::{Pause, WindowPolicy, WindowWatcher};

const PAGE: usize = 4096;

/// Moment at which a test may run an action, see [`WindowPages::at`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[expect(missing_docs, reason = "the names describe the moments")]
pub enum Moment {
    BeforeMap,
    AfterMap,
    BeforeUnmap,
    AfterUnmap,
}

impl Moment {
    /// All moments.
    pub const ALL: [Self; 4] = [Self::BeforeMap, Self::AfterMap, Self::BeforeUnmap, Self::AfterUnmap];
}

/// A function whose doorbell pages, except for the first, are memory when its watcher maps them: a store is then
/// silent, and otherwise a trapped write. Time advances only by [`WindowPages::advance`], and only
/// [`WindowPages::turn`] or a thread of the test watches.
pub struct WindowPages {
    function: Arc<dyn PciFunction>,
    device: Arc<dyn MappedDoorbells>,
    watcher: Arc<WindowWatcher>,
    memory: Arc<Memory>,
    now: Arc<AtomicU64>,
}

/// State of the mapped pages.
#[derive(Default)]
struct Memory {
    pages: Mutex<BTreeMap<u32, Box<[u8; PAGE]>>>,
    refuses: AtomicBool,
    maps: AtomicU64,
    silent: AtomicU64,
    action: Mutex<Option<(Moment, Action)>>,
}

/// Action of a test at a moment.
type Action = Box<dyn FnOnce() + Send>;

impl Memory {
    fn come(&self, moment: Moment) {
        let action = self.action.lock().take_if(|(at, _)| *at == moment);
        if let Some((_, action)) = action {
            action();
        }
    }

    fn refuse(&self) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) { Err(io::Error::other("as the test wants")) } else { Ok(()) }
    }
}

impl DoorbellWindow for Memory {
    fn map(&self, page: u32) -> io::Result<()> {
        if self.pages.lock().contains_key(&page) {
            return Ok(());
        }
        self.refuse()?;
        self.come(Moment::BeforeMap);
        self.pages.lock().insert(page, Box::new([0; PAGE]));
        self.maps.fetch_add(1, Ordering::SeqCst);
        self.come(Moment::AfterMap);
        Ok(())
    }

    fn unmap(&self, page: u32) -> io::Result<()> {
        self.refuse()?;
        self.come(Moment::BeforeUnmap);
        self.pages.lock().remove(&page);
        self.come(Moment::AfterUnmap);
        Ok(())
    }
}

impl fmt::Debug for WindowPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowPages").field("mapped", &self.watcher.mapped()).finish_non_exhaustive()
    }
}

impl WindowPages {
    /// Creates a watcher with this policy for a device.
    pub fn new<H: Hca + 'static>(device: &Arc<PvrdmaDevice<H>>, policy: WindowPolicy) -> Arc<Self> {
        let (memory, now) = (Arc::new(Memory::default()), Arc::new(AtomicU64::new(1)));
        let clock = Arc::clone(&now);
        let clock = Box::new(move || clock.load(Ordering::SeqCst));
        let watcher = WindowWatcher::with_clock(device, Arc::<Memory>::clone(&memory), policy, clock);
        Arc::new(Self {
            function: Arc::<PvrdmaDevice<H>>::clone(device),
            device: Arc::<PvrdmaDevice<H>>::clone(device),
            watcher,
            memory,
            now,
        })
    }

    /// Returns the watcher, for a thread that runs it.
    pub fn watcher(&self) -> &WindowWatcher {
        &self.watcher
    }

    /// Returns the device that the watcher observes.
    pub fn device(&self) -> &dyn MappedDoorbells {
        &*self.device
    }

    /// Advances the time.
    pub fn advance(&self, nanoseconds: u64) {
        self.now.fetch_add(nanoseconds, Ordering::SeqCst);
    }

    /// Does one pass of the watcher.
    pub fn turn(&self) -> Pause {
        self.watcher.turn(&*self.device)
    }

    /// Runs the watcher, and advances the time, until it sleeps.
    ///
    /// # Panics
    /// It never sleeps.
    pub fn settle(&self) {
        for _ in 0..1_000_000 {
            match self.turn() {
                Pause::None => self.advance(1_000),
                Pause::Until(time) => _ = self.now.fetch_max(time, Ordering::SeqCst),
                Pause::Forever => return,
            }
        }
        panic!("the watcher does not sleep");
    }

    /// Returns the pages that are memory.
    pub fn mapped(&self) -> Vec<u32> {
        self.memory.pages.lock().keys().copied().collect()
    }

    /// Returns how often a page became memory.
    pub fn maps(&self) -> u64 {
        self.memory.maps.load(Ordering::SeqCst)
    }

    /// Returns the number of silent stores.
    pub fn silent(&self) -> u64 {
        self.memory.silent.load(Ordering::SeqCst)
    }

    /// Runs `action` once, at this moment of the next change of a page, in the middle of the watcher's work.
    pub fn at(&self, moment: Moment, action: impl FnOnce() + Send + 'static) {
        *self.memory.action.lock() = Some((moment, Box::new(action)));
    }

    /// Makes changes of pages fail, or succeed again.
    pub fn refuse(&self, refuse: bool) {
        self.memory.refuses.store(refuse, Ordering::SeqCst);
    }

    /// Returns page and offset of an access to a doorbell page that is memory now.
    fn silent_place(bar: usize, offset: u64) -> Option<(u32, usize)> {
        (bar == 2).then_some(((offset / PAGE as u64) as u32, (offset % PAGE as u64) as usize))
    }
}

impl PciFunction for WindowPages {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.function.bars()
    }

    fn config_size(&self) -> usize {
        self.function.config_size()
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.function.config_read(offset, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.function.config_write(offset, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        if let Some((page, place)) = Self::silent_place(bar, offset)
            && let Some(memory) = self.memory.pages.lock().get(&page)
        {
            return data.copy_from_slice(&memory[place..place + data.len()]);
        }
        self.function.bar_read(bar, offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        if let Some((page, place)) = Self::silent_place(bar, offset)
            && let Some(memory) = self.memory.pages.lock().get_mut(&page)
        {
            self.memory.silent.fetch_add(1, Ordering::SeqCst);
            memory[place..place + data.len()].copy_from_slice(data);
            return Deferred::Nothing;
        }
        self.function.bar_write(bar, offset, data)
    }

    fn run_deferred(&self) {
        self.function.run_deferred();
    }

    fn msix(&self) -> Option<MsixPlace> {
        self.function.msix()
    }

    fn doorbell_window(&self) -> Option<DoorbellPages> {
        self.function.doorbell_window()
    }

    fn reset(&self) {
        self.function.reset();
    }
}
