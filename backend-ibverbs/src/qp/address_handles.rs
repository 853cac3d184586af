//! Address handles of the host for the destinations of a datagram QP.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_verbs_types::WcStatus;

use crate::convert::Route;
use crate::verbs::HostAh;

/// Maximum number of cached destinations.
const MAX_AHS: usize = 256;
/// Time after which a destination that was not found may be looked up again.
const NOT_FOUND: Duration = Duration::from_secs(3);

/// Destination GID, index of the source GID, and the route.
pub(super) type Destination = ([u8; 16], u8, Route);

/// Result of a look-up.
#[derive(Clone, Debug)]
enum Known {
    Found(Arc<HostAh>),
    /// The destination was not found, and is not looked up again before this time.
    Missing(Instant),
}

/// Cached destinations of a QP. They belong to the send side.
#[derive(Debug, Default)]
pub(super) struct AddressHandles(HashMap<Destination, Known>);

impl AddressHandles {
    /// Clears the cache. Handles in use stay alive until their requests end.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Stores the result of a look-up.
    pub(super) fn remember(&mut self, destination: Destination, found: Option<Arc<HostAh>>) {
        let missing = || Known::Missing(Instant::now() + NOT_FOUND);
        let known = found.map_or_else(missing, Known::Found);
        if self.0.len() >= MAX_AHS {
            self.clear();
        }
        self.0.insert(destination, known);
    }

    /// Returns the cached result, or `None` if the destination must be looked up.
    pub(super) fn find(&self, destination: &Destination) -> Option<Result<Arc<HostAh>, WcStatus>> {
        match self.0.get(destination)? {
            Known::Found(ah) => Some(Ok(Arc::clone(ah))),
            Known::Missing(until) => (Instant::now() < *until).then_some(Err(WcStatus::LocalQpOperation)),
        }
    }
}

/// Pending look-up of a QP. It survives a reset, so that a QP never has two look-ups pending.
#[derive(Debug, Default)]
pub(super) enum LookUp {
    #[default]
    None,
    Asked(Destination),
    Answered(Destination, Option<Arc<HostAh>>),
}
