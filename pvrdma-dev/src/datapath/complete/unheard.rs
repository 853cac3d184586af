//! State of a queue that the guest may have armed unnoticed.

use super::infer;

/// State of a queue that the guest may have armed unnoticed, until the device resumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unheard {
    /// The guest was notified of all completions in the queue.
    pub(crate) announced: bool,
    /// Delay of inferred notifications in nanoseconds.
    pub(crate) delay: u64,
}

impl Unheard {
    /// Nothing is known about the guest.
    pub(super) const NEW: Self = Self { announced: false, delay: infer::SHORTEST };
    /// Maximum delay.
    pub(crate) const LONGEST: u64 = infer::LONGEST_HOPELESS;
}
