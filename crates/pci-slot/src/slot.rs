//! A slot: up to eight functions, decoded.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use pvrdma_handover::Pending;
use pvrdma_pci_function::{Bar, Doorbell, MsixPlace, PciFunction};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::deferred::{Bells, DeferredWork, DoorbellCatcher};
use crate::interrupts::InterruptLine;
use crate::msix::{self, MsixVectors};
use crate::slot_window::{PageMapper, SlotWindow};
use crate::windows::{self, Window};

/// Functions of a slot.
const FUNCTIONS: usize = 8;
/// Slots of a bus.
pub(crate) const SLOTS: u8 = 32;
const HEADER_TYPE: usize = 0x0e;
const HEADER_MULTIFUNCTION: u8 = 1 << 7;

/// Why there can be no such slot or bus.
#[derive(Debug, Error)]
pub enum SlotError {
    /// There are 32.
    #[error("there is no slot {0} on a bus")]
    Slot(u8),
    /// There are eight.
    #[error("there is no function {0} in a slot")]
    Function(usize),
    /// Two in one place.
    #[error("slot {0} has been taken")]
    Taken(u8),
    /// Guests look for others only if there is a function 0.
    #[error("slot {0} has no function 0")]
    NoFunction(u8),
    /// The space for BARs is used up.
    #[error("no room for a BAR of {0:#x} bytes")]
    NoRoom(u64),
    /// There are no descriptors left.
    #[error("no descriptor: {0}")]
    Descriptors(#[from] io::Error),
}

/// A function in its place.
struct Placed {
    function: Arc<dyn PciFunction>,
    bars: [Option<Bar>; 6],
    msix: Option<MsixPlace>,
    vectors: Arc<MsixVectors>,
    windows: RwLock<Vec<Window>>,
    /// Its doorbell pages, if they may be memory.
    doorbells: OnceLock<Arc<SlotWindow>>,
}

/// Up to eight functions at one place on the bus.
pub struct Slot {
    number: u8,
    functions: [Option<Placed>; FUNCTIONS],
    bells: Mutex<Bells>,
    /// A subscriber does the deferred work.
    left: AtomicBool,
    /// Functions with such work, a bit for each.
    pending: Pending,
    work: EventFd,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A slot that is being filled.
#[derive(Default)]
pub struct SlotBuilder {
    number: u8,
    functions: [Option<Arc<dyn PciFunction>>; FUNCTIONS],
    vectors: [Arc<MsixVectors>; FUNCTIONS],
    /// A function that does not fit.
    surplus: Option<usize>,
}

impl fmt::Debug for SlotBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotBuilder").field("number", &self.number).finish_non_exhaustive()
    }
}

impl SlotBuilder {
    /// Where a function is to send its interrupts. A function that is put elsewhere later has none.
    pub fn interrupts(&self, function: usize) -> Arc<MsixVectors> {
        self.vectors.get(function).map(Arc::clone).unwrap_or_default()
    }

    /// Puts a function into its place.
    pub fn with(mut self, function: usize, device: Arc<dyn PciFunction>) -> Self {
        match self.functions.get_mut(function) {
            Some(place) => *place = Some(device),
            None => self.surplus = Some(function),
        }
        self
    }

    /// The slot.
    ///
    /// # Errors
    /// A number is out of range, function 0 is missing, or there are no descriptors left.
    pub fn build(self) -> Result<Arc<Slot>, SlotError> {
        let Self { number, functions, vectors, surplus } = self;
        if number >= SLOTS {
            return Err(SlotError::Slot(number));
        }
        if let Some(function) = surplus {
            return Err(SlotError::Function(function));
        }
        if functions.first().is_none_or(Option::is_none) {
            return Err(SlotError::NoFunction(number));
        }
        let mut placed = [const { None }; FUNCTIONS];
        for (place, (function, vectors)) in placed.iter_mut().zip(functions.into_iter().zip(vectors)) {
            *place = function.map(|function| Placed::new(function, vectors));
        }
        Ok(Arc::new(Slot {
            number,
            functions: placed,
            bells: Mutex::default(),
            left: AtomicBool::new(false),
            pending: Pending::new(),
            work: EventFd::new(EFD_NONBLOCK)?,
        }))
    }
}

impl Placed {
    fn new(function: Arc<dyn PciFunction>, vectors: Arc<MsixVectors>) -> Self {
        let (bars, msix) = (function.bars(), function.msix());
        vectors.set_count(msix.map_or(0, |msix| msix.vectors));
        Self { function, bars, msix, vectors, windows: RwLock::default(), doorbells: OnceLock::new() }
    }

    /// Tells the vectors what the function's message control register says.
    fn update_vectors(&self) {
        let Some(msix) = self.msix else { return };
        let mut control = [0; 2];
        self.function.config_read(usize::from(msix.capability) + 2, &mut control);
        self.vectors.set_control(u16::from_le_bytes(control));
    }

    /// The BAR and the offset in it of an access, if one of ours answers to all of it.
    fn find(&self, address: u64, len: usize) -> Option<(usize, u64)> {
        let windows = self.windows.read();
        windows.iter().find_map(|window| Some((window.bar, window.offset(address, len)?)))
    }

    /// Which part of MSI-X an access to a BAR means, and the offset in that.
    fn part(&self, bar: usize, offset: u64) -> Option<(Part, u64)> {
        let msix = self.msix.filter(|msix| usize::from(msix.bar) == bar)?;
        let into = |start: u32, size: u64| offset.checked_sub(start.into()).filter(|offset| *offset < size);
        let table = into(msix.table, msix::table_size(msix.vectors)).map(|offset| (Part::Table, offset));
        table.or_else(|| Some((Part::Pending, into(msix.pending, msix::pending_size(msix.vectors))?)))
    }
}

enum Part {
    Table,
    Pending,
}

impl Slot {
    /// An empty one at this place of the bus, 0 to 31.
    pub fn builder(number: u8) -> SlotBuilder {
        SlotBuilder { number, ..SlotBuilder::default() }
    }

    /// Its place on the bus.
    pub const fn number(&self) -> u8 {
        self.number
    }

    fn function(&self, function: usize) -> Option<&Placed> {
        self.functions.get(function)?.as_ref()
    }

    fn placed(&self) -> impl Iterator<Item = (usize, &Placed)> {
        self.functions.iter().enumerate().filter_map(|(index, placed)| Some((index, placed.as_ref()?)))
    }

    /// Gives every vector of every function the line that `line` makes for it.
    ///
    /// # Errors
    /// That of `line`.
    pub fn connect<L: InterruptLine + 'static>(&self, mut line: impl FnMut() -> io::Result<L>) -> io::Result<()> {
        self.placed().try_for_each(|(_, placed)| placed.vectors.connect(&mut line))
    }

    /// Leaves the deferred work to a subscriber, for as long as that exists, and the functions' doorbells as well if
    /// somebody catches them. There is one subscriber at a time.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn deferred(self: &Arc<Self>, catcher: Option<Arc<dyn DoorbellCatcher>>) -> io::Result<DeferredWork> {
        let work = self.subscriber(catcher)?;
        self.left.store(true, Ordering::Release);
        Ok(work)
    }

    /// Leaves only the doorbells that are caught to a subscriber. The work behind any other write is done by whoever
    /// writes: the guest's processor waits for that, and no other thread has to wake up for it. Right for functions
    /// whose deferred work is bounded and does not block.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn doorbells(self: &Arc<Self>, catcher: Arc<dyn DoorbellCatcher>) -> io::Result<DeferredWork> {
        self.subscriber(Some(catcher))
    }

    fn subscriber(self: &Arc<Self>, catcher: Option<Arc<dyn DoorbellCatcher>>) -> io::Result<DeferredWork> {
        let doorbells = self
            .placed()
            .flat_map(|(index, placed)| placed.function.doorbells().into_iter().map(move |doorbell| (index, doorbell)));
        let new = catcher.map(|catcher| Bells::new(catcher, doorbells)).transpose()?.unwrap_or_default();
        let work = DeferredWork::new(Arc::clone(self), &new)?;
        *self.bells.lock() = new;
        self.placed().for_each(|(index, placed)| self.move_windows(index, placed));
        Ok(work)
    }

    /// Lets doorbell pages of a function be memory: pages of `mapper`, which the returned window maps and takes away,
    /// wherever the guest has put their BAR. `None` for a function that has no such pages, or whose pages somebody has
    /// already.
    pub fn doorbell_window(&self, function: usize, mapper: Arc<dyn PageMapper>) -> Option<Arc<SlotWindow>> {
        let placed = self.function(function)?;
        let window = Arc::new(SlotWindow::new(mapper, placed.function.doorbell_window()?));
        placed.doorbells.set(Arc::clone(&window)).ok()?;
        self.move_windows(function, placed);
        Some(window)
    }

    /// The subscriber has gone: whoever writes does the work. Nobody signals doorbells any more when this returns.
    pub(crate) fn keep_work(&self) {
        self.left.store(false, Ordering::Release);
        *self.bells.lock() = Bells::default();
        // Behind the store: whoever adds the first bit after this sees it.
        self.run_left();
    }

    /// Signalled when there is deferred work.
    pub(crate) const fn work_event(&self) -> &EventFd {
        &self.work
    }

    /// Does the work that is left.
    pub(crate) fn run_left(&self) {
        // First the event, then the bits: what is left from here on signals again.
        let _ = self.work.read();
        let pending = self.pending.take();
        for (_, placed) in self.placed().filter(|(index, _)| pending >> index & 1 == 1) {
            placed.function.run_deferred();
        }
    }

    /// A doorbell that was caught.
    pub(crate) fn ring(&self, function: usize, doorbell: &Doorbell) {
        if let Some(placed) = self.function(function) {
            let Doorbell { bar, offset, value } = *doorbell;
            placed.function.bar_write(bar, offset, &value.unwrap_or(0).to_le_bytes());
            placed.function.run_deferred();
        }
    }

    /// Reads configuration space. Where no function is, all bits are one.
    pub fn config_read(&self, function: usize, offset: usize, data: &mut [u8]) {
        let Some(placed) = self.function(function) else { return data.fill(0xff) };
        placed.function.config_read(offset, data);
        let others = self.functions.iter().skip(1).any(Option::is_some);
        let header = HEADER_TYPE.checked_sub(offset).and_then(|index| data.get_mut(index));
        if let Some(byte) = header.filter(|_| function == 0 && others) {
            *byte |= HEADER_MULTIFUNCTION;
        }
    }

    /// Writes configuration space, and moves the BARs that this moves.
    pub fn config_write(&self, function: usize, offset: usize, data: &[u8]) {
        let Some(placed) = self.function(function) else { return };
        placed.function.config_write(offset, data);
        if windows::may_move(offset, data.len()) {
            self.move_windows(function, placed);
        }
        let control = placed.msix.map(|msix| usize::from(msix.capability) + 2);
        if control.is_some_and(|control| offset < control + 2 && offset.saturating_add(data.len()) > control) {
            placed.update_vectors();
        }
    }

    /// Lets the BARs of a function answer where its registers say.
    fn move_windows(&self, function: usize, placed: &Placed) {
        // Taken first: two processors that write at a time leave what the registers say in the end.
        let mut bells = self.bells.lock();
        let now = windows::windows(&*placed.function, &placed.bars);
        placed.windows.write().clone_from(&now);
        if let Some(pages) = placed.doorbells.get() {
            pages.follow(now.iter().find(|window| window.bar == pages.bar()).map(|window| window.base));
        }
        bells.follow(function, |bar, offset| {
            let window = now.iter().find(|window| window.bar == bar && offset < window.size)?;
            window.base.checked_add(offset)
        });
    }

    /// Writes the registers of all BARs. `allocate` gives the address of so many bytes, at a multiple of that.
    pub(crate) fn place_bars(&self, allocate: &mut dyn FnMut(u64) -> Option<u64>) -> Result<(), SlotError> {
        for (function, placed) in self.placed() {
            for (index, bar) in placed.bars.iter().enumerate() {
                let Some(bar) = bar else { continue };
                let address = allocate(bar.size).ok_or(SlotError::NoRoom(bar.size))?;
                let bytes = address.to_le_bytes();
                let (low, rest) = bytes.split_at(4);
                if !bar.is_64bit && rest != [0; 4] {
                    return Err(SlotError::NoRoom(bar.size));
                }
                let register = windows::register(index);
                self.config_write(function, register, if bar.is_64bit { &bytes } else { low });
            }
        }
        Ok(())
    }

    /// The function, BAR and offset of an access to memory space.
    fn find(&self, address: u64, len: usize) -> Option<(usize, &Placed, usize, u64)> {
        self.placed().find_map(|(function, placed)| {
            let (bar, offset) = placed.find(address, len)?;
            Some((function, placed, bar, offset))
        })
    }

    /// Reads from whatever BAR answers. Returns `false` if none does.
    pub(crate) fn memory_read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((_, placed, bar, offset)) = self.find(address, data.len()) else { return false };
        match placed.part(bar, offset) {
            Some((Part::Table, offset)) => placed.vectors.table_read(offset, data),
            Some((Part::Pending, offset)) => placed.vectors.pending_read(offset, data),
            None => placed.function.bar_read(bar, offset, data),
        }
        true
    }

    /// Writes to whatever BAR answers. Returns `false` if none does.
    pub(crate) fn memory_write(&self, address: u64, data: &[u8]) -> bool {
        let Some((function, placed, bar, offset)) = self.find(address, data.len()) else { return false };
        match placed.part(bar, offset) {
            Some((Part::Table, offset)) => placed.vectors.table_write(offset, data),
            Some((Part::Pending, _)) => {}
            None => {
                placed.function.bar_write(bar, offset, data);
                self.leave(function, placed);
            }
        }
        true
    }

    /// Leaves the work behind a write to the subscriber, if there is one.
    fn leave(&self, function: usize, placed: &Placed) {
        if !self.left.load(Ordering::Acquire) {
            return placed.function.run_deferred();
        }
        if self.pending.add(1 << function) {
            // Fails only when it has been signalled more often than anybody can count.
            let _ = self.work.write(1);
            // The subscriber may have gone since the look above. Both it and we change `pending` in one step that
            // acquires and releases. Either ours is first: who goes takes the bit, behind what was written. Or its is
            // first, and this look sees what it stored before. A bit that somebody adds to ours goes the way of ours.
            // A subscriber that has come since then finds the event.
            if !self.left.load(Ordering::Acquire) {
                self.run_left();
            }
        }
    }

    /// Every function is as after power-on.
    pub(crate) fn reset(&self) {
        for (function, placed) in self.placed() {
            placed.function.reset();
            placed.vectors.reset();
            self.move_windows(function, placed);
        }
    }
}
