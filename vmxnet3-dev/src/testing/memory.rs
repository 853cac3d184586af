//! Memory of a test guest.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PinPolicy};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};

/// Start of guest memory. Not 0, so that address 0 is never memory.
pub const MEMORY_BASE: u64 = 0x10_0000;

/// Memory of one guest, as seen by its processors and, through the [`DmaSpace`], by its device.
pub struct Memory {
    region: Arc<MmapRegion>,
    space: Arc<DmaSpace>,
    next: AtomicU64,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.region.size()).finish_non_exhaustive()
    }
}

impl Memory {
    /// Creates zeroed memory of `bytes` bytes, a multiple of 4,096.
    pub fn new(bytes: usize) -> Arc<Self> {
        Self::with_region(Arc::new(MmapRegion::new(bytes).unwrap()), MEMORY_BASE)
    }

    fn with_region(region: Arc<MmapRegion>, next: u64) -> Arc<Self> {
        let space = DmaSpace::new(PinPolicy::Off);
        let memory = Self { region, space, next: AtomicU64::new(next) };
        memory.map_all();
        Arc::new(memory)
    }

    /// Returns the same memory as another device sees it, through a space of its own.
    pub fn of_another_device(&self) -> Arc<Self> {
        Self::with_region(Arc::clone(&self.region), self.mark())
    }

    /// Returns the same memory for another device, which cannot access the 4,096 bytes at this address until
    /// [`Self::map_all`] is called.
    pub fn without_page(&self, address: u64) -> Arc<Self> {
        let memory = self.of_another_device();
        memory.space.unmap_all();
        memory.map(MEMORY_BASE, address);
        memory.map(address + 4096, self.end());
        memory
    }

    /// Makes all of the memory accessible for the device.
    pub fn map_all(&self) {
        self.space.unmap_all();
        self.map(MEMORY_BASE, self.end());
    }

    fn map(&self, start: u64, end: u64) {
        let offset = usize::try_from(start - MEMORY_BASE).unwrap();
        let backing = Some(Backing { mapping: Arc::clone(&self.region), offset });
        if start < end {
            self.space.map(DmaRange { iova: start, len: end - start, writable: true, backing }).unwrap();
        }
    }

    /// Returns a copy of the memory. Bytes that were not allocated are zero.
    pub fn copied(&self) -> Arc<Self> {
        let copy = Self::with_region(Arc::new(MmapRegion::new(self.region.size()).unwrap()), self.mark());
        copy.write(MEMORY_BASE, &self.read(MEMORY_BASE, usize::try_from(self.mark() - MEMORY_BASE).unwrap()));
        copy
    }

    /// Returns the space through which a device accesses the memory.
    pub const fn space(&self) -> &Arc<DmaSpace> {
        &self.space
    }

    /// Returns the bus address after the last byte.
    pub fn end(&self) -> u64 {
        MEMORY_BASE + self.region.size() as u64
    }

    /// Allocates unused bytes, aligned to 4,096. There is no call to free them individually.
    pub fn alloc(&self, len: usize) -> u64 {
        let address = self.next.fetch_add((len as u64).next_multiple_of(4096), Ordering::Relaxed);
        assert!(address + len as u64 <= self.end(), "guest memory is used up");
        address
    }

    /// Returns the address of the next allocation, for [`Self::rewind`].
    pub fn mark(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Frees everything that was allocated since the mark.
    pub fn rewind(&self, mark: u64) {
        self.next.store(mark, Ordering::Relaxed);
    }

    fn slice(&self, address: u64, len: usize) -> VolatileSlice<'_> {
        let offset = usize::try_from(address.wrapping_sub(MEMORY_BASE)).unwrap();
        self.region.get_slice(offset, len).expect("not guest memory")
    }

    /// Returns a copy of bytes.
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.slice(address, len).copy_to(&mut data[..]);
        data
    }

    /// Writes bytes as a processor does.
    pub fn write(&self, address: u64, data: &[u8]) {
        self.slice(address, data.len()).copy_from(data);
    }

    /// Fills a range with one byte.
    pub fn fill(&self, address: u64, len: usize, byte: u8) {
        self.write(address, &vec![byte; len]);
    }

    /// Loads a 32-bit word with acquire semantics.
    pub fn load(&self, address: u64) -> u32 {
        u32::from_le(self.slice(address, 4).load(0, Ordering::Acquire).unwrap())
    }

    /// Stores a 32-bit word with release semantics.
    pub fn store(&self, address: u64, value: u32) {
        self.slice(address, 4).store(value.to_le(), 0, Ordering::Release).unwrap();
    }

    /// Stores an 8-byte word.
    pub fn store_u64(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }
}
