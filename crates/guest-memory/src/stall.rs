//! Memory that makes its users wait.
//!
//! A page fault in shared memory waits, without a way to end it, while the memory's owner punches a hole around the
//! page; that takes as long as the owner wants. The thread that waits often works for other devices, and holds views
//! of their memory. The wait cannot be foreseen, so it is found out afterwards whose memory caused one, in three steps
//! that cost nothing as long as there is none:
//!
//! 1. A view that was held for long has all accesses to its memory timed for a minute. A view of a neighbour that was
//!    held meanwhile is suspected as well.
//! 2. If the first access to a page takes long then, it is this memory; but the thread may only have lost its
//!    processor. For some minutes each access also asks whether the thread went to sleep by itself, which copying does
//!    in a page fault only.
//! 3. An access that does is a stall, and the third of them within [`REMEMBERED`] revokes the memory.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vm_memory::{Bytes, VolatileSlice};

use super::PAGE_SIZE;
use super::pin::lock;

/// Longer than any access to memory that is there, or that the host has swapped to a working disk.
const LONG: Duration = Duration::from_millis(50);

/// How long accesses are timed after a view was held for long.
const TIMED: Duration = Duration::from_secs(60);

/// How long a stall is remembered, also beyond the connection of the VMM that caused it.
pub const REMEMBERED: Duration = Duration::from_secs(600);

/// Stalls that revoke the memory.
pub const STALLS: usize = 3;

/// Bytes of a piece that are touched ahead at most.
const AHEAD: usize = 1 << 20;

/// Time and sleep of the calling thread, for tests to replace.
pub trait StallMeter: Send + Sync + fmt::Debug {
    /// Monotonic time; some milliseconds more or less do not matter.
    fn now(&self) -> Duration;

    /// How often the calling thread gave its processor up by itself.
    fn sleeps(&self) -> u64;
}

/// That of the system.
#[derive(Debug)]
struct SystemMeter;

impl StallMeter for SystemMeter {
    fn now(&self) -> Duration {
        lock::coarse_time()
    }

    fn sleeps(&self) -> u64 {
        lock::voluntary_switches()
    }
}

/// A stall of a device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// How long the access took.
    pub duration: Duration,
    /// It was one too many: the memory is revoked.
    pub revoked: bool,
}

type Observer = Arc<dyn Fn(Stall) + Send + Sync>;

/// What is known of the stalls of one space.
pub(crate) struct Stalls {
    meter: Box<dyn StallMeter>,
    /// Until when accesses are timed, and until when they also ask for sleep, in nanoseconds.
    timed: AtomicU64,
    verified: AtomicU64,
    /// Until when a stall is remembered, in nanoseconds.
    slow: AtomicU64,
    /// When the last stalls were.
    recent: Mutex<VecDeque<Duration>>,
    /// Set with the space's revocation when stalls were the reason.
    exceeded: AtomicBool,
    revoked: Arc<AtomicBool>,
    observer: Mutex<Option<Observer>>,
}

impl Stalls {
    pub(crate) fn new(revoked: Arc<AtomicBool>, meter: Option<Box<dyn StallMeter>>) -> Self {
        Self {
            meter: meter.unwrap_or_else(|| Box::new(SystemMeter)),
            timed: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            recent: Mutex::default(),
            exceeded: AtomicBool::new(false),
            revoked,
            observer: Mutex::default(),
        }
    }

    pub(crate) fn observe(&self, observer: Observer) {
        *self.observer.lock() = Some(observer);
    }

    /// Returns `true` if the memory was revoked because of stalls, once.
    pub(crate) fn take_exceeded(&self) -> bool {
        self.exceeded.swap(false, Ordering::Relaxed)
    }

    /// Returns `true` if a stall is remembered.
    #[inline]
    pub(crate) fn is_slow(&self) -> bool {
        let until = self.slow.load(Ordering::Relaxed);
        until != 0 && nanos(self.meter.now()) < until
    }

    /// A view begins.
    #[inline]
    pub(crate) fn hold(&self) -> Hold<'_> {
        let since = nanos(self.meter.now());
        let watch = if since >= self.timed.load(Ordering::Relaxed) {
            Watch::Off
        } else if since >= self.verified.load(Ordering::Relaxed) {
            Watch::Timed
        } else {
            Watch::Verified
        };
        Hold { stalls: self, since, watch }
    }

    #[cold]
    fn time(&self, now: u64) {
        self.timed.fetch_max(now.saturating_add(nanos(TIMED)), Ordering::Relaxed);
    }

    #[cold]
    fn verify(&self, now: u64) {
        let until = now.saturating_add(nanos(REMEMBERED));
        self.verified.fetch_max(until, Ordering::Relaxed);
        self.timed.fetch_max(until, Ordering::Relaxed);
    }

    pub(crate) fn note_now(&self, duration: Duration) {
        self.note(nanos(self.meter.now()), duration);
    }

    #[cold]
    fn note(&self, now: u64, duration: Duration) {
        self.verify(now);
        self.slow.fetch_max(now.saturating_add(nanos(REMEMBERED)), Ordering::Relaxed);
        let now = Duration::from_nanos(now);
        let revoked = {
            let mut recent = self.recent.lock();
            recent.retain(|&stall| now.saturating_sub(stall) < REMEMBERED);
            recent.push_back(now);
            // No more than these matter.
            while recent.len() > STALLS {
                recent.pop_front();
            }
            recent.len() >= STALLS
        };
        if revoked {
            // In this order: the connection looks at the reason once it sees the revocation.
            self.exceeded.store(true, Ordering::Relaxed);
            self.revoked.store(true, Ordering::Release);
        }
        let observer = self.observer.lock().clone();
        if let Some(observer) = observer {
            observer(Stall { duration, revoked });
        }
    }
}

/// How closely accesses are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Watch {
    Off,
    Timed,
    Verified,
}

/// A view as long as it lives.
pub(crate) struct Hold<'a> {
    stalls: &'a Stalls,
    since: u64,
    watch: Watch,
}

impl Hold<'_> {
    /// Touches a piece of memory that is about to be used, if this is the memory of a suspect.
    #[inline]
    pub(crate) fn touch(&self, piece: &VolatileSlice<'_>) {
        if self.watch != Watch::Off {
            self.touch_watched(piece);
        }
    }

    #[cold]
    fn touch_watched(&self, piece: &VolatileSlice<'_>) {
        let meter = &*self.stalls.meter;
        let verified = self.watch == Watch::Verified;
        let sleeps = if verified { meter.sleeps() } else { 0 };
        let (mut last, mut longest) = (meter.now(), Duration::ZERO);
        // By address, because a piece may begin anywhere in a page.
        #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
        let page = PAGE_SIZE as usize;
        let into = piece.ptr_guard().as_ptr() as usize % page;
        let mut offset = 0;
        while offset < piece.len().min(AHEAD) {
            // Never fails: the offset is inside.
            let _ = piece.load::<u8>(offset, Ordering::Relaxed);
            let now = meter.now();
            longest = longest.max(now.saturating_sub(last));
            last = now;
            offset = (into + offset + 1).next_multiple_of(page) - into;
        }
        if longest < LONG {
            return;
        }
        if !verified {
            self.stalls.verify(nanos(last));
        } else if meter.sleeps() != sleeps {
            self.stalls.note(nanos(last), longest);
        }
    }
}

impl Drop for Hold<'_> {
    #[inline]
    fn drop(&mut self) {
        let now = nanos(self.stalls.meter.now());
        if now.saturating_sub(self.since) >= nanos(LONG) {
            self.stalls.time(now);
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

    /// Each look at the time moves it, as if what was done since the last had taken that long.
    #[derive(Debug, Default)]
    struct Script {
        time: AtomicU64,
        step: AtomicU64,
        sleeps: AtomicU64,
        sleepy: AtomicBool,
    }

    impl Script {
        /// What is done from now on takes so many milliseconds.
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

    /// N6: its owner punches holes while a neighbour's memory is held. Who is suspected is not yet who is guilty.
    #[test]
    fn the_third_stall_revokes_the_memory_of_who_caused_it() {
        let (slow, neighbour) = (Guest::new(), Guest::new());
        {
            let _both = (slow.space.view(), neighbour.space.view());
            slow.script.pass(LONG);
            neighbour.script.pass(LONG);
        }
        slow.script.takes(60, true);
        // Which of both it is.
        slow.access().unwrap();
        neighbour.access().unwrap();
        assert_eq!(slow.counts(), (0, 0));
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
        assert!(slow.space.is_slow() && !neighbour.space.is_slow());
        assert!(!neighbour.space.take_stalled());
    }

    /// A busy host takes the processor from threads, with whatever they hold.
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
        // The next client of the device begins with what the last one did.
        guest.space.unmap_all();
        let backing = Some(Backing { mapping: Arc::new(MmapRegion::new(4 << 12).unwrap()), offset: 0 });
        guest.space.map(DmaRange { iova: 0, len: 4 << 12, writable: true, backing }).unwrap();
        stall();
        stall();
        assert_eq!(guest.counts(), (6, 1));
    }

    /// Each page of a piece, from the first byte that is used to the last.
    #[test]
    fn every_page_of_a_piece_is_touched() {
        let guest = Guest::new();
        guest.script.takes(60, true);
        guest.access().unwrap();
        // Ten milliseconds for each of three pages: no access was long.
        guest.script.takes(10, true);
        let before = guest.script.time.load(Ordering::Relaxed);
        guest.space.view().read(4090, &mut [0; 4110]).unwrap();
        // Begin and end of the view, and of each page.
        assert_eq!((guest.script.time.load(Ordering::Relaxed) - before) / 10_000_000, 2 + 1 + 3);
        assert_eq!(guest.counts(), (0, 0));
    }
}
