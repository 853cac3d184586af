//! Limits on the number of objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pvrdma_verbs::VerbsError;

/// Limit on the number of objects of a kind.
#[derive(Debug)]
pub(crate) struct Quota {
    used: Arc<AtomicU32>,
    limit: u32,
    what: &'static str,
}

impl Quota {
    /// Creates a quota. `what` is the name of the objects in the error.
    pub(crate) fn new(limit: u32, what: &'static str) -> Self {
        Self { used: Arc::default(), limit, what }
    }

    /// Counts one more object, until the permit is dropped.
    ///
    /// # Errors
    /// The limit is reached.
    pub(crate) fn take(&self) -> Result<Permit, VerbsError> {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used < self.limit).then_some(used.wrapping_add(1))
            })
            .map(|_| Permit(Arc::clone(&self.used)))
            .map_err(|_| VerbsError::Exhausted(self.what))
    }
}

/// The place of an object in a [`Quota`], released on drop.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicU32>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_permit_makes_room() {
        let quota = Quota::new(2, "thing");
        let (first, _second) = (quota.take().unwrap(), quota.take().unwrap());
        assert!(matches!(quota.take(), Err(VerbsError::Exhausted("thing"))));
        drop(first);
        assert!(quota.take().is_ok());
    }
}
