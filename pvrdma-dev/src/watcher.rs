//! Interface between the device and a VMM that maps doorbell pages.

use std::ops::Range;

/// Watcher of the rings of processes whose doorbells do not trap.
///
/// It owns the pages: it knows which of them can be written without a trap, and can make the next store trap again.
pub trait DoorbellWatcher: Send + Sync {
    /// Returns the time in nanoseconds of a monotonic clock.
    fn now(&self) -> u64;

    /// Wakes the watcher: a look is due before the time that [`MappedDoorbells::poll_doorbells`] returned last, or
    /// something completed after a pass of [`Depth::Rest`]. Without this call, the watcher would look too late. Called
    /// from any thread, even with locks of the device held, so it must do nothing else.
    fn wake(&self);

    /// Revokes a page from its previous process. Once this returns, its content is gone, and the next store to it is
    /// followed by [`MappedDoorbells::page_touched`]. Called before a page is assigned to a process.
    fn renew(&self, page: u32);

    /// Reports that a doorbell of a process was trapped and handled. `arms` is `true` if it arms a completion queue;
    /// otherwise it reports a post or a poll. Called from the thread that handled it, with no lock of the device held.
    fn heard(&self, page: u32, arms: bool) {
        let _ = (page, arms);
    }
}

/// Extent of a pass of [`MappedDoorbells::poll_doorbells`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// Rings that moved recently, and some of the others in turn. The caller looks again soon.
    Hot,
    /// The same rings. The caller then rests until the next look is due. A completion wakes it, because a process that
    /// polls is likely to post after one.
    Rest,
    /// All rings. The caller may sleep until the next look is due, unless there was work.
    All,
}

/// Result of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Number of rings to which the guest had posted.
    pub moved: u32,
    /// `true` if something completed since the last pass, if that was one of [`Depth::Rest`].
    pub completed: bool,
    /// Time of the next look, even if nothing is posted until then.
    pub due: Option<u64>,
}

/// Device whose doorbell pages, except for the first, may be mapped into the guest.
///
/// A page of a process traps until it is touched for the first time, or until the owner of the pages announces that it
/// is mapped. Trapped doorbells are handled at any time.
pub trait MappedDoorbells: Send + Sync {
    /// Returns the doorbell pages that may be memory. The first page belongs to the kernel and always traps.
    fn doorbell_pages(&self) -> Range<u32>;

    /// Announces the first store to a page since [`DoorbellWatcher::renew`]: the doorbells of its process do not trap.
    /// From now on its rings are watched, and its completion queues notify of completions that are not consumed.
    fn page_touched(&self, page: u32);

    /// As [`Self::page_touched`], for a page that is about to be mapped because its process polls: at first, the guest
    /// is notified of unconsumed completions later. Returns `true` if the page has a process. Otherwise it must not be
    /// mapped.
    fn page_mapped(&self, page: u32) -> bool;

    /// Announces that these pages trap again. Requests posted meanwhile are found and processed. From now on, doorbells
    /// of their processes trap, and arming is exact. Arming that was missed is made up for: each completion queue
    /// notifies of the completions of which it has not notified yet or, if there are none, of the next one. `now` is
    /// the time of [`DoorbellWatcher::now`].
    fn pages_trapped(&self, pages: &[u32], now: u64);

    /// Looks at rings in place of doorbells, and at completion queues whose look is due, and does the work found. May
    /// be called by only one thread at a time.
    fn poll_doorbells(&self, now: u64, depth: Depth) -> Outcome;
}
