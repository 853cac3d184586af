//! What an object costs, charged before it is made.

use pvrdma_guest_memory::{Charge, Kept, PageList};
use pvrdma_verbs::{Hca, Object};

use super::{Cq, Mr, Pd, Qp, Srq};
use crate::core::Core;
use crate::error::CmdError;
use crate::ring::RING_BYTES;

/// What an object takes beside itself: its places in tables that may have doubled, events that wait, what the heap
/// needs.
const BESIDE: u64 = 192;

impl<H: Hca> Core<H> {
    /// Charges an object with everything that is kept for it, and the page lists that it keeps.
    ///
    /// # Errors
    /// The device may not make this process keep as much.
    pub(crate) fn charge(&self, object: Object, lists: &[&PageList]) -> Result<Charge, CmdError> {
        let lists = lists.iter().map(|list| list.heap_bytes() as u64).sum();
        self.charge_bytes(object, lists)
    }

    /// The same with so many bytes of page lists.
    ///
    /// # Errors
    /// As for [`Self::charge`].
    pub(crate) fn charge_bytes(&self, object: Object, lists: u64) -> Result<Charge, CmdError> {
        Ok(self.budget.charge(Kept::Objects, bytes_of(&self.hca, object, lists))?)
    }
}

/// Bytes of an object with so many bytes of page lists.
pub(super) fn bytes_of<H: Hca>(hca: &H, object: Object, lists: u64) -> u64 {
    let own = match object {
        Object::Pd => size_of::<Pd<H>>(),
        Object::Mr => size_of::<Mr<H>>(),
        Object::Cq => size_of::<Cq<H>>() + RING_BYTES,
        Object::Srq(_) => size_of::<Srq<H>>() + RING_BYTES,
        Object::Qp(_) => size_of::<Qp<H>>() + 2 * RING_BYTES,
    };
    (own as u64).saturating_add(BESIDE).saturating_add(hca.bytes_of(object)).saturating_add(lists)
}
