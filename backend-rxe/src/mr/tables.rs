//! A table of regions in two copies, so that a change waits for whoever copies data, and nobody waits for a change.
//!
//! Whoever moves data holds one copy of the table for a whole batch, up to a megabyte. With one table under a
//! reader-writer lock each registration would stop everybody who begins a batch until the last one has ended: all queue
//! pairs of the device, and those of other guests that deliver to it. With [two copies](TwoCopies) readers take the one
//! that is active, and a change is made where nobody reads first.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLockReadGuard};
use pvrdma_handover::TwoCopies;
use pvrdma_verbs::{Random, VerbsError};

use super::{Mr, MrTable};
use crate::limits::MAX_MR;

/// Slots that stay free before the oldest of them is used again.
const KEEP_FREE: usize = 256;
/// Indices that a key can hold.
const INDICES: u32 = 1 << 24;

/// A table that is held: no region that it has goes away.
pub(crate) type MrTableGuard<'a> = RwLockReadGuard<'a, MrTable>;

/// The regions of one adapter.
#[derive(Debug)]
pub(crate) struct MrTables {
    copies: TwoCopies<MrTable>,
    /// Held during a change.
    keys: Mutex<Keys>,
}

/// Which keys are used, and which come next.
#[derive(Debug)]
struct Keys {
    base: u32,
    random: Random,
    /// The last key byte of each slot.
    bytes: Vec<u8>,
    /// Oldest first: a slot is used again as late as possible.
    free: VecDeque<u32>,
    count: u32,
}

impl Keys {
    /// A key that names no region.
    fn draw(&mut self) -> Result<u32, VerbsError> {
        if self.count >= MAX_MR {
            return Err(VerbsError::Exhausted("memory region"));
        }
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
    /// No regions.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub(crate) fn new(mut random: Random) -> io::Result<Self> {
        let base = 1 + random.draw()? % (INDICES - 1 - MAX_MR);
        let table = MrTable { base, slots: Vec::new() };
        Ok(Self {
            copies: TwoCopies::new(table.clone(), table),
            keys: Mutex::new(Keys { base, random, bytes: Vec::new(), free: VecDeque::new(), count: 0 }),
        })
    }

    /// Holds the table. It waits for a change only if that began since the look at which copy is active.
    #[inline]
    pub(crate) fn read(&self) -> MrTableGuard<'_> {
        self.copies.read()
    }

    /// As [`Self::read`], unless that would wait.
    pub(crate) fn try_read(&self) -> Option<MrTableGuard<'_>> {
        self.copies.active().try_read()
    }

    /// Changes a slot. When this returns nobody holds a table without the change. The keys are locked.
    fn replace(&self, slot: usize, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        self.copies.change(|table| table.replace(slot, mr.clone()))
    }

    /// Adds a region and gives its key.
    ///
    /// # Errors
    /// There are too many, or no random numbers.
    pub(crate) fn insert(&self, mr: Mr) -> Result<u32, VerbsError> {
        let keys = &mut *self.keys.lock();
        let key = keys.draw()?;
        mr.key.store(key, Ordering::Relaxed);
        let slot = (key >> 8).wrapping_sub(keys.base);
        drop(self.replace(slot as usize, Some(Arc::new(mr))));
        Ok(key)
    }

    /// Takes a region out and waits until nobody uses it any more. Only the index of the key counts: fast registration
    /// changes the byte.
    pub(crate) fn remove(&self, key: u32) -> Option<Arc<Mr>> {
        let keys = &mut *self.keys.lock();
        let slot = (key >> 8).wrapping_sub(keys.base);
        let byte = keys.bytes.get_mut(slot as usize)?;
        let mr = self.replace(slot as usize, None)?;
        // The byte that a fast registration chose last must not come next.
        *byte = mr.key.load(Ordering::Relaxed).to_le_bytes()[0];
        keys.free.push_back(slot);
        keys.count -= 1;
        Some(mr)
    }

    /// Slots in use and free.
    #[cfg(test)]
    pub(crate) fn slots(&self) -> usize {
        self.keys.lock().bytes.len()
    }

    /// As if a change waited for the copy that is active.
    #[cfg(test)]
    pub(crate) fn block(&self) -> parking_lot::RwLockWriteGuard<'_, MrTable> {
        self.copies.active().write()
    }
}
