//! Doorbell pages that are memory at times, without a kernel that maps them.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, DoorbellPages, DoorbellWindow, MsixPlace, PciFunction};
use pvrdma_verbs::Backend;

use crate::device::PvrdmaDevice;
use crate::watcher::MappedDoorbells;
use crate::window::{Pause, WindowPolicy, WindowWatcher};

const PAGE: usize = 4096;

/// Moments at which a test may do something, see [`WindowPages::at`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[expect(missing_docs, reason = "each is what its name says")]
pub enum Moment {
    BeforeMap,
    AfterMap,
    BeforeUnmap,
    AfterUnmap,
}

impl Moment {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::BeforeMap, Self::AfterMap, Self::BeforeUnmap, Self::AfterUnmap];
}

/// A function whose doorbell pages, but the first, are memory whenever its watcher wants: a store is silent then, and a
/// message otherwise. Time stands still but for [`WindowPages::advance`], and nobody watches but [`WindowPages::turn`]
/// or a thread of the test.
pub struct WindowPages {
    function: Arc<dyn PciFunction>,
    device: Arc<dyn MappedDoorbells>,
    watcher: Arc<WindowWatcher>,
    memory: Arc<Memory>,
    now: Arc<AtomicU64>,
}

/// What the pages are when they are memory.
#[derive(Default)]
struct Memory {
    pages: Mutex<BTreeMap<u32, Box<[u8; PAGE]>>>,
    refuses: AtomicBool,
    maps: AtomicU64,
    silent: AtomicU64,
    action: Mutex<Option<(Moment, Action)>>,
}

/// What a test does at a moment.
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
    /// Gives a device a watcher with this policy.
    pub fn new<B: Backend + 'static>(device: &Arc<PvrdmaDevice<B>>, policy: WindowPolicy) -> Arc<Self> {
        let (memory, now) = (Arc::new(Memory::default()), Arc::new(AtomicU64::new(1)));
        let clock = Arc::clone(&now);
        let clock = Box::new(move || clock.load(Ordering::SeqCst));
        let watcher = WindowWatcher::with_clock(device, Arc::<Memory>::clone(&memory), policy, clock);
        Arc::new(Self {
            function: Arc::<PvrdmaDevice<B>>::clone(device),
            device: Arc::<PvrdmaDevice<B>>::clone(device),
            watcher,
            memory,
            now,
        })
    }

    /// The watcher, for a thread that runs it.
    pub fn watcher(&self) -> &WindowWatcher {
        &self.watcher
    }

    /// What the watcher looks at.
    pub fn device(&self) -> &dyn MappedDoorbells {
        &*self.device
    }

    /// Lets time pass.
    pub fn advance(&self, nanoseconds: u64) {
        self.now.fetch_add(nanoseconds, Ordering::SeqCst);
    }

    /// The watcher looks once.
    pub fn turn(&self) -> Pause {
        self.watcher.turn(&*self.device)
    }

    /// The watcher goes on, as time passes, until it sleeps.
    ///
    /// # Panics
    /// It never does.
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

    /// Pages that are memory.
    pub fn mapped(&self) -> Vec<u32> {
        self.memory.pages.lock().keys().copied().collect()
    }

    /// Times that a page became memory.
    pub fn maps(&self) -> u64 {
        self.memory.maps.load(Ordering::SeqCst)
    }

    /// Stores that nobody heard.
    pub fn silent(&self) -> u64 {
        self.memory.silent.load(Ordering::SeqCst)
    }

    /// Has `action` done once, at this moment of the next change of a page, in the middle of the watcher's work.
    pub fn at(&self, moment: Moment, action: impl FnOnce() + Send + 'static) {
        *self.memory.action.lock() = Some((moment, Box::new(action)));
    }

    /// From now on no page changes, or they change again.
    pub fn refuse(&self, refuse: bool) {
        self.memory.refuses.store(refuse, Ordering::SeqCst);
    }

    /// Page and place in it of an access to doorbells that are memory now.
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

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        if let Some((page, place)) = Self::silent_place(bar, offset)
            && let Some(memory) = self.memory.pages.lock().get_mut(&page)
        {
            self.memory.silent.fetch_add(1, Ordering::SeqCst);
            return memory[place..place + data.len()].copy_from_slice(data);
        }
        self.function.bar_write(bar, offset, data);
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
