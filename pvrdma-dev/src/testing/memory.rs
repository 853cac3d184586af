//! Memory of a test guest, with an allocator that can scatter pages.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PinPolicy};
use pvrdma_pages::PAGE_SIZE;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory, VolatileSlice};

/// First address of guest memory. Not 0, so that address 0 is never memory.
pub const MEMORY_BASE: u64 = 0x10_0000;

/// Placement of the pages of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// No page follows its predecessor.
    #[default]
    Scattered,
    /// The pages are contiguous.
    Contiguous,
}

/// Memory of one guest, as accessed by its processors and, through the [`DmaSpace`], by its devices.
pub struct GuestMemory {
    region: Arc<MmapRegion>,
    space: Arc<DmaSpace>,
    /// Number of ranges of equal size in which the space maps it.
    parts: usize,
    allocator: Mutex<Allocator>,
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestMemory").field("bytes", &self.region.size()).finish_non_exhaustive()
    }
}

struct Allocator {
    used: Vec<bool>,
    free: usize,
    hint: usize,
    random: u64,
}

impl Allocator {
    /// Does a xorshift step; the sequence is the same in every run.
    fn random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).unwrap()
    }

    fn take(&mut self, index: usize) -> u64 {
        assert!(!std::mem::replace(&mut self.used[index], true));
        self.free -= 1;
        MEMORY_BASE + index as u64 * PAGE_SIZE
    }

    /// Returns the first index of `count` contiguous free pages, searching from the end of the last search.
    fn contiguous(&mut self, count: usize) -> Option<usize> {
        let search = |from: usize| {
            let mut run = 0;
            (from..self.used.len()).find_map(|i| {
                run = if self.used[i] { 0 } else { run + 1 };
                (run == count).then(|| i + 1 - count)
            })
        };
        let first = search(self.hint).or_else(|| search(0))?;
        self.hint = first + count;
        Some(first)
    }
}

fn anonymous(bytes: usize) -> MmapRegion {
    MmapRegion::new(bytes.next_multiple_of(PAGE_SIZE as usize)).unwrap()
}

impl GuestMemory {
    /// Creates memory of `bytes` (rounded up to pages) that is not locked.
    pub fn new(bytes: usize) -> Arc<Self> {
        Self::with_policy(bytes, PinPolicy::Off)
    }

    /// Creates memory of `bytes`, mapped into its space under `policy`.
    pub fn with_policy(bytes: usize, policy: PinPolicy) -> Arc<Self> {
        Self::build(anonymous(bytes), 1, policy)
    }

    /// Creates memory of `bytes` in `parts` of equal size that can be unplugged, see [`Self::unplug`].
    pub fn in_parts(bytes: usize, parts: usize) -> Arc<Self> {
        Self::build(anonymous(bytes.next_multiple_of(parts * PAGE_SIZE as usize)), parts, PinPolicy::Off)
    }

    /// Creates memory from all of a file, which a device in another process also maps. Its length must be in whole
    /// pages.
    pub fn in_file(file: File) -> Arc<Self> {
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        Self::build(MmapRegion::from_file(FileOffset::new(file, 0), bytes).unwrap(), 1, PinPolicy::Off)
    }

    /// Creates memory of `bytes` that can be mapped a second time, like that of a VMM, as adapters of the host require.
    pub fn shared(bytes: usize) -> Arc<Self> {
        let bytes = bytes.next_multiple_of(PAGE_SIZE as usize);
        Self::with_region(pvrdma_verbs::testing::shared_memory(bytes), 1, PinPolicy::Off)
    }

    fn build(region: MmapRegion, parts: usize, policy: PinPolicy) -> Arc<Self> {
        Self::with_region(Arc::new(region), parts, policy)
    }

    /// Returns another space that maps all memory, without a lock, for a device that takes the place of another one.
    pub fn another_space(&self) -> Arc<DmaSpace> {
        let (space, len) = (DmaSpace::new(PinPolicy::Off), self.region.size() as u64);
        let backing = Some(Backing { mapping: Arc::clone(&self.region), offset: 0 });
        space.map(DmaRange { iova: MEMORY_BASE, len, writable: true, backing }).unwrap();
        space
    }

    fn with_region(region: Arc<MmapRegion>, parts: usize, policy: PinPolicy) -> Arc<Self> {
        let pages = region.size() / PAGE_SIZE as usize;
        let space = DmaSpace::new(policy);
        let allocator =
            Mutex::new(Allocator { used: vec![false; pages], free: pages, hint: 0, random: 0x9e37_79b9_7f4a_7c15 });
        let memory = Arc::new(Self { region, space, parts, allocator });
        (0..parts).for_each(|part| memory.plug(part));
        memory
    }

    /// Returns bus address and length in bytes of a part.
    pub fn part(&self, part: usize) -> (u64, u64) {
        assert!(part < self.parts);
        let len = self.region.size() / self.parts;
        (MEMORY_BASE + (part * len) as u64, len as u64)
    }

    /// Removes a part from the devices' map. The processors keep it.
    pub fn unplug(&self, part: usize) {
        let (iova, len) = self.part(part);
        self.space.unmap(iova, len).unwrap();
    }

    /// Adds a part to the devices' map again.
    pub fn plug(&self, part: usize) {
        let (iova, len) = self.part(part);
        let backing = Backing { mapping: Arc::clone(&self.region), offset: part * len as usize };
        self.space.map(DmaRange { iova, len, writable: true, backing: Some(backing) }).unwrap();
    }

    /// Removes one page from the devices' map permanently. The processors keep it.
    pub fn remove_page(&self, page: u64) {
        assert_eq!(self.parts, 1, "the memory is one range");
        self.space.unmap_all();
        for (iova, end) in [(MEMORY_BASE, page), (page + PAGE_SIZE, self.end())] {
            let offset = usize::try_from(iova - MEMORY_BASE).unwrap();
            let backing = Some(Backing { mapping: Arc::clone(&self.region), offset });
            if iova < end {
                self.space.map(DmaRange { iova, len: end - iova, writable: true, backing }).unwrap();
            }
        }
    }

    /// Returns the space for devices.
    pub const fn space(&self) -> &Arc<DmaSpace> {
        &self.space
    }

    /// Returns the bus address behind the last byte.
    pub fn end(&self) -> u64 {
        MEMORY_BASE + self.region.size() as u64
    }

    /// Returns the address of a page in this process.
    pub fn process_address(&self, page: u64) -> u64 {
        self.region.as_ptr().addr() as u64 + (page - MEMORY_BASE)
    }

    /// Returns the number of free pages.
    pub fn free_pages(&self) -> usize {
        self.allocator.lock().free
    }

    /// Allocates zeroed pages.
    pub fn alloc(&self, count: usize, placement: Placement) -> Vec<u64> {
        let pages: Vec<u64> = {
            let mut allocator = self.allocator.lock();
            assert!(allocator.free >= count, "guest memory is used up: {count} pages wanted, {} left", allocator.free);
            match placement {
                Placement::Contiguous => {
                    let first = allocator.contiguous(count).expect("guest memory is too fragmented");
                    (first..first + count).map(|i| allocator.take(i)).collect()
                }
                Placement::Scattered => {
                    let total = allocator.used.len();
                    let mut last = usize::MAX;
                    (0..count)
                        .map(|_| {
                            let start = allocator.random() % total;
                            let probe = |a: &Allocator, not: usize| {
                                (0..total).map(|i| (start + i) % total).find(|&i| !a.used[i] && i != not)
                            };
                            let after_last = last.wrapping_add(1);
                            let index =
                                probe(&allocator, after_last).or_else(|| probe(&allocator, usize::MAX)).unwrap();
                            last = index;
                            allocator.take(index)
                        })
                        .collect()
                }
            }
        };
        for &page in &pages {
            self.write(page, &[0; PAGE_SIZE as usize]);
        }
        pages
    }

    /// Allocates contiguous pages without touching them: memory that is not used costs nothing.
    pub fn reserve(&self, count: usize) -> Vec<u64> {
        let mut allocator = self.allocator.lock();
        let first = allocator.contiguous(count).expect("guest memory is too fragmented");
        (first..first + count).map(|i| allocator.take(i)).collect()
    }

    /// Allocates one zeroed page.
    pub fn alloc_page(&self) -> u64 {
        self.alloc(1, Placement::Scattered)[0]
    }

    /// Frees pages.
    pub fn free(&self, pages: &[u64]) {
        let mut allocator = self.allocator.lock();
        for &page in pages {
            let index = usize::try_from((page - MEMORY_BASE) / PAGE_SIZE).unwrap();
            assert!(std::mem::replace(&mut allocator.used[index], false), "page {page:#x} is freed twice");
            allocator.free += 1;
        }
    }

    /// Frees all pages, as when the guest restarts.
    pub fn free_all(&self) {
        let allocator = &mut *self.allocator.lock();
        allocator.used.fill(false);
        allocator.free = allocator.used.len();
    }

    /// Returns contiguous memory.
    #[inline]
    pub fn slice(&self, addr: u64, len: usize) -> VolatileSlice<'_> {
        let offset = usize::try_from(addr.wrapping_sub(MEMORY_BASE)).unwrap();
        self.region.get_slice(offset, len).expect("not guest memory")
    }

    /// Reads memory as a processor does.
    pub fn read(&self, addr: u64, data: &mut [u8]) {
        self.slice(addr, data.len()).copy_to(data);
    }

    /// Returns a copy of memory.
    pub fn read_vec(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.read(addr, &mut data);
        data
    }

    /// Writes memory as a processor does.
    pub fn write(&self, addr: u64, data: &[u8]) {
        self.slice(addr, data.len()).copy_from(data);
    }

    /// Loads a word with acquire semantics.
    #[inline]
    pub fn load(&self, addr: u64) -> u32 {
        u32::from_le(self.slice(addr, 4).load(0, Ordering::Acquire).unwrap())
    }

    /// Stores a word with release semantics.
    #[inline]
    pub fn store(&self, addr: u64, value: u32) {
        self.slice(addr, 4).store(value.to_le(), 0, Ordering::Release).unwrap();
    }

    /// Writes a page directory for `pages` as the kernel driver does (spec §5.1).
    pub fn directory(&self, pages: &[u64]) -> Directory {
        let tables = self.alloc(pages.len().div_ceil(512).max(1), Placement::Scattered);
        let dir = self.alloc_page();
        let put = |at: u64, entries: &[u64]| {
            let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_le_bytes()).collect();
            self.write(at, &bytes);
        };
        put(dir, &tables);
        for (table, entries) in tables.iter().zip(pages.chunks(512)) {
            put(*table, entries);
        }
        Directory { addr: dir, tables }
    }

    /// Frees the pages of a directory, but not those it names.
    pub fn free_directory(&self, directory: &Directory) {
        self.free(&directory.tables);
        self.free(&[directory.addr]);
    }
}

/// A page directory in guest memory.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Bus address of the directory page.
    pub addr: u64,
    /// Bus addresses of its tables.
    pub tables: Vec<u64>,
}
