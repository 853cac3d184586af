//! Guards that keep registered memory resident.

use std::sync::Arc;

use pvrdma_pages::PageList;

use super::{PinError, PinPolicy, PinRefusal, bytes_of};
use crate::part::Part;
use crate::{Charge, DmaSpace, DmaView, Kept, MemoryBudget};

/// Memory that the bookkeeping of a part takes, in bytes: its entry, and two ends of segments in the tree of its
/// mapping, whose nodes may be half empty.
const PART_BYTES: u64 = size_of::<Part>() as u64 + 2 * 64;
/// Memory in bytes that the bookkeeping of a pinned registration takes, without its parts.
const GUARD_BYTES: u64 = size_of::<Pinned>() as u64 + 48;

/// Keeps the pages of one registration resident.
#[derive(Debug)]
pub struct PinGuard(Option<Box<Pinned>>);

#[derive(Debug)]
struct Pinned {
    space: Arc<DmaSpace>,
    parts: Box<[Part]>,
    /// Charge for the bookkeeping.
    _charge: Charge,
}

impl PinGuard {
    /// Returns a guard that holds nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Pins parts of the space.
    fn new(space: Arc<DmaSpace>, parts: Vec<Part>, budget: &Arc<MemoryBudget>) -> Result<Self, PinError> {
        let bytes = GUARD_BYTES.saturating_add(PART_BYTES.saturating_mul(parts.len() as u64));
        let charge = budget.charge(Kept::Pins, bytes);
        let charge = space.with_pins(|pins| {
            let charge = charge.map_err(|over| pins.error(bytes_of(&parts), PinRefusal::Device(over.to_string())))?;
            pins.pin_parts(&parts).map(|()| charge)
        })?;
        Ok(Self(Some(Box::new(Pinned { space, parts: parts.into_boxed_slice(), _charge: charge }))))
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if let Some(pinned) = self.0.take() {
            pinned.space.with_pins(|pins| pins.unpin_parts(&pinned.parts));
        }
    }
}

impl DmaSpace {
    /// With [`PinPolicy::Registered`], keeps these pages resident until the guard is dropped; does nothing otherwise.
    /// The bookkeeping is charged to `budget`.
    ///
    /// # Errors
    /// The amount that could not be locked, and the reason.
    pub fn pin_pages(self: &Arc<Self>, budget: &Arc<MemoryBudget>, pages: &PageList) -> Result<PinGuard, PinError> {
        if self.policy() != PinPolicy::Registered {
            return Ok(PinGuard::none());
        }
        self.pin_pages_of(&self.view(), budget, pages)
    }

    /// As [`Self::pin_pages`], for a thread that holds a view of this space.
    ///
    /// # Errors
    /// As for [`Self::pin_pages`].
    pub fn pin_pages_of(
        self: &Arc<Self>,
        view: &DmaView<'_>,
        budget: &Arc<MemoryBudget>,
        pages: &PageList,
    ) -> Result<PinGuard, PinError> {
        if self.policy() != PinPolicy::Registered {
            return Ok(PinGuard::none());
        }
        let mut parts = Vec::new();
        for extent in pages.extents() {
            view.backings(extent.iova, extent.bytes(), &mut parts);
        }
        PinGuard::new(Arc::clone(self), parts, budget)
    }
}
