//! Memory cost of objects, charged before they are created.

use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_pages::PageList;
use pvrdma_verbs::{Hca, Object};

use super::affordable::bytes_of;
use crate::core::Core;
use crate::error::CmdError;

impl<H: Hca> Core<H> {
    /// Charges an object with all its memory and its page lists.
    ///
    /// # Errors
    /// The device would exceed its memory budget.
    pub(crate) fn charge(&self, object: Object, lists: &[&PageList]) -> Result<Charge, CmdError> {
        let lists = lists.iter().map(|list| list.heap_bytes() as u64).sum();
        self.charge_bytes(object, lists)
    }

    /// As [`Self::charge`], with the size of the page lists in bytes.
    ///
    /// # Errors
    /// As for [`Self::charge`].
    pub(crate) fn charge_bytes(&self, object: Object, lists: u64) -> Result<Charge, CmdError> {
        Ok(self.budget.charge(Kept::Objects, bytes_of(&self.hca, object, lists))?)
    }
}
