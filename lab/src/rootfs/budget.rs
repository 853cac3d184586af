//! Limits of an archive, and the remaining budget.

use super::refusal::Reason;

/// Limits of all layers of an archive together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of the unpacked layers, with headers and padding.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Bytes of all names and link targets, which are kept in memory.
    pub names: u64,
}

/// Limits for callers: far above any real system, and harmless for a machine that runs tests.
pub(super) const LIMITS: Limits = Limits { bytes: 32 << 30, entries: 1_000_000, names: 256 << 20 };

/// Remaining limits.
#[derive(Debug)]
pub(super) struct Budget {
    limits: Limits,
    left: Limits,
}

impl Budget {
    /// Creates an unused budget.
    pub(super) const fn new(limits: Limits) -> Self {
        Self { limits, left: limits }
    }

    /// Takes bytes of content.
    ///
    /// # Errors
    /// Fewer are left.
    pub(super) fn bytes(&mut self, count: u64) -> Result<(), Reason> {
        self.left.bytes = self.left.bytes.checked_sub(count).ok_or(Reason::TooLarge(self.limits.bytes))?;
        Ok(())
    }

    /// Checks that this much content is left, without taking it.
    ///
    /// # Errors
    /// Less is left.
    pub(super) fn check_bytes(&self, count: u64) -> Result<(), Reason> {
        if count > self.left.bytes { Err(Reason::TooLarge(self.limits.bytes)) } else { Ok(()) }
    }

    /// Takes an entry with names of this total length.
    ///
    /// # Errors
    /// There are too many entries, or their names are too long.
    pub(super) fn entry(&mut self, names: usize) -> Result<(), Reason> {
        let too_many = || Reason::TooMany(self.limits.entries);
        let entries = self.left.entries.checked_sub(1).ok_or_else(too_many)?;
        let names = u64::try_from(names).ok().and_then(|names| self.left.names.checked_sub(names));
        let names = names.ok_or(Reason::NamesTooLarge(self.limits.names))?;
        self.left.entries = entries;
        self.left.names = names;
        Ok(())
    }
}
