//! Counters of the doorbell pages.

use pvrdma_base::counters;

counters! {
    /// Counters of the doorbell pages that a device exports to its VMM.
    pub struct DoorbellCounters {
        /// Touches of doorbell pages that had been taken away. Each is a page fault of the guest.
        doorbell_faults,
        /// Doorbell pages that were taken away because their process was idle.
        doorbell_arms,
        /// Times that work was found right after the pages were taken away: it had been posted just before.
        doorbell_arms_late,
        /// Doorbell pages that the kernel could not take away.
        doorbell_arms_failed,
        /// Naps of the thread that polls rings.
        doorbell_naps,
        /// Sleeps of the thread that polls rings, while all pages were away.
        doorbell_sleeps,
    }
}
