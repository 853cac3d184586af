//! A slot: decodes accesses to up to eight functions.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use pvrdma_handover::Pending;
use pvrdma_pci_function::{Bar, Doorbell, MsixPlace, PciFunction};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bells::Bells;
use crate::interrupts::InterruptLine;
use crate::msix::{self, MsixVectors};
use crate::slot_window::{PageMapper, SlotWindow};
use crate::windows::{self, Window};

/// Functions in a slot.
const FUNCTIONS: usize = 8;
/// Slots on a bus.
pub(crate) const SLOTS: u8 = 32;
const HEADER_TYPE: usize = 0x0e;
const HEADER_MULTIFUNCTION: u8 = 1 << 7;

/// Reason why a slot or bus cannot be built.
#[derive(Debug, Error)]
pub enum SlotError {
    /// A bus has 32 slots.
    #[error("there is no slot {0} on a bus")]
    Slot(u8),
    /// A slot has eight functions.
    #[error("there is no function {0} in a slot")]
    Function(usize),
    /// Two devices at one place.
    #[error("slot {0} has been taken")]
    Taken(u8),
    /// Guests look for the other functions only if there is a function 0.
    #[error("slot {0} has no function 0")]
    NoFunction(u8),
    /// The address space for BARs is used up.
    #[error("no room for a BAR of {0:#x} bytes")]
    NoRoom(u64),
    /// There are no file descriptors left.
    #[error("no descriptor: {0}")]
    Descriptors(#[from] io::Error),
}

/// A function with its place in the slot.
struct Placed {
    function: Arc<dyn PciFunction>,
    bars: [Option<Bar>; 6],
    msix: Option<MsixPlace>,
    vectors: Arc<MsixVectors>,
    windows: RwLock<Vec<Window>>,
    /// Its doorbell pages, if they may be memory.
    doorbells: OnceLock<Arc<SlotWindow>>,
}

/// Up to eight functions at one device number of the bus.
pub struct Slot {
    number: u8,
    functions: [Option<Placed>; FUNCTIONS],
    bells: Mutex<Bells>,
    /// A subscriber does the deferred work.
    left: AtomicBool,
    /// Functions with deferred work, one bit for each.
    pending: Pending,
    work: EventFd,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A slot under construction.
#[derive(Default)]
pub struct SlotBuilder {
    number: u8,
    functions: [Option<Arc<dyn PciFunction>>; FUNCTIONS],
    vectors: [Arc<MsixVectors>; FUNCTIONS],
    /// Number of a function that does not fit.
    surplus: Option<usize>,
}

impl fmt::Debug for SlotBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotBuilder").field("number", &self.number).finish_non_exhaustive()
    }
}

impl SlotBuilder {
    /// Returns the interrupt sink for a function. It has no effect for a function that is added at another number
    /// later.
    pub fn interrupts(&self, function: usize) -> Arc<MsixVectors> {
        self.vectors.get(function).map(Arc::clone).unwrap_or_default()
    }

    /// Adds a function at its number.
    pub fn with(mut self, function: usize, device: Arc<dyn PciFunction>) -> Self {
        match self.functions.get_mut(function) {
            Some(place) => *place = Some(device),
            None => self.surplus = Some(function),
        }
        self
    }

    /// Builds the slot.
    ///
    /// # Errors
    /// A number is out of range, function 0 is missing, or there are no file descriptors left.
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

    /// Passes the function's message control register to the vectors.
    fn update_vectors(&self) {
        let Some(msix) = self.msix else { return };
        let mut control = [0; 2];
        self.function.config_read(usize::from(msix.capability) + 2, &mut control);
        self.vectors.set_control(u16::from_le_bytes(control));
    }

    /// Returns BAR and offset of an access, if a BAR of this function decodes all of it.
    fn find(&self, address: u64, len: usize) -> Option<(usize, u64)> {
        let windows = self.windows.read();
        windows.iter().find_map(|window| Some((window.bar, window.offset(address, len)?)))
    }

    /// Returns the part of MSI-X that an access to a BAR hits, and the offset in that part.
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
    /// Starts an empty slot with this device number on the bus, 0 to 31.
    pub fn builder(number: u8) -> SlotBuilder {
        SlotBuilder { number, ..SlotBuilder::default() }
    }

    /// Device number on the bus.
    pub const fn number(&self) -> u8 {
        self.number
    }

    fn function(&self, function: usize) -> Option<&Placed> {
        self.functions.get(function)?.as_ref()
    }

    fn placed(&self) -> impl Iterator<Item = (usize, &Placed)> {
        self.functions.iter().enumerate().filter_map(|(index, placed)| Some((index, placed.as_ref()?)))
    }

    /// Returns the vectors of every function, with its number.
    pub(crate) fn all_vectors(&self) -> impl Iterator<Item = (u8, &MsixVectors)> {
        self.placed().filter_map(|(index, placed)| Some((u8::try_from(index).ok()?, &*placed.vectors)))
    }

    /// Follows configuration space after it was restored.
    pub(crate) fn follow_config(&self) {
        for (function, placed) in self.placed() {
            self.move_windows(function, placed);
            placed.update_vectors();
        }
    }

    /// Gives every vector of every function the line that `line` makes for it.
    ///
    /// # Errors
    /// The error of `line`.
    pub fn connect<L: InterruptLine + 'static>(&self, mut line: impl FnMut() -> io::Result<L>) -> io::Result<()> {
        self.placed().try_for_each(|(_, placed)| placed.vectors.connect(&mut line))
    }

    /// Returns the doorbells of all functions, with the function of each.
    pub(crate) fn doorbell_list(&self) -> impl Iterator<Item = (usize, Doorbell)> {
        let list = |placed: &Placed| placed.function.doorbells();
        self.placed().flat_map(move |(index, placed)| list(placed).into_iter().map(move |doorbell| (index, doorbell)))
    }

    /// Catches these doorbells from now on, in place of others.
    pub(crate) fn set_bells(&self, bells: Bells) {
        *self.bells.lock() = bells;
        self.placed().for_each(|(index, placed)| self.move_windows(index, placed));
    }

    /// Leaves the deferred work to a subscriber from now on.
    pub(crate) fn leave_work(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Lets doorbell pages of a function be memory: pages of `mapper`, which the returned window maps and unmaps,
    /// wherever the guest has placed their BAR. `None` if the function has no such pages, or if they already have a
    /// window.
    pub fn doorbell_window(&self, function: usize, mapper: Arc<dyn PageMapper>) -> Option<Arc<SlotWindow>> {
        let placed = self.function(function)?;
        let window = Arc::new(SlotWindow::new(mapper, placed.function.doorbell_window()?));
        placed.doorbells.set(Arc::clone(&window)).ok()?;
        self.move_windows(function, placed);
        Some(window)
    }

    /// Ends the subscription: from now on, the writing thread does the work. When this returns, no doorbell is
    /// signalled to the subscriber any more.
    pub(crate) fn keep_work(&self) {
        self.left.store(false, Ordering::Release);
        *self.bells.lock() = Bells::default();
        // After the store to `left`: a writer that adds the first bit after this call sees the store.
        self.run_left();
    }

    /// Event that is signalled when there is deferred work.
    pub(crate) const fn work_event(&self) -> &EventFd {
        &self.work
    }

    /// Does the deferred work.
    pub(crate) fn run_left(&self) {
        // The event is cleared before the bits are taken: work that is added later signals the event again.
        let _ = self.work.read();
        let pending = self.pending.take();
        for (_, placed) in self.placed().filter(|(index, _)| pending >> index & 1 == 1) {
            placed.function.run_deferred();
        }
    }

    /// Handles a doorbell that was caught.
    pub(crate) fn ring(&self, function: usize, doorbell: &Doorbell) {
        if let Some(placed) = self.function(function) {
            let Doorbell { bar, offset, value } = *doorbell;
            placed.function.bar_write(bar, offset, &value.unwrap_or(0).to_le_bytes());
            placed.function.run_deferred();
        }
    }

    /// Reads configuration space. Absent functions read as all ones.
    pub fn config_read(&self, function: usize, offset: usize, data: &mut [u8]) {
        let Some(placed) = self.function(function) else { return data.fill(0xff) };
        placed.function.config_read(offset, data);
        let others = self.functions.iter().skip(1).any(Option::is_some);
        let header = HEADER_TYPE.checked_sub(offset).and_then(|index| data.get_mut(index));
        if let Some(byte) = header.filter(|_| function == 0 && others) {
            *byte |= HEADER_MULTIFUNCTION;
        }
    }

    /// Writes configuration space, and updates the decoding of the BARs that the write moves.
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

    /// Decodes the BARs of a function at the addresses that its registers hold.
    fn move_windows(&self, function: usize, placed: &Placed) {
        // The lock is taken before the registers are read. If two processors write at the same time, the later holder
        // reads the final values, so that decoding matches the registers in the end.
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

    /// Writes the registers of all BARs. `allocate` returns an address for the given number of bytes, aligned to that
    /// number.
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

    /// Returns function, BAR and offset of an access to memory space.
    fn find(&self, address: u64, len: usize) -> Option<(usize, &Placed, usize, u64)> {
        self.placed().find_map(|(function, placed)| {
            let (bar, offset) = placed.find(address, len)?;
            Some((function, placed, bar, offset))
        })
    }

    /// Reads from the BAR that decodes the address. Returns `false` if none does.
    pub(crate) fn memory_read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((_, placed, bar, offset)) = self.find(address, data.len()) else { return false };
        match placed.part(bar, offset) {
            Some((Part::Table, offset)) => placed.vectors.table_read(offset, data),
            Some((Part::Pending, offset)) => placed.vectors.pending_read(offset, data),
            None => placed.function.bar_read(bar, offset, data),
        }
        true
    }

    /// Writes to the BAR that decodes the address. Returns `false` if none does.
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

    /// Leaves the work behind a write to the subscriber, or does it here if there is none.
    fn leave(&self, function: usize, placed: &Placed) {
        if !self.left.load(Ordering::Acquire) {
            return placed.function.run_deferred();
        }
        if self.pending.add(1 << function) {
            // Fails only if the counter of the eventfd overflows, in which case the event is readable anyway.
            let _ = self.work.write(1);
            // The subscriber may have gone since the first check of `left`. Both this thread and the leaving subscriber
            // change `pending` in one atomic step that acquires and releases. If this thread's step is first, the
            // subscriber takes the bit and sees the write that precedes it. If the subscriber's step is first, this
            // second check sees its store to `left`. Bits that other threads add to this one are taken together with
            // it. A subscriber that has registered since then finds the event signalled.
            if !self.left.load(Ordering::Acquire) {
                self.run_left();
            }
        }
    }

    /// Resets every function to its power-on state.
    pub(crate) fn reset(&self) {
        for (function, placed) in self.placed() {
            placed.function.reset();
            placed.vectors.reset();
            self.move_windows(function, placed);
        }
    }
}
