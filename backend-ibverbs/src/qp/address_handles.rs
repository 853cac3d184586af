//! The host's handles for the destinations of a datagram QP.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_verbs::WcStatus;

use crate::convert::Route;
use crate::verbs::HostAh;

/// Destinations that are remembered.
const MAX_AHS: usize = 256;
/// For how long nobody is asked again for a destination that was not found.
const NOT_FOUND: Duration = Duration::from_secs(3);

/// A GID, the index of the source, and how packets get there.
pub(super) type Destination = ([u8; 16], u8, Route);

/// A destination that was looked up.
#[derive(Clone, Debug)]
enum Known {
    Found(Arc<HostAh>),
    /// Nobody has it, and nobody asks before then.
    Missing(Instant),
}

/// The destinations of a QP. The send side has it.
#[derive(Debug, Default)]
pub(super) struct AddressHandles(HashMap<Destination, Known>);

impl AddressHandles {
    /// Forgets all. Handles in use live on until their requests end.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Remembers what was found, or that nobody has it.
    pub(super) fn remember(&mut self, destination: Destination, found: Option<Arc<HostAh>>) {
        let missing = || Known::Missing(Instant::now() + NOT_FOUND);
        let known = found.map_or_else(missing, Known::Found);
        if self.0.len() >= MAX_AHS {
            self.clear();
        }
        self.0.insert(destination, known);
    }

    /// `None` if somebody has to ask.
    pub(super) fn find(&self, destination: &Destination) -> Option<Result<Arc<HostAh>, WcStatus>> {
        match self.0.get(destination)? {
            Known::Found(ah) => Some(Ok(Arc::clone(ah))),
            Known::Missing(until) => (Instant::now() < *until).then_some(Err(WcStatus::LocalQpOperation)),
        }
    }
}

/// What a QP has asked for. It stays over a reset, so that a QP never has asked twice.
#[derive(Debug, Default)]
pub(super) enum LookUp {
    #[default]
    None,
    Asked(Destination),
    Answered(Destination, Option<Arc<HostAh>>),
}
