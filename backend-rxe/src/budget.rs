//! How much one run may do, and what it has cost.

/// What a request costs beside its bytes, in bytes.
const REQUEST_COST: u64 = 512;
/// What a run costs beside its requests, in bytes.
pub(crate) const RUN_COST: u64 = 64;

/// How much one run may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    bytes: u64,
    requests: u32,
    /// Bytes that were moved, which may be a packet more than there were.
    used: u64,
}

impl Budget {
    pub(crate) const fn new(bytes: u64, requests: u32) -> Self {
        Self { bytes, requests, used: 0 }
    }

    /// The same with no more bytes than these.
    pub(crate) fn at_most(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.min(bytes), ..self }
    }

    /// Bytes that were moved.
    pub(crate) const fn used(&self) -> u64 {
        self.used
    }

    /// What a run cost that began with `given` and left this, in bytes.
    pub(crate) fn cost(&self, given: &Self) -> u64 {
        let requests = u64::from(given.requests.saturating_sub(self.requests)).saturating_mul(REQUEST_COST);
        self.used.saturating_add(requests).saturating_add(RUN_COST)
    }

    /// What a run with this budget costs at most.
    pub(crate) fn most(&self) -> u64 {
        self.bytes.saturating_add(u64::from(self.requests).saturating_mul(REQUEST_COST)).saturating_add(RUN_COST)
    }

    /// Returns `true` if nothing more may be started.
    #[inline]
    pub(crate) const fn spent(&self) -> bool {
        self.bytes == 0 || self.requests == 0
    }

    /// Bytes that may be copied in one go.
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
