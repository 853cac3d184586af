//! Budget of a run, and the cost of its work.

/// Cost of a request beyond its bytes, in bytes.
const REQUEST_COST: u64 = 512;
/// Cost of a run beyond its requests, in bytes.
pub(crate) const RUN_COST: u64 = 64;

/// Limits on the work of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    bytes: u64,
    requests: u32,
    /// Bytes moved so far. Can exceed the limit by one packet.
    used: u64,
}

impl Budget {
    pub(crate) const fn new(bytes: u64, requests: u32) -> Self {
        Self { bytes, requests, used: 0 }
    }

    /// Returns the same budget with a limit of at most `bytes`.
    pub(crate) fn at_most(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.min(bytes), ..self }
    }

    /// Returns the number of bytes that were moved.
    pub(crate) const fn used(&self) -> u64 {
        self.used
    }

    /// Returns the cost, in bytes, of a run that began with `given` and left this budget.
    pub(crate) fn cost(&self, given: &Self) -> u64 {
        let requests = u64::from(given.requests.saturating_sub(self.requests)).saturating_mul(REQUEST_COST);
        self.used.saturating_add(requests).saturating_add(RUN_COST)
    }

    /// Returns the maximum cost of a run with this budget.
    pub(crate) fn most(&self) -> u64 {
        self.bytes.saturating_add(u64::from(self.requests).saturating_mul(REQUEST_COST)).saturating_add(RUN_COST)
    }

    /// Returns `true` if no more work can be started.
    #[inline]
    pub(crate) const fn spent(&self) -> bool {
        self.bytes == 0 || self.requests == 0
    }

    /// Returns the number of bytes that can be copied in one step.
    #[inline]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    #[inline]
    pub(crate) const fn take_bytes(&mut self, count: u64) {
        self.bytes = self.bytes.saturating_sub(count);
        self.used = self.used.saturating_add(count);
    }

    #[inline]
    pub(crate) const fn take_request(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }
}
