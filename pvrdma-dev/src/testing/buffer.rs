//! Memory of a process or of the guest's kernel.

use std::sync::Arc;

use pvrdma_verbs_types::Sge;

use super::{GuestMemory, Mr};

/// Buffer that is contiguous for its owner, but not necessarily in guest memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    memory: Arc<GuestMemory>,
    pages: Vec<u64>,
    /// Virtual address of the first byte.
    va: u64,
    len: usize,
}

impl Buffer {
    pub(super) const fn new(memory: Arc<GuestMemory>, pages: Vec<u64>, va: u64, len: usize) -> Self {
        Self { memory, pages, va, len }
    }

    /// Returns the virtual address of the first byte, the base of user memory regions.
    pub const fn va(&self) -> u64 {
        self.va
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns its pages.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }

    /// Returns the bus address of a byte, for use with the kernel's DMA key.
    pub fn bus(&self, offset: usize) -> u64 {
        let at = (self.va % 4096) as usize + offset;
        self.pages[at / 4096] + (at % 4096) as u64
    }

    /// Returns a scatter/gather entry for a registered piece.
    pub const fn sge(&self, mr: &Mr, offset: usize, len: usize) -> Sge {
        Sge { addr: self.va + offset as u64, length: len as u32, lkey: mr.lkey }
    }

    /// Returns a scatter/gather entry that names the bus address. The piece must not cross a page boundary.
    pub fn dma_sge(&self, lkey: u32, offset: usize, len: usize) -> Sge {
        let sge = Sge { addr: self.bus(offset), length: len as u32, lkey };
        assert!(sge.addr % 4096 + u64::from(sge.length) <= 4096);
        sge
    }

    /// Copies data in.
    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len);
        let mut done = 0;
        while done < data.len() {
            let addr = self.bus(offset + done);
            let count = (4096 - (addr % 4096) as usize).min(data.len() - done);
            self.memory.write(addr, &data[done..done + count]);
            done += count;
        }
    }

    /// Copies data out.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut data = vec![0; len];
        let mut done = 0;
        while done < len {
            let addr = self.bus(offset + done);
            let count = (4096 - (addr % 4096) as usize).min(len - done);
            self.memory.read(addr, &mut data[done..done + count]);
            done += count;
        }
        data
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) {
        self.write(0, &vec![value; self.len]);
    }

    /// Fills it with bytes that depend on offset and seed.
    pub fn fill_pattern(&self, seed: u64) {
        self.write(0, &Self::pattern(seed, self.len));
    }

    /// Returns the bytes of [`Self::fill_pattern`].
    pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            out.extend(state.to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// Frees the pages.
    pub fn free(self) {
        self.memory.free(&self.pages);
    }
}
