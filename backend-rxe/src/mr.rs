//! Memory regions and the table of keys.
//!
//! A key is an index in bits 31:8, counted from a random number on, and a byte that begins at one and changes with each
//! use of the slot in bits 7:0, so a stale key does not name the region that came next. Everyone who uses a region
//! holds the table's read lock for the whole copy ([`crate::sg::MemoryGuard`]); removing one takes the write lock and
//! thereby waits for them. Fast-registered regions change while the table is held; each has a lock of its own that is
//! held during a copy.

use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::{MappedRecursiveRwLockReadGuard, RecursiveRwLock, RecursiveRwLockReadGuard};
use pvrdma_guest_memory::{PAGE_SIZE, PageList, PinGuard};
use pvrdma_verbs::{Access, FastRegister, MrShape, Random, Snapshot, VerbsError};
use serde::Serialize;

use crate::limits::MAX_MR;

/// Slots that stay free before the oldest of them is used again.
const KEEP_FREE: usize = 256;
/// Indices that a key can hold.
const INDICES: u32 = 1 << 24;

/// A range of addresses with rights and memory behind it.
#[derive(Debug)]
pub(crate) struct Region {
    start: u64,
    length: u64,
    access: Access,
    mapping: Mapping,
}

#[derive(Debug)]
enum Mapping {
    /// Addresses are bus addresses.
    Identity,
    /// The first address lies in the first page, at its own page offset.
    Pages(PageList),
}

impl Region {
    /// All bus addresses, for local use.
    pub(crate) fn dma(access: Access) -> Self {
        Self { start: 0, length: u64::MAX, access: access & Access::LOCAL_WRITE, mapping: Mapping::Identity }
    }

    /// `None` when the pages do not cover the range.
    pub(crate) fn paged(start: u64, length: u64, access: Access, pages: PageList) -> Option<Self> {
        start.checked_add(length)?;
        let needed = length.checked_add(start % PAGE_SIZE)?;
        (needed <= pages.bytes()).then_some(Self { start, length, access, mapping: Mapping::Pages(pages) })
    }

    #[inline]
    fn covers(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.start)
            .and_then(|into| self.length.checked_sub(into))
            .is_some_and(|available| len <= available)
    }

    /// Bus address behind `addr` and how many bytes from there on are contiguous. `addr` is inside the region.
    #[inline]
    pub(crate) fn locate(&self, addr: u64) -> Option<(u64, u64)> {
        match &self.mapping {
            Mapping::Identity => Some((addr, u64::MAX - addr)),
            Mapping::Pages(pages) => pages.locate(addr.checked_sub(self.start)? + self.start % PAGE_SIZE),
        }
    }
}

#[derive(Debug)]
enum Body {
    Fixed(Region, #[expect(dead_code, reason = "keeps the pages resident")] PinGuard),
    /// In a box: it is larger, and rarer.
    Fast(Box<Fast>),
}

/// A region that work requests fill.
#[derive(Debug)]
struct Fast {
    max_pages: u32,
    /// Cleared before the lock is taken for invalidation, so that new users cannot hold it off.
    valid: AtomicBool,
    region: RecursiveRwLock<Option<Filled>>,
}

/// What a fast registration has put into a region.
#[derive(Debug)]
struct Filled {
    region: Region,
    #[expect(dead_code, reason = "keeps the pages resident")]
    pin: PinGuard,
}

/// One registered region.
#[derive(Debug)]
pub(crate) struct Mr {
    key: AtomicU32,
    pd: u64,
    body: Body,
}

impl Mr {
    /// A region that is valid until it is destroyed.
    pub(crate) const fn fixed(pd: u64, region: Region, pin: PinGuard) -> Self {
        Self { key: AtomicU32::new(0), pd, body: Body::Fixed(region, pin) }
    }

    /// A region that work requests fill.
    pub(crate) fn fast(pd: u64, max_pages: u32) -> Self {
        let fast = Fast { max_pages, valid: AtomicBool::new(false), region: RecursiveRwLock::new(None) };
        Self { key: AtomicU32::new(0), pd, body: Body::Fast(Box::new(fast)) }
    }
}

/// A region at one moment. Its key is not shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct MrInspect {
    /// Number of its protection domain.
    pd: u64,
    /// What it covers now: `null` for a fast-registered region that no request has filled.
    range: Snapshot<Option<RangeInspect>>,
    /// Pages that a fast registration may bring, 0 if it takes none.
    max_pages: u32,
}

/// A range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct RangeInspect {
    /// The first address.
    start: u64,
    /// Bytes.
    length: u64,
    access: Access,
    /// Pages behind it. `null`: its addresses are bus addresses.
    pages: Option<u32>,
}

impl Region {
    fn inspect(&self) -> RangeInspect {
        let Self { start, length, access, ref mapping } = *self;
        let pages = match mapping {
            Mapping::Identity => None,
            Mapping::Pages(pages) => Some(pages.pages()),
        };
        RangeInspect { start, length, access, pages }
    }
}

/// A region lent for the length of a copy.
#[derive(Debug)]
pub(crate) enum RegionRef<'a> {
    Fixed(&'a Region),
    Fast(MappedRecursiveRwLockReadGuard<'a, Region>),
}

impl Deref for RegionRef<'_> {
    type Target = Region;

    #[inline]
    fn deref(&self) -> &Region {
        match self {
            Self::Fixed(region) => region,
            Self::Fast(region) => region,
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    key_byte: u8,
    mr: Option<Box<Mr>>,
}

/// The regions of one adapter by key.
#[derive(Debug)]
pub(crate) struct MrTable {
    /// The index of the first slot. It is not 0: a key of zero is what forgotten fields hold.
    base: u32,
    random: Random,
    slots: Vec<Slot>,
    /// Oldest first: a slot is used again as late as possible.
    free: VecDeque<u32>,
    count: u32,
}

impl MrTable {
    /// An empty table.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub(crate) fn new(mut random: Random) -> io::Result<Self> {
        let base = 1 + random.draw()? % (INDICES - 1 - MAX_MR);
        Ok(Self { base, random, slots: Vec::new(), free: VecDeque::new(), count: 0 })
    }

    /// Describes a region. Only the index of the key counts.
    pub(crate) fn inspect(&self, key: u32) -> Option<MrInspect> {
        let mr = self.get(key)?;
        let (range, max_pages) = match &mr.body {
            Body::Fixed(region, _) => (Snapshot::Taken(Some(region.inspect())), 0),
            Body::Fast(fast) => {
                let range = fast.region.try_read().map(|region| region.as_ref().map(|filled| filled.region.inspect()));
                (range.into(), fast.max_pages)
            }
        };
        Some(MrInspect { pd: mr.pd, range, max_pages })
    }

    /// What a region was made for. Only the index of the key counts.
    pub(crate) fn shape(&self, key: u32) -> Option<MrShape> {
        Some(match &self.get(key)?.body {
            Body::Fast(fast) => MrShape::fast_register(fast.max_pages),
            &Body::Fixed(Region { start, length, access, ref mapping }, _) => match mapping {
                Mapping::Identity => MrShape::Dma { access },
                Mapping::Pages(_) => MrShape::User { start, length, access },
            },
        })
    }

    /// Adds a region and gives its key.
    pub(crate) fn insert(&mut self, mr: Mr) -> Result<u32, VerbsError> {
        if self.count >= MAX_MR {
            return Err(VerbsError::Exhausted("memory region"));
        }
        let reuse = self.free.len() > KEEP_FREE || self.slots.len() >= MAX_MR as usize;
        let index = match reuse.then(|| self.free.pop_front()).flatten() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).map_err(|_| VerbsError::Exhausted("memory region"))?;
                let [key_byte, ..] = self.random.draw()?.to_le_bytes();
                self.slots.push(Slot { key_byte, mr: None });
                index
            }
        };
        let slot = self.slots.get_mut(index as usize).ok_or(VerbsError::Exhausted("memory region"))?;
        slot.key_byte = slot.key_byte.wrapping_add(1);
        let key = self.base.wrapping_add(index) << 8 | u32::from(slot.key_byte);
        mr.key.store(key, Ordering::Relaxed);
        slot.mr = Some(Box::new(mr));
        self.count += 1;
        Ok(key)
    }

    /// Takes a region out. Only the index counts: fast registration changes the byte.
    pub(crate) fn remove(&mut self, key: u32) -> Option<Box<Mr>> {
        let index = self.index(key);
        let slot = self.slots.get_mut(index as usize)?;
        let mr = slot.mr.take()?;
        // The byte that a fast registration chose last must not come next.
        slot.key_byte = mr.key.load(Ordering::Relaxed).to_le_bytes()[0];
        self.free.push_back(index);
        self.count -= 1;
        Some(mr)
    }

    #[inline]
    fn get(&self, key: u32) -> Option<&Mr> {
        self.slots.get(self.index(key) as usize)?.mr.as_deref()
    }

    /// The slot that a key names. A key of somebody else's may name none.
    #[inline]
    const fn index(&self, key: u32) -> u32 {
        (key >> 8).wrapping_sub(self.base)
    }

    /// Lends the region that `key` names if `pd` may do `need` with all of `addr..addr+len`.
    #[inline]
    pub(crate) fn lookup(&self, key: u32, pd: u64, addr: u64, len: u64, need: Access) -> Option<RegionRef<'_>> {
        let mr = self.get(key)?;
        let region = match &mr.body {
            Body::Fixed(region, _) => RegionRef::Fixed(region),
            Body::Fast(fast) => Self::lend(fast)?,
        };
        let allowed = mr.key.load(Ordering::Relaxed) == key
            && mr.pd == pd
            && region.access.contains(need)
            && region.covers(addr, len);
        allowed.then_some(region)
    }

    #[cold]
    fn lend(fast: &Fast) -> Option<RegionRef<'_>> {
        if !fast.valid.load(Ordering::Acquire) {
            return None;
        }
        // Reader-biased: one message may use the region twice, and must not wait for an invalidation in between.
        let filled = RecursiveRwLockReadGuard::try_map(fast.region.read(), Option::as_ref).ok()?;
        Some(RegionRef::Fast(MappedRecursiveRwLockReadGuard::map(filled, |filled| &filled.region)))
    }

    /// Fills a fast-register region that is not valid now, with pages that `pin` keeps resident. `false` when the
    /// request is not allowed or the pages cannot be kept.
    pub(crate) fn fast_register(
        &self,
        request: &mut FastRegister,
        pd: u64,
        pin: impl FnOnce(&PageList) -> Option<PinGuard>,
    ) -> bool {
        let Some(mr) = self.get(request.key).filter(|mr| mr.pd == pd) else { return false };
        let Body::Fast(fast) = &mr.body else { return false };
        let Fast { max_pages, valid, region } = &**fast;
        let Some(pages) = request.pages.take().filter(|pages| pages.pages() <= *max_pages) else { return false };
        let mut region = region.write();
        if region.is_some() {
            return false;
        }
        let Some(pin) = pin(&pages) else { return false };
        let Some(new) = Region::paged(request.iova, request.length, request.access, pages) else { return false };
        *region = Some(Filled { region: new, pin });
        mr.key.store(request.key, Ordering::Relaxed);
        valid.store(true, Ordering::Release);
        true
    }

    /// Makes a fast-registered region invalid. When this returns `true` nobody uses it any more.
    pub(crate) fn invalidate(&self, key: u32, pd: u64) -> bool {
        let Some(mr) = self.get(key).filter(|mr| mr.pd == pd) else { return false };
        let Body::Fast(fast) = &mr.body else { return false };
        if mr.key.load(Ordering::Relaxed) != key || !fast.valid.swap(false, Ordering::AcqRel) {
            return false;
        }
        fast.region.write().take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvrdma_guest_memory::PageListBuilder;

    fn pages(list: &[u64]) -> PageList {
        let mut builder = PageListBuilder::default();
        for &page in list {
            builder.push(page).unwrap();
        }
        builder.finish()
    }

    fn user(pd: u64, start: u64, length: u64, access: Access) -> Mr {
        Mr::fixed(pd, Region::paged(start, length, access, pages(&[0x5000, 0x9000])).unwrap(), PinGuard::none())
    }

    #[test]
    fn checks_of_a_key() {
        let mut table = MrTable::new(Random::Seed(0)).unwrap();
        let key = table.insert(user(3, 0x7_0100, 0x1800, Access::LOCAL_WRITE)).unwrap();
        let ok = |key, pd, addr, len, need| table.lookup(key, pd, addr, len, need).is_some();
        assert!(ok(key, 3, 0x7_0100, 0x1800, Access::LOCAL_WRITE));
        assert!(ok(key, 3, 0x7_18ff, 1, Access::empty()));
        assert!(!ok(key, 3, 0x7_0100, 0x1801, Access::empty()));
        assert!(!ok(key, 3, 0x7_00ff, 1, Access::empty()));
        assert!(!ok(key, 3, u64::MAX, 2, Access::empty()));
        assert!(!ok(key, 4, 0x7_0100, 1, Access::empty()));
        assert!(!ok(key, 3, 0x7_0100, 1, Access::REMOTE_WRITE));
        assert!(!ok(key ^ 1, 3, 0x7_0100, 1, Access::empty()));
        assert!(!ok(key + 256, 3, 0x7_0100, 1, Access::empty()));
        assert!(!ok(0, 3, 0x7_0100, 1, Access::empty()));
        let region = table.lookup(key, 3, 0x7_0100, 1, Access::empty()).unwrap();
        assert_eq!(region.locate(0x7_0100), Some((0x5100, 0xf00)));
        assert_eq!(region.locate(0x7_1000), Some((0x9000, 0x1000)));
    }

    /// Before, the first key of each device was 0x101.
    #[test]
    fn sec_c3_keys_begin_anywhere() {
        let keys = |random| {
            let mut table = MrTable::new(random).unwrap();
            let keys = [(); 3].map(|()| table.insert(user(0, 0x1000, 16, Access::empty())).unwrap());
            assert!(keys.iter().all(|key| table.lookup(*key, 0, 0x1000, 1, Access::empty()).is_some()));
            assert!(table.lookup(0, 0, 0x1000, 1, Access::empty()).is_none());
            assert!(table.lookup(!0, 0, 0x1000, 1, Access::empty()).is_none());
            keys
        };
        let seeds = (1..100).map(|seed| keys(Random::Seed(seed)));
        let distinct: std::collections::HashSet<_> = seeds.collect();
        assert_eq!(distinct.len(), 99);
        assert!(distinct.iter().any(|keys| keys[0] & 0xff != keys[1] & 0xff), "bytes are drawn for each");
        let [a, b] = [keys(Random::System), keys(Random::System)];
        assert_ne!(a, b);
    }

    #[test]
    fn stale_keys_stay_stale() {
        let mut table = MrTable::new(Random::Seed(0)).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..2000 {
            let key = table.insert(user(0, 0x1000, 16, Access::empty())).unwrap();
            assert!(seen.insert(key), "{key:#x} was used before");
            table.remove(key).unwrap();
            assert!(table.lookup(key, 0, 0x1000, 1, Access::empty()).is_none());
        }
        assert!(table.slots.len() < 300);
    }

    /// A key is 32 bits, so that its numbers come back; the domain's number does not, and both are asked for.
    #[test]
    fn a_key_that_came_back_is_not_the_right_of_its_first_owner() {
        let mut table = MrTable::new(Random::Seed(0)).unwrap();
        let (first, second) = (7, (1 << 32) + 7);
        let key = table.insert(user(first, 0x1000, 16, Access::LOCAL_WRITE)).unwrap();
        table.remove(key).unwrap();
        let again = loop {
            let again = table.insert(user(second, 0x1000, 16, Access::LOCAL_WRITE)).unwrap();
            if again == key {
                break again;
            }
            table.remove(again).unwrap();
        };
        assert!(table.lookup(again, second, 0x1000, 16, Access::LOCAL_WRITE).is_some());
        assert!(table.lookup(again, first, 0x1000, 16, Access::LOCAL_WRITE).is_none());
    }

    #[test]
    fn regions_that_their_pages_do_not_cover_are_refused() {
        assert!(Region::paged(0x100, 0x1f00, Access::empty(), pages(&[0x1000, 0x2000])).is_some());
        assert!(Region::paged(0x100, 0x1f01, Access::empty(), pages(&[0x1000, 0x2000])).is_none());
        assert!(Region::paged(u64::MAX, 2, Access::empty(), pages(&[0x1000, 0x2000])).is_none());
    }

    fn resident(_: &PageList) -> Option<PinGuard> {
        Some(PinGuard::none())
    }

    #[test]
    fn fast_registration() {
        let mut table = MrTable::new(Random::Seed(0)).unwrap();
        let key = table.insert(Mr::fast(1, 2)).unwrap();
        assert!(table.lookup(key, 1, 0, 0, Access::empty()).is_none());
        let request = FastRegister {
            key: key & !0xff | 0x77,
            iova: 0x4_0010,
            length: 0x1000,
            access: Access::REMOTE_READ,
            pages: Some(pages(&[0x3000, 0x8000])),
        };
        assert!(!table.fast_register(&mut request.clone(), 2, resident), "another PD");
        assert!(!table.fast_register(&mut FastRegister { pages: None, ..request.clone() }, 1, resident));
        assert!(!table.fast_register(&mut FastRegister { length: 0x2000, ..request.clone() }, 1, resident));
        let three = Some(pages(&[0x3000, 0x8000, 0x9000]));
        assert!(!table.fast_register(&mut FastRegister { pages: three, ..request.clone() }, 1, resident));
        assert!(!table.fast_register(&mut request.clone(), 1, |_| None), "its pages cannot be kept");
        assert!(table.fast_register(&mut request.clone(), 1, resident));
        assert!(!table.fast_register(&mut request.clone(), 1, resident), "it is valid already");
        assert!(table.lookup(key, 1, 0x4_0010, 1, Access::empty()).is_none(), "the old key byte");
        let region = table.lookup(request.key, 1, 0x4_0010, 0x1000, Access::REMOTE_READ).unwrap();
        assert_eq!(region.locate(0x4_0fff), Some((0x3fff, 1)));
        drop(region);
        let shown = serde_json::to_value(table.inspect(key)).unwrap();
        assert_eq!(shown["range"]["start"], 0x4_0010, "{shown}");
        assert_eq!((&shown["range"]["pages"], &shown["max_pages"]), (&2.into(), &2.into()), "{shown}");
        let Body::Fast(fast) = &table.get(key).unwrap().body else { unreachable!() };
        let changing = fast.region.write();
        assert_eq!(table.inspect(key).unwrap().range, Snapshot::Busy);
        drop(changing);
        assert!(!table.invalidate(key, 1));
        assert!(!table.invalidate(request.key, 2));
        assert!(table.invalidate(request.key, 1));
        assert!(!table.invalidate(request.key, 1));
        assert!(table.lookup(request.key, 1, 0x4_0010, 1, Access::empty()).is_none());
        assert!(table.remove(key).is_some());
    }
}
