//! A table of regions in two copies. A change waits for the threads that copy data; those threads never wait for a
//! change.
//!
//! A thread that moves data holds one copy of the table for a whole batch, up to a megabyte. Behind a single
//! reader-writer lock, each registration would block every thread that begins a batch until the last running batch has
//! ended, including the threads of other guests that deliver to this device. With [two copies](TwoCopies), readers use
//! the active copy, and a change is applied to the other copy first.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLockReadGuard};
use pvrdma_base::Random;
use pvrdma_handover::TwoCopies;
use pvrdma_saved_state::rxe as saved;
use pvrdma_verbs::VerbsError;

use super::table::{Body, Mr, MrTable};
use crate::limits::MAX_MR;

/// Number of slots that stay free before the oldest of them is reused.
const KEEP_FREE: usize = 256;
/// Number of indices that a key can hold.
const INDICES: u32 = 1 << 24;
/// Values of the first index. It is not 0, see [`MrTable`].
const BASES: RangeInclusive<u32> = 1..=INDICES - 1 - MAX_MR;

/// Guard of a table: no region in it is removed.
pub(crate) type MrTableGuard<'a> = RwLockReadGuard<'a, MrTable>;

/// The regions of one adapter.
#[derive(Debug)]
pub(crate) struct MrTables {
    copies: TwoCopies<MrTable>,
    /// Held during a change.
    keys: Mutex<Keys>,
}

/// Keys that are in use, and the state for new ones.
#[derive(Debug)]
struct Keys {
    base: u32,
    random: Random,
    /// The last key byte of each slot.
    bytes: Vec<u8>,
    /// Free slots, the oldest first: a slot is reused as late as possible.
    free: VecDeque<u32>,
    /// Slots whose regions are still to be restored.
    restoring: BTreeSet<u32>,
    count: u32,
}

impl Keys {
    /// Returns a key that is not in use.
    fn draw(&mut self) -> Result<u32, VerbsError> {
        if self.count >= MAX_MR {
            return Err(VerbsError::Exhausted("memory region"));
        }
        // Restoring is over. A state that was refused half-way leaves slots without a region.
        self.free.extend(std::mem::take(&mut self.restoring));
        let reuse = self.free.len() > KEEP_FREE || self.bytes.len() >= MAX_MR as usize;
        let slot = match reuse.then(|| self.free.pop_front()).flatten() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.bytes.len()).map_err(|_| VerbsError::Exhausted("memory region"))?;
                let [byte, ..] = self.random.draw()?.to_le_bytes();
                self.bytes.push(byte);
                slot
            }
        };
        let byte = self.bytes.get_mut(slot as usize).ok_or(VerbsError::Exhausted("memory region"))?;
        *byte = byte.wrapping_add(1);
        self.count += 1;
        Ok(self.base.wrapping_add(slot) << 8 | u32::from(*byte))
    }
}

impl MrTables {
    /// Creates tables without regions.
    ///
    /// # Errors
    /// The kernel cannot provide random numbers.
    pub(crate) fn new(mut random: Random) -> io::Result<Self> {
        let base = BASES.start() + random.draw()? % (BASES.end() - BASES.start() + 1);
        let table = MrTable { base, slots: Vec::new() };
        Ok(Self {
            copies: TwoCopies::new(table.clone(), table),
            keys: Mutex::new(Keys {
                base,
                random,
                bytes: Vec::new(),
                free: VecDeque::new(),
                restoring: BTreeSet::new(),
                count: 0,
            }),
        })
    }

    /// Locks the active table. Waits only for a change that began between the check for the active copy and the lock.
    #[inline]
    pub(crate) fn read(&self) -> MrTableGuard<'_> {
        self.copies.read()
    }

    /// Like [`Self::read`], but returns `None` instead of waiting.
    pub(crate) fn try_read(&self) -> Option<MrTableGuard<'_>> {
        self.copies.active().try_read()
    }

    /// Changes a slot. After this returns, no thread holds a table without the change. The caller holds the lock of the
    /// keys.
    fn replace(&self, slot: usize, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        self.copies.change(|table| table.replace(slot, mr.clone()))
    }

    /// Adds a region and returns its key.
    ///
    /// # Errors
    /// There are too many regions, or no random numbers are available.
    pub(crate) fn insert(&self, mr: Mr) -> Result<u32, VerbsError> {
        let keys = &mut *self.keys.lock();
        let key = keys.draw()?;
        mr.key.store(key, Ordering::Relaxed);
        let slot = (key >> 8).wrapping_sub(keys.base);
        drop(self.replace(slot as usize, Some(Arc::new(mr))));
        Ok(key)
    }

    /// Saves the keys.
    pub(crate) fn save(&self) -> saved::AdapterTables {
        let Keys { base, random: _, bytes, free, restoring, count: _ } = &*self.keys.lock();
        let free = free.iter().chain(restoring).copied().collect();
        saved::AdapterTables { base: *base, keys: bytes.clone(), free, ..saved::AdapterTables::default() }
    }

    /// Restores the keys of tables without regions. The regions follow.
    ///
    /// # Errors
    /// The state is invalid, or there are regions.
    pub(crate) fn restore(&self, state: saved::AdapterTables) -> Result<(), VerbsError> {
        // The GIDs are not part of these tables.
        let saved::AdapterTables { base, keys: bytes, free, taken_gids: _, unasked_gids: _ } = state;
        if !BASES.contains(&base) {
            return Err(VerbsError::Invalid("first index of keys"));
        }
        let slots = u32::try_from(bytes.len()).ok().filter(|&slots| slots <= MAX_MR);
        let restoring = slots_in_use(slots.ok_or(VerbsError::Exhausted("memory region"))?, &free)?;
        let keys = &mut *self.keys.lock();
        if keys.count > 0 {
            return Err(VerbsError::InUse("the table of memory regions"));
        }
        (keys.base, keys.bytes, keys.free, keys.restoring) = (base, bytes, free.into(), restoring);
        self.copies.change(|table| *table = MrTable { base, slots: Vec::new() });
        Ok(())
    }

    /// Adds a restored region in the slot of its key.
    ///
    /// # Errors
    /// The slot is free or has a region, or the key has another byte than the slot.
    pub(crate) fn insert_restored(&self, mr: Mr) -> Result<u32, VerbsError> {
        let keys = &mut *self.keys.lock();
        let key = mr.key.load(Ordering::Relaxed);
        let slot = (key >> 8).wrapping_sub(keys.base);
        let byte = keys.bytes.get(slot as usize).copied();
        // A fast registration chooses the byte.
        let fits = matches!(mr.body, Body::Fast(_)) || byte == Some(key.to_le_bytes()[0]);
        if !fits || !keys.restoring.remove(&slot) {
            return Err(VerbsError::Invalid("key of a memory region"));
        }
        keys.count += 1;
        drop(self.replace(slot as usize, Some(Arc::new(mr))));
        Ok(key)
    }

    /// Removes a region and waits until it is no longer in use. Only the index of the key is used: fast registration
    /// changes the byte.
    pub(crate) fn remove(&self, key: u32) -> Option<Arc<Mr>> {
        let keys = &mut *self.keys.lock();
        let slot = (key >> 8).wrapping_sub(keys.base);
        let byte = keys.bytes.get_mut(slot as usize)?;
        let mr = self.replace(slot as usize, None)?;
        // The byte of the last fast registration must not be that of the next region.
        *byte = mr.key.load(Ordering::Relaxed).to_le_bytes()[0];
        keys.free.push_back(slot);
        keys.count -= 1;
        Some(mr)
    }

    /// Returns the number of slots, in use and free.
    #[cfg(test)]
    pub(crate) fn slots(&self) -> usize {
        self.keys.lock().bytes.len()
    }

    /// Blocks the active copy, as a change that waits for it does.
    #[cfg(test)]
    pub(crate) fn block(&self) -> parking_lot::RwLockWriteGuard<'_, MrTable> {
        self.copies.active().write()
    }
}

/// Checks the list of free slots. Returns the others, whose regions are still to be restored.
fn slots_in_use(slots: u32, free: &[u32]) -> Result<BTreeSet<u32>, VerbsError> {
    let mut used: BTreeSet<u32> = (0..slots).collect();
    // A slot that is listed twice is no longer in the set the second time, so the list is refused.
    if free.iter().all(|slot| used.remove(slot)) { Ok(used) } else { Err(VerbsError::Invalid("list of free slots")) }
}
