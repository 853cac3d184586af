//! Addresses of guests on the host's interface.

use std::collections::HashSet;

use parking_lot::Mutex;
use pvrdma_verbs_types::Gid;

/// Maximum number of addresses that are remembered as added for guests.
const MAX_GIVEN: usize = 4096;

/// Addresses that were added to the host's interface for guests. A removed address stays in the host's table for a
/// moment.
#[derive(Debug, Default)]
pub(crate) struct GivenAddresses(Mutex<HashSet<Gid>>);

impl GivenAddresses {
    pub(super) fn contains(&self, gid: Gid) -> bool {
        self.0.lock().contains(&gid)
    }

    pub(super) fn insert(&self, gid: Gid) {
        let mut given = self.0.lock();
        // An address that is forgotten here counts as the host's own until it disappears from the host's table.
        if given.len() >= MAX_GIVEN {
            given.clear();
        }
        given.insert(gid);
    }
}
