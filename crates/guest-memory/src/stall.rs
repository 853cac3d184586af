//! Detection of guest memory whose page faults stall the threads that access it.
//!
//! While the owner of shared memory punches a hole around a page, a page fault on that page waits, uninterruptibly, for
//! as long as the owner wants. The waiting thread often works for other devices as well, and holds views of their
//! memory. The first wait cannot be predicted, so the memory that caused it is identified afterwards, in two steps that
//! cost nothing while there are no stalls:
//!
//! 1. If a view was held for long, its memory is *slow* for a minute, and so is the memory of another device of which
//!    the thread held a view at the same time: one of the two may be the cause, but the thread may also have been
//!    preempted. Users of slow memory hold no other memory together with it, so only the first wait can last while a
//!    view of another device's memory is held.
//! 2. Each access to slow memory is timed, and checks whether the thread slept voluntarily, which a copy does only in a
//!    page fault. A long access during which the thread slept is a stall. Its memory is slow for [`REMEMBERED`], and
//!    the third stall within that time revokes it.
//!
//! This is done only for memory with an observer ([`DmaSpace::observe_stalls`](super::DmaSpace::observe_stalls)), which
//! the server of vfio-user clients sets. Memory that belongs to this process alone cannot be stalled from outside, and
//! its views need not read the clock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pvrdma_base::locks::Mutex;
use pvrdma_pages::PAGE_SIZE;
use vm_memory::{Bytes, VolatileSlice};

use super::pin::lock;

/// Duration of a view or an access that counts as long: longer than any access to resident memory, or to memory that
/// the host has swapped to a working disk.
const LONG: Duration = Duration::from_millis(50);

/// Time for which memory is slow after a view of it was held for long.
const SUSPECTED: Duration = Duration::from_secs(60);

/// Time for which a stall is remembered, even beyond the connection of the VMM that caused it.
pub const REMEMBERED: Duration = Duration::from_secs(600);

/// Number of stalls that revoke the memory.
pub const STALLS: usize = 3;

/// Maximum number of bytes of a piece that are touched in advance.
const AHEAD: usize = 1 << 20;

/// Clock and sleep counter of the calling thread. Tests replace it.
pub trait StallMeter: Send + Sync + fmt::Debug {
    /// Returns the monotonic time; an error of some milliseconds is acceptable.
    fn now(&self) -> Duration;

    /// Returns the number of voluntary context switches of the calling thread.
    fn sleeps(&self) -> u64;
}

/// Stall of an access to a device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// Duration of the access.
    pub duration: Duration,
    /// `true` if this stall reached the limit: the memory is revoked.
    pub revoked: bool,
}

type Observer = Arc<dyn Fn(Stall) + Send + Sync>;

/// Stall history of one space.
pub(crate) struct Stalls {
    /// Replaces the clock and the sleep counter of the system in tests. Otherwise `None`: every measured view reads the
    /// clock, so the system's is called directly.
    meter: Option<Box<dyn StallMeter>>,
    /// Time until which the memory is slow, in nanoseconds; 0 if it is not.
    slow: AtomicU64,
    /// Times of the last stalls.
    recent: Mutex<VecDeque<Duration>>,
    /// Set together with the space's revocation if stalls were the reason.
    exceeded: AtomicBool,
    revoked: Arc<AtomicBool>,
    /// `true` if there is an observer; without one, nothing is measured.
    observed: AtomicBool,
    observer: Mutex<Option<Observer>>,
}

impl Stalls {
    pub(crate) fn new(revoked: Arc<AtomicBool>, meter: Option<Box<dyn StallMeter>>) -> Self {
        Self {
            meter,
            slow: AtomicU64::new(0),
            recent: Mutex::default(),
            exceeded: AtomicBool::new(false),
            revoked,
            observed: AtomicBool::new(false),
            observer: Mutex::default(),
        }
    }

    #[inline]
    fn is_observed(&self) -> bool {
        self.observed.load(Ordering::Relaxed)
    }

    /// Returns the monotonic time in nanoseconds.
    #[inline]
    fn now(&self) -> u64 {
        nanos(self.meter.as_ref().map_or_else(lock::coarse_time, |meter| meter.now()))
    }

    fn sleeps(&self) -> u64 {
        self.meter.as_ref().map_or_else(lock::voluntary_switches, |meter| meter.sleeps())
    }

    pub(crate) fn observe(&self, observer: Observer) {
        *self.observer.lock() = Some(observer);
        self.observed.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the memory was revoked because of stalls, and clears that state.
    pub(crate) fn take_exceeded(&self) -> bool {
        self.exceeded.swap(false, Ordering::Relaxed)
    }

    /// Returns `true` if a stall, or the suspicion of one, is still remembered.
    #[inline]
    pub(crate) fn is_slow(&self) -> bool {
        let until = self.slow.load(Ordering::Relaxed);
        until != 0 && self.is_slow_at(self.now())
    }

    #[cold]
    fn is_slow_at(&self, now: u64) -> bool {
        let until = self.slow.load(Ordering::Relaxed);
        let slow = now < until;
        if !slow {
            // Later callers need not read the clock. A suspicion that another thread records meanwhile stays.
            let _ = self.slow.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        slow
    }

    /// Starts to measure how long a view is held.
    #[inline]
    pub(crate) fn hold(&self) -> Hold<'_> {
        if !self.is_observed() {
            return self.unmeasured();
        }
        let since = self.now();
        Hold { stalls: self, watch: self.watch(since), span: Some(Span { since, beside: None }) }
    }

    /// Starts to measure how long a view is held together with a view of `beside`. The first measures for both.
    #[inline]
    pub(crate) fn hold_pair<'a>(&'a self, beside: &'a Self) -> (Hold<'a>, Hold<'a>) {
        if !self.is_observed() && !beside.is_observed() {
            return (self.unmeasured(), beside.unmeasured());
        }
        let since = self.now();
        let span = Some(Span { since, beside: Some(beside) });
        let own = Hold { stalls: self, watch: self.watch(since), span };
        (own, Hold { stalls: beside, watch: beside.watch(since), span: None })
    }

    #[inline]
    const fn unmeasured(&self) -> Hold<'_> {
        Hold { stalls: self, watch: false, span: None }
    }

    #[inline]
    fn watch(&self, now: u64) -> bool {
        self.is_observed() && now < self.slow.load(Ordering::Relaxed)
    }

    /// Makes the memory slow for some time.
    #[cold]
    fn suspect(&self, now: u64, time: Duration) {
        if self.is_observed() {
            self.slow.fetch_max(now.saturating_add(nanos(time)), Ordering::Relaxed);
        }
    }

    pub(crate) fn note_now(&self, duration: Duration) {
        self.note(self.now(), duration);
    }

    #[cold]
    fn note(&self, now: u64, duration: Duration) {
        self.slow.fetch_max(now.saturating_add(nanos(REMEMBERED)), Ordering::Relaxed);
        let now = Duration::from_nanos(now);
        let revoked = {
            let mut recent = self.recent.lock();
            recent.retain(|&stall| now.saturating_sub(stall) < REMEMBERED);
            recent.push_back(now);
            // Older stalls do not matter: the limit is reached with the last ones alone.
            while recent.len() > STALLS {
                recent.pop_front();
            }
            recent.len() >= STALLS
        };
        if revoked {
            // The reason must be stored before the revocation: the connection's thread reads it after it has seen the
            // revocation.
            self.exceeded.store(true, Ordering::Relaxed);
            self.revoked.store(true, Ordering::Release);
        }
        let observer = self.observer.lock().clone();
        if let Some(observer) = observer {
            observer(Stall { duration, revoked });
        }
    }
}

/// Measures how long a view is held, and observes its accesses.
pub(crate) struct Hold<'a> {
    stalls: &'a Stalls,
    /// The memory is slow: accesses are timed.
    watch: bool,
    /// `None` if another view measures, or none does.
    span: Option<Span<'a>>,
}

/// Time that one or two views are held.
struct Span<'a> {
    /// Start, in nanoseconds.
    since: u64,
    /// Memory of the other view.
    beside: Option<&'a Stalls>,
}

impl Hold<'_> {
    /// Returns `true` if accesses are observed, because the memory is slow.
    #[inline]
    pub(crate) const fn is_watched(&self) -> bool {
        self.watch
    }

    /// Touches a piece of memory that is about to be used, if the memory is slow.
    pub(crate) fn touch(&self, piece: &VolatileSlice<'_>) {
        if self.watch {
            self.touch_watched(piece);
        }
    }

    #[cold]
    fn touch_watched(&self, piece: &VolatileSlice<'_>) {
        let stalls = self.stalls;
        let sleeps = stalls.sleeps();
        let (mut last, mut longest) = (stalls.now(), 0);
        // Pages are computed from the address, because a piece may begin anywhere in a page.
        #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
        let page = PAGE_SIZE as usize;
        let into = piece.ptr_guard().as_ptr() as usize % page;
        let mut offset = 0;
        while offset < piece.len().min(AHEAD) {
            // The load never fails: the offset is inside the piece.
            let _ = piece.load::<u8>(offset, Ordering::Relaxed);
            let now = stalls.now();
            longest = longest.max(now.saturating_sub(last));
            last = now;
            offset = (into + offset + 1).next_multiple_of(page) - into;
        }
        if longest >= nanos(LONG) && stalls.sleeps() != sleeps {
            stalls.note(last, Duration::from_nanos(longest));
        }
    }
}

impl Drop for Hold<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(span) = &self.span else { return };
        let now = self.stalls.now();
        if now.saturating_sub(span.since) >= nanos(LONG) {
            self.stalls.suspect(now, SUSPECTED);
            if let Some(beside) = span.beside {
                beside.suspect(now, SUSPECTED);
            }
        }
    }
}

#[inline]
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use vm_memory::mmap::MmapRegion;

    use super::*;
    use crate::{Backing, DmaError, DmaRange, DmaSpace, MemoryLimits, PinPolicy};

    /// Each reading of the clock advances it, as if the operation since the last reading had taken that long.
    #[derive(Debug, Default)]
    struct Script {
        time: AtomicU64,
        step: AtomicU64,
        sleeps: AtomicU64,
        sleepy: AtomicBool,
    }

    impl Script {
        /// Sets the duration in milliseconds of all further operations.
        fn takes(&self, millis: u64, sleepy: bool) {
            self.step.store(millis * 1_000_000, Ordering::Relaxed);
            self.sleepy.store(sleepy, Ordering::Relaxed);
        }

        fn pass(&self, time: Duration) {
            self.time.fetch_add(nanos(time), Ordering::Relaxed);
        }
    }

    impl StallMeter for Arc<Script> {
        fn now(&self) -> Duration {
            let step = self.step.load(Ordering::Relaxed);
            Duration::from_nanos(self.time.fetch_add(step, Ordering::Relaxed) + step)
        }

        fn sleeps(&self) -> u64 {
            let more = u64::from(self.sleepy.load(Ordering::Relaxed));
            self.sleeps.fetch_add(more, Ordering::Relaxed)
        }
    }

    struct Guest {
        script: Arc<Script>,
        space: Arc<DmaSpace>,
        stalls: Arc<AtomicU32>,
        revoked: Arc<AtomicU32>,
    }

    impl Guest {
        fn new() -> Self {
            let script = Arc::new(Script::default());
            script.pass(REMEMBERED);
            let meter = Box::new(Arc::clone(&script));
            let space = DmaSpace::with_meter(PinPolicy::Off, MemoryLimits::default(), meter);
            let backing = Some(Backing { mapping: Arc::new(MmapRegion::new(4 << 12).unwrap()), offset: 0 });
            space.map(DmaRange { iova: 0, len: 4 << 12, writable: true, backing }).unwrap();
            let (stalls, revoked) = <(Arc<AtomicU32>, Arc<AtomicU32>)>::default();
            let counts = (Arc::clone(&stalls), Arc::clone(&revoked));
            space.observe_stalls(move |stall| {
                counts.0.fetch_add(1, Ordering::Relaxed);
                counts.1.fetch_add(u32::from(stall.revoked), Ordering::Relaxed);
            });
            Self { script, space, stalls, revoked }
        }

        fn access(&self) -> Result<(), DmaError> {
            self.space.view().read(8, &mut [0; 8])
        }

        fn counts(&self) -> (u32, u32) {
            (self.stalls.load(Ordering::Relaxed), self.revoked.load(Ordering::Relaxed))
        }
    }

    /// N6: the owner punches holes while a view of another device's memory is held. A suspect is not revoked without
    /// proof.
    #[test]
    fn the_third_stall_revokes_the_memory_that_caused_it() {
        let (slow, neighbour) = (Guest::new(), Guest::new());
        {
            let _both = DmaSpace::view_pair(&neighbour.space, &slow.space);
            slow.script.pass(LONG);
            neighbour.script.pass(LONG);
        }
        slow.script.takes(60, true);
        // From the first wait on, both are kept apart.
        assert!(slow.space.is_slow() && neighbour.space.is_slow());
        for stalls in 1..=3 {
            slow.access().unwrap();
            neighbour.access().unwrap();
            assert_eq!(slow.counts(), (stalls, stalls / 3));
        }
        assert_eq!(slow.access(), Err(DmaError::Denied { addr: 8 }));
        assert!(slow.space.revocation().load(Ordering::Relaxed));
        assert!(slow.space.take_stalled() && !slow.space.take_stalled());
        neighbour.access().unwrap();
        assert_eq!(neighbour.counts(), (0, 0));
        slow.script.takes(0, false);
        slow.script.pass(SUSPECTED);
        neighbour.script.pass(SUSPECTED);
        assert!(slow.space.is_slow() && !neighbour.space.is_slow());
        assert!(!neighbour.space.take_stalled());
    }

    /// Views of memory without an observer do not read the clock, alone or in a pair; a pair is measured if one of the
    /// two is observed.
    #[test]
    fn only_observed_memory_is_measured() {
        let spaces = || {
            let script = Arc::new(Script::default());
            let meter = Box::new(Arc::clone(&script));
            (DmaSpace::with_meter(PinPolicy::Off, MemoryLimits::default(), meter), script)
        };
        let ((first, clock), (second, _)) = (spaces(), spaces());
        clock.takes(1, false);
        let readings = || clock.time.load(Ordering::Relaxed) / 1_000_000;
        drop(first.view());
        drop(DmaSpace::view_pair(&first, &second));
        assert_eq!(readings(), 0);
        second.observe_stalls(|_| {});
        drop(DmaSpace::view_pair(&first, &second));
        assert_eq!(readings(), 2);
        drop(first.view());
        assert_eq!(readings(), 2);
    }

    /// A busy host preempts threads, whatever they hold.
    #[test]
    fn a_thread_that_waits_for_a_processor_is_no_stall() {
        let guest = Guest::new();
        guest.script.takes(60, false);
        for _ in 0..10 {
            guest.access().unwrap();
        }
        assert_eq!(guest.counts(), (0, 0));
    }

    #[test]
    fn stalls_are_forgotten_after_some_minutes() {
        let guest = Guest::new();
        let stall = || {
            guest.script.takes(60, true);
            let before = guest.counts().0;
            while guest.counts().0 == before {
                guest.access().unwrap();
            }
            guest.script.takes(0, false);
        };
        stall();
        stall();
        guest.script.pass(REMEMBERED);
        stall();
        assert_eq!(guest.counts(), (3, 0));
        guest.script.pass(REMEMBERED);
        assert!(!guest.space.is_slow());
        stall();
        assert_eq!(guest.counts(), (4, 0));
        // The next client of the device inherits the record of the previous one.
        guest.space.unmap_all();
        let backing = Some(Backing { mapping: Arc::new(MmapRegion::new(4 << 12).unwrap()), offset: 0 });
        guest.space.map(DmaRange { iova: 0, len: 4 << 12, writable: true, backing }).unwrap();
        stall();
        stall();
        assert_eq!(guest.counts(), (6, 1));
    }

    /// Every page of a piece is touched, from the first byte that is used to the last.
    #[test]
    fn every_page_of_a_piece_is_touched() {
        let guest = Guest::new();
        guest.script.takes(60, true);
        guest.access().unwrap();
        // Each of three pages takes ten milliseconds: no single access was long.
        guest.script.takes(10, true);
        let before = guest.script.time.load(Ordering::Relaxed);
        guest.space.view().read(4090, &mut [0; 4110]).unwrap();
        // The clock is read at the beginning and the end of the view and of each page.
        assert_eq!((guest.script.time.load(Ordering::Relaxed) - before) / 10_000_000, 2 + 1 + 3);
        assert_eq!(guest.counts(), (0, 0));
    }
}
