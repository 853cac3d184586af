//! What a VMM does whose guest's doorbell pages are memory, and what it asks of the device.

use std::ops::Range;

/// Who watches the rings of processes whose doorbells do not trap.
///
/// It owns the pages: it knows which of them can be stored to silently, and can make the next store known.
pub trait DoorbellWatcher: Send + Sync {
    /// Nanoseconds on a clock that never goes back.
    fn now(&self) -> u64;

    /// Something is due before the time that [`MappedDoorbells::poll_doorbells`] returned last, or completed after a
    /// pass of [`Depth::Rest`], and nobody would look then. Called from any thread, also with locks of the device held:
    /// it only wakes.
    fn wake(&self);

    /// Takes a page from whoever stored to it: when this returns its content is gone, and the next store to it is
    /// followed by [`MappedDoorbells::page_touched`]. Called before a page is given to a process.
    fn renew(&self, page: u32);

    /// A doorbell of a process has come as a message and was obeyed; it `arms` a completion queue, or says that
    /// something was posted or polled. Called from the thread that brought it, with no lock of the device held.
    fn heard(&self, page: u32, arms: bool) {
        let _ = (page, arms);
    }
}

/// How much [`MappedDoorbells::poll_doorbells`] looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// Rings that moved lately, and some of the others in turn. The caller looks again soon.
    Hot,
    /// The same rings. The caller rests until what is due, and is woken for a completion, after which a process that
    /// polls is likely to post.
    Rest,
    /// All rings. The caller may sleep until what is due, unless there was work.
    All,
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Rings to which the guest had posted.
    pub moved: u32,
    /// Something has completed since the last pass, if that was one of [`Depth::Rest`].
    pub completed: bool,
    /// When to look again although nobody may have posted anything.
    pub due: Option<u64>,
}

/// A device whose doorbell pages may be memory of the guest's, all but the first.
///
/// A page of a process traps until it is touched for the first time, or whoever owns the pages says that it becomes
/// memory; what comes as a message is obeyed at any time.
pub trait MappedDoorbells: Send + Sync {
    /// Which doorbell pages may be memory. The first is the kernel's and always traps.
    fn doorbell_pages(&self) -> Range<u32>;

    /// A page was stored to for the first time since [`DoorbellWatcher::renew`]: its process rings doorbells that
    /// nobody hears. From now on its rings are watched, and its completion queues notify of what is not consumed.
    fn page_touched(&self, page: u32);

    /// The same for a page that is about to become memory because its process polls: what it does not consume is
    /// announced later, at first. Returns `true` if the page has a process; it must not become memory otherwise.
    fn page_mapped(&self, page: u32) -> bool;

    /// The opposite, for pages that trap already. What was posted meanwhile is found, and done; from now on doorbells
    /// of their processes are messages, and arming is exact. Requests to arm that nobody heard are made good: each
    /// completion queue announces what it has not yet announced, or the next completion. `now` is that of
    /// [`DoorbellWatcher::now`].
    fn pages_trapped(&self, pages: &[u32], now: u64);

    /// Looks at rings in place of doorbells, and at completion queues whose time has come, and does what there is to
    /// do. One caller at a time.
    fn poll_doorbells(&self, now: u64, depth: Depth) -> Outcome;
}
