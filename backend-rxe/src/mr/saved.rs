//! Saving and restoring regions and their keys.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;
use pvrdma_guest_memory::PinGuard;
use pvrdma_pages::PageList;
use pvrdma_roce::saved::{restore_pages, save_pages};
use pvrdma_saved_state::rxe as saved;
use pvrdma_verbs::{MrRequest, VerbsError};
use pvrdma_verbs_types::Access;

use super::table::{Body, Fast, Filled, INVALID, Mapping, Mr, MrTable, Region};

impl Mr {
    /// Saves the region, as the request that creates such a region and its remaining state. No thread uses or changes
    /// it.
    pub(crate) fn save(&self) -> (MrRequest, saved::Region) {
        let Self { key, pd: _, body } = self;
        let key = key.load(Ordering::Relaxed);
        match body {
            Body::Fixed(Region { start, length, access, mapping }, _pin) => {
                let (start, length, access) = (*start, *length, *access);
                let request = match mapping {
                    Mapping::Identity => MrRequest::Dma { access },
                    Mapping::Pages(pages) => MrRequest::User { start, length, pages: pages.clone(), access },
                };
                (request, saved::Region { key, filled: None })
            }
            Body::Fast(fast) => {
                let Fast { max_pages, valid, region } = &**fast;
                let valid = valid.load(Ordering::Acquire) != INVALID;
                let region = region.read();
                let filled = region.as_ref().filter(|_| valid).and_then(Filled::save);
                (MrRequest::FastRegister { max_pages: *max_pages }, saved::Region { key, filled })
            }
        }
    }

    /// Restores a region that was created by `request`, which the caller has checked. Its memory is not pinned yet.
    ///
    /// # Errors
    /// The state is not one that such a region can be in.
    pub(crate) fn restore(pd: u64, request: MrRequest, state: saved::Region) -> Result<Self, VerbsError> {
        let saved::Region { key, filled } = state;
        let body = match request {
            MrRequest::FastRegister { max_pages } => {
                let filled = filled.map(|filled| Filled::restore(filled, max_pages)).transpose()?;
                let valid = AtomicU32::new(if filled.is_some() { key } else { INVALID });
                Body::Fast(Box::new(Fast { max_pages, valid, region: RwLock::new(filled) }))
            }
            MrRequest::User { .. } | MrRequest::Dma { .. } if filled.is_some() => {
                return Err(VerbsError::Invalid("content of a memory region"));
            }
            MrRequest::User { start, length, pages, access } => {
                let region = Region::paged(start, length, access, pages).ok_or(VerbsError::Invalid("memory region"))?;
                Body::Fixed(region, OnceLock::new())
            }
            MrRequest::Dma { access } => Body::Fixed(Region::dma(access), OnceLock::new()),
        };
        Ok(Self { key: AtomicU32::new(key), pd, body })
    }

    /// Pins the pages of a restored region.
    ///
    /// # Errors
    /// `pin` fails.
    fn pin(&self, pin: impl FnOnce(&PageList) -> Result<PinGuard, VerbsError>) -> Result<(), VerbsError> {
        match &self.body {
            Body::Fixed(Region { mapping: Mapping::Pages(pages), .. }, guard) => {
                let _ = guard.set(pin(pages)?);
            }
            Body::Fixed(..) => {}
            Body::Fast(fast) => {
                if let Some(Filled { region: Region { mapping: Mapping::Pages(pages), .. }, pin: guard }) =
                    &mut *fast.region.write()
                {
                    *guard = pin(pages)?;
                }
            }
        }
        Ok(())
    }
}

impl Filled {
    fn save(&self) -> Option<saved::Filled> {
        let Self { region: Region { start, length, access, mapping }, pin: _ } = self;
        let Mapping::Pages(pages) = mapping else { return None };
        let pages = Some(save_pages(pages));
        Some(saved::Filled { start: *start, length: *length, access: access.bits(), pages })
    }

    fn restore(state: saved::Filled, max_pages: u32) -> Result<Self, VerbsError> {
        let saved::Filled { start, length, access, pages } = state;
        let access = Access::from_bits(access).ok_or(VerbsError::Invalid("access rights"))?;
        let pages = pages.as_ref().and_then(|pages| restore_pages(pages).ok());
        let pages = pages.filter(|pages| pages.pages() <= max_pages).ok_or(VerbsError::Invalid("list of pages"))?;
        let region = Region::paged(start, length, access, pages).ok_or(VerbsError::Invalid("memory region"))?;
        Ok(Self { region, pin: PinGuard::none() })
    }
}

impl MrTable {
    /// Saves the region of a key. Only the index of the key is used.
    pub(crate) fn save(&self, key: u32) -> Option<(MrRequest, saved::Region)> {
        self.get(key).map(Mr::save)
    }

    /// Pins the pages of a restored region.
    ///
    /// # Errors
    /// `pin` fails, or the region was removed.
    pub(crate) fn pin(
        &self,
        key: u32,
        pin: impl FnOnce(&PageList) -> Result<PinGuard, VerbsError>,
    ) -> Result<(), VerbsError> {
        self.get(key).ok_or(VerbsError::Gone)?.pin(pin)
    }
}
