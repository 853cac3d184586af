//! What an object costs, charged before it is made.

use pvrdma_guest_memory::{Charge, Kept, PageList};
use pvrdma_verbs::{Hca, Object};

use super::affordable::bytes_of;
use crate::core::Core;
use crate::error::CmdError;

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
