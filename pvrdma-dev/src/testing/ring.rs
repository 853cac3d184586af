//! Index arithmetic of the driver, with its peculiarities (`pvrdma_ring.h`; spec §6.1, §6.4).

use std::sync::Arc;

use thiserror::Error;

use super::GuestMemory;

/// Error: the ring is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the ring is full")]
pub struct RingFull;

/// A ring: its state words and its elements.
#[derive(Clone, Debug)]
pub struct DriverRing {
    memory: Arc<GuestMemory>,
    /// Address of `prod_tail`; `cons_head` follows it.
    words: u64,
    /// Address of each page of elements.
    pages: Vec<u64>,
    stride: u64,
    /// Number of elements as computed by the driver. For event rings it is not a power of two.
    nominal: u32,
}

impl DriverRing {
    pub(super) fn new(memory: &Arc<GuestMemory>, words: u64, pages: &[u64], stride: u64, nominal: u32) -> Self {
        Self { memory: Arc::clone(memory), words, pages: pages.to_vec(), stride, nominal }
    }

    /// Returns the number of elements as computed by the driver.
    pub const fn entries(&self) -> u32 {
        self.nominal
    }

    /// Bytes per element.
    pub const fn stride(&self) -> u64 {
        self.stride
    }

    /// Address of `prod_tail`.
    pub const fn prod_tail_address(&self) -> u64 {
        self.words
    }

    /// Address of `cons_head`.
    pub const fn cons_head_address(&self) -> u64 {
        self.words + 4
    }

    /// `prod_tail` now.
    pub fn prod_tail(&self) -> u32 {
        self.memory.load(self.words)
    }

    /// `cons_head` now.
    pub fn cons_head(&self) -> u32 {
        self.memory.load(self.words + 4)
    }

    /// Overwrites `prod_tail`.
    pub fn set_prod_tail(&self, value: u32) {
        self.memory.store(self.words, value);
    }

    /// Overwrites `cons_head`.
    pub fn set_cons_head(&self, value: u32) {
        self.memory.store(self.words + 4, value);
    }

    /// Address of the element in a slot.
    #[inline]
    pub fn slot(&self, slot: u32) -> u64 {
        let offset = u64::from(slot) * self.stride;
        self.pages[(offset / 4096) as usize] + offset % 4096
    }

    const fn mask(&self) -> u32 {
        (self.nominal << 1) - 1
    }

    /// Index after `index` (`pvrdma_idx_ring_inc`).
    pub const fn next(&self, index: u32) -> u32 {
        index.wrapping_add(1) & self.mask()
    }

    /// Slot of `index` (`pvrdma_idx`), `None` if it is not valid.
    pub const fn slot_of(&self, index: u32) -> Option<u32> {
        if index & !self.mask() == 0 { Some(index & (self.nominal - 1)) } else { None }
    }

    /// Slot to consume (`pvrdma_idx_ring_has_data`).
    ///
    /// # Panics
    /// An index is invalid. The driver never accesses such a ring again, so a device must never cause that.
    #[inline]
    pub fn has_data(&self) -> Option<u32> {
        let (tail, head) = (self.prod_tail(), self.cons_head());
        let slot = self.slot_of(head).filter(|_| self.slot_of(tail).is_some());
        let slot = slot.unwrap_or_else(|| panic!("invalid index: prod_tail {tail:#x}, cons_head {head:#x}"));
        (tail != head).then_some(slot)
    }

    /// Slot to fill (`pvrdma_idx_ring_has_space`). For an invalid index the kernel driver assumes that slot 0 is free.
    #[inline]
    pub fn has_space(&self) -> Option<u32> {
        let (tail, head) = (self.prod_tail(), self.cons_head());
        match (self.slot_of(tail), self.slot_of(head)) {
            (Some(slot), Some(_)) => (tail != head ^ self.nominal).then_some(slot),
            _ => panic!("invalid index: prod_tail {tail:#x}, cons_head {head:#x}"),
        }
    }

    /// Advances `prod_tail` by one.
    #[inline]
    pub fn produce(&self) {
        self.set_prod_tail(self.next(self.prod_tail()));
    }

    /// Advances `cons_head` by one.
    #[inline]
    pub fn consume(&self) {
        self.set_cons_head(self.next(self.cons_head()));
    }

    /// Fills as many slots as are free, up to `count`, with one load of the indices, and publishes them. Returns their
    /// number. Element `i` is the one at `i` modulo the number of `elements`.
    pub(super) fn fill(&self, elements: &[Vec<u8>], count: u32) -> u32 {
        let tail = self.prod_tail();
        let count = count.min(self.nominal - (tail.wrapping_sub(self.cons_head()) & self.mask()));
        for (i, bytes) in (0..count).zip(elements.iter().cycle()) {
            let slot = tail.wrapping_add(i) & (self.nominal - 1);
            self.memory.write(self.slot(slot), bytes);
        }
        if count != 0 {
            self.set_prod_tail(tail.wrapping_add(count) & self.mask());
        }
        count
    }

    /// Returns the number of elements between the indices.
    pub fn len(&self) -> u32 {
        self.prod_tail().wrapping_sub(self.cons_head()) & self.mask()
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Takes all elements, as the interrupt handlers do.
    pub(super) fn drain(&self) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while let Some(slot) = self.has_data() {
            assert!(out.len() < self.nominal as usize, "the ring has more elements than its size");
            out.push(self.memory.read_vec(self.slot(slot), self.stride as usize));
            self.consume();
        }
        out
    }
}
