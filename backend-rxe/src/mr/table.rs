//! Memory regions and the table of keys.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::PinGuard;
use pvrdma_pages::{PAGE_SIZE, PageList};
use pvrdma_verbs::MrShape;
use pvrdma_verbs_types::{Access, FastRegister};
use serde::Serialize;

/// A range of addresses with access rights and the memory that it maps to.
#[derive(Debug)]
pub(crate) struct Region {
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) access: Access,
    pub(super) mapping: Mapping,
}

#[derive(Debug)]
pub(super) enum Mapping {
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

    /// Creates a region of pages. Returns `None` when the pages do not cover the range.
    pub(crate) fn paged(start: u64, length: u64, access: Access, pages: PageList) -> Option<Self> {
        start.checked_add(length)?;
        let needed = length.checked_add(start % PAGE_SIZE)?;
        (needed <= pages.bytes()).then_some(Self { start, length, access, mapping: Mapping::Pages(pages) })
    }

    /// Returns `true` if the region covers `addr..addr+len` and grants the right `need`.
    #[inline]
    fn grants(&self, addr: u64, len: u64, need: Access) -> bool {
        let available = addr.checked_sub(self.start).and_then(|into| self.length.checked_sub(into));
        self.access.contains(need) && available.is_some_and(|available| len <= available)
    }

    /// Returns the bus address of `addr`, and the number of contiguous bytes from there on. `addr` is inside the
    /// region.
    // Always inline: a copy calls this for every piece.
    #[inline(always)]
    pub(crate) fn locate(&self, addr: u64) -> Option<(u64, u64)> {
        match &self.mapping {
            Mapping::Identity => Some((addr, u64::MAX - addr)),
            Mapping::Pages(pages) => pages.locate(addr.checked_sub(self.start)? + self.start % PAGE_SIZE),
        }
    }
}

#[derive(Debug)]
pub(super) enum Body {
    /// The guard keeps the pages resident. A restored region gets it when its memory is mapped.
    Fixed(Region, OnceLock<PinGuard>),
    /// Boxed, because it is larger and less frequent.
    Fast(Box<Fast>),
}

/// A region that work requests fill.
#[derive(Debug)]
pub(super) struct Fast {
    pub(super) max_pages: u32,
    /// The valid key, or [`INVALID`]. Invalidation clears it before it takes the lock: from then on no thread starts to
    /// use the region, so new users cannot delay the invalidation.
    pub(super) valid: AtomicU32,
    pub(super) region: RwLock<Option<Filled>>,
}

/// Value of `valid` when there is no valid key. No key has this value, because the first index is not 0.
pub(super) const INVALID: u32 = 0;

/// Content of a region after a fast registration.
#[derive(Debug)]
pub(super) struct Filled {
    pub(super) region: Region,
    /// Keeps the pages resident.
    pub(super) pin: PinGuard,
}

/// A registered region.
#[derive(Debug)]
pub(crate) struct Mr {
    pub(super) key: AtomicU32,
    pub(super) pd: u64,
    pub(super) body: Body,
}

impl Mr {
    /// Creates a region that is valid until it is destroyed.
    pub(crate) fn fixed(pd: u64, region: Region, pin: PinGuard) -> Self {
        Self { key: AtomicU32::new(0), pd, body: Body::Fixed(region, OnceLock::from(pin)) }
    }

    /// Creates a region that work requests fill.
    pub(crate) fn fast(pd: u64, max_pages: u32) -> Self {
        let fast = Fast { max_pages, valid: AtomicU32::new(INVALID), region: RwLock::new(None) };
        Self { key: AtomicU32::new(0), pd, body: Body::Fast(Box::new(fast)) }
    }

    /// Returns `true` if this is the region of `key`, and of that protection domain.
    #[inline]
    fn is(&self, key: u32, pd: u64) -> bool {
        self.key.load(Ordering::Relaxed) == key && self.pd == pd
    }
}

/// State of a region at one moment. Does not contain the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct MrInspect {
    /// Number of the protection domain.
    pd: u64,
    /// The current range: `null` for a fast-registered region that no request has filled.
    pub(super) range: Snapshot<Option<RangeInspect>>,
    /// Maximum number of pages of a fast registration, 0 if the region accepts none.
    max_pages: u32,
}

/// A range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct RangeInspect {
    /// The first address.
    start: u64,
    /// Length in bytes.
    length: u64,
    access: Access,
    /// Number of pages. `null`: the addresses are bus addresses.
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

/// Reference to a region for the duration of a copy.
#[derive(Debug)]
pub(crate) enum RegionRef<'a> {
    Fixed(&'a Region),
    Fast(MappedRwLockReadGuard<'a, Region>),
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

/// The regions of one adapter by key: one of the two copies in [`MrTables`].
#[derive(Clone, Debug)]
pub(crate) struct MrTable {
    /// Index of the first slot. Never 0: a key field that a program forgot to set is often zero, and must not refer to
    /// a region.
    pub(super) base: u32,
    pub(super) slots: Vec<Option<Arc<Mr>>>,
}

impl MrTable {
    /// Returns the state of a region for inspection. Only the index of the key is used.
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

    /// Returns the shape that a region was created for. Only the index of the key is used.
    pub(crate) fn shape(&self, key: u32) -> Option<MrShape> {
        Some(match &self.get(key)?.body {
            Body::Fast(fast) => MrShape::fast_register(fast.max_pages),
            &Body::Fixed(Region { start, length, access, ref mapping }, _) => match mapping {
                Mapping::Identity => MrShape::Dma { access },
                Mapping::Pages(_) => MrShape::User { start, length, access },
            },
        })
    }

    /// Puts a region into a slot, or removes it. Returns the previous region.
    pub(super) fn replace(&mut self, slot: usize, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, None);
        }
        self.slots.get_mut(slot).and_then(|slot| std::mem::replace(slot, mr))
    }

    #[inline]
    pub(super) fn get(&self, key: u32) -> Option<&Mr> {
        self.slots.get(self.index(key) as usize)?.as_deref()
    }

    /// Returns the slot of a key. The slot does not exist for keys that this table has not issued.
    #[inline]
    const fn index(&self, key: u32) -> u32 {
        (key >> 8).wrapping_sub(self.base)
    }

    /// Returns the region of `key` if `pd` has the right `need` for all of `addr..addr+len`.
    #[inline]
    pub(crate) fn lookup(&self, key: u32, pd: u64, addr: u64, len: u64, need: Access) -> Option<RegionRef<'_>> {
        let mr = self.get(key)?;
        let region = match &mr.body {
            Body::Fixed(region, _) => RegionRef::Fixed(region),
            Body::Fast(fast) => Self::lend(fast)?,
        };
        (mr.is(key, pd) && region.grants(addr, len, need)).then_some(region)
    }

    /// Same as [`Self::lookup`], for regions that need no lock. Returns `None` for a region that work requests fill.
    #[inline]
    pub(crate) fn lookup_fixed(&self, key: u32, pd: u64, addr: u64, len: u64, need: Access) -> Option<&Region> {
        let mr = self.get(key)?;
        let Body::Fixed(region, _) = &mr.body else { return None };
        (mr.is(key, pd) && region.grants(addr, len, need)).then_some(region)
    }

    #[cold]
    fn lend(fast: &Fast) -> Option<RegionRef<'_>> {
        if fast.valid.load(Ordering::Acquire) == INVALID {
            return None;
        }
        // The read lock is recursive: one message may use the region twice, and its second lock must not wait behind a
        // waiting invalidation.
        let filled = RwLockReadGuard::try_map(fast.region.read_recursive(), Option::as_ref).ok()?;
        Some(RegionRef::Fast(MappedRwLockReadGuard::map(filled, |filled| &filled.region)))
    }

    /// Fills a fast-register region that is not valid now with pages that `pin` pins. Returns `false` when the request
    /// is not allowed or the pages cannot be pinned.
    pub(crate) fn fast_register(
        &self,
        request: &mut FastRegister,
        pd: u64,
        pin: impl FnOnce(&PageList) -> Option<PinGuard>,
    ) -> bool {
        let Some(mr) = self.get(request.key).filter(|mr| mr.pd == pd) else { return false };
        let Body::Fast(fast) = &mr.body else { return false };
        let Fast { max_pages, region, .. } = &**fast;
        let Some(pages) = request.pages.take().filter(|pages| pages.pages() <= *max_pages) else { return false };
        let mut region = region.write();
        if region.is_some() {
            return false;
        }
        let Some(pin) = pin(&pages) else { return false };
        let Some(new) = Region::paged(request.iova, request.length, request.access, pages) else { return false };
        *region = Some(Filled { region: new, pin });
        mr.key.store(request.key, Ordering::Relaxed);
        fast.valid.store(request.key, Ordering::Release);
        true
    }

    /// Invalidates a fast-registered region. When this returns `true`, the region is no longer in use.
    pub(crate) fn invalidate(&self, key: u32, pd: u64) -> bool {
        let Some(mr) = self.get(key).filter(|mr| mr.pd == pd) else { return false };
        let Body::Fast(fast) = &mr.body else { return false };
        // This is one atomic step, because a registration with another key may happen between a check and a change.
        if fast.valid.compare_exchange(key, INVALID, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        fast.region.write().take().is_some()
    }
}
