//! What a device may use of the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::VerbsError;

/// A number that has an upper limit.
#[derive(Debug)]
pub(crate) struct Limit {
    used: Arc<AtomicU64>,
    limit: u64,
    what: &'static str,
}

/// A part of a [`Limit`], given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    used: Arc<AtomicU64>,
    count: u64,
}

impl Limit {
    pub(crate) fn new(limit: u64, what: &'static str) -> Self {
        Self { used: Arc::default(), limit, what }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self, count: u64) -> Result<Share, VerbsError> {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(count).filter(|&sum| sum <= self.limit)
            })
            .map(|_| Share { used: Arc::clone(&self.used), count })
            .map_err(|_| VerbsError::Exhausted(self.what))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.count, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_come_back() {
        let limit = Limit::new(10, "bytes");
        let first = limit.take(7).unwrap();
        assert!(limit.take(4).is_err() && limit.take(u64::MAX).is_err());
        let second = limit.take(3).unwrap();
        drop(first);
        assert_eq!(limit.used(), 3);
        drop(second);
        assert!(limit.take(10).is_ok());
    }
}
