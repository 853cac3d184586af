//! Tests with pages of the real kernel. Where the kernel cannot export pages, these tests print the reason and end:
//! `doorbells` is `trapped` there.
#![expect(clippy::print_stderr, reason = "a test that cannot run says why")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::Duration;

use pvrdma_dev::testing::{Stop, wait_for};
use pvrdma_dev::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};
use pvrdma_verbs::testing::skipped;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

use super::DoorbellCounters;
use super::open::PageFile;
use super::stand_in::{entrust, tell_end};
use super::watcher::{Watch, Watcher};

const PAGE: usize = 4096;
/// Longer than any step takes; a test that waits for this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Environment variable with the script of a [`toucher`] process.
const SCRIPT: &str = "PVRDMAD_TEST_TOUCHES";

/// A file whose pages are served.
struct Place {
    watch: Arc<Watch>,
    counts: Arc<DoorbellCounters>,
    file: OwnedFd,
    pages: u32,
}

impl Place {
    /// Returns `None`, and prints the reason, where such files cannot be created.
    fn new(pages: u32) -> Option<Self> {
        let PageFile { device, file } = PageFile::make(pages).inspect_err(skipped).ok()?;
        let counts = Arc::<DoorbellCounters>::default();
        let watch = Watch::new("test", device, None, pages, Arc::clone(&counts)).unwrap();
        watch.take_over(false);
        Some(Self { watch, counts, file, pages })
    }

    fn map(&self) -> Mapping {
        Mapping::new(File::from(self.file.try_clone().unwrap()), self.pages)
    }

    fn faults(&self) -> u64 {
        self.counts.doorbell_faults.get()
    }

    /// Makes another process touch pages, and waits for its end.
    fn touched_by_another(&self, script: &str) {
        let test = "doorbells::tests::toucher";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--ignored", "--nocapture"]).env(SCRIPT, script);
        let status = child.stdin(self.file.try_clone().unwrap()).stdout(Stdio::null()).status().unwrap();
        assert!(status.success(), "{script}: {status}");
    }
}

/// The file as a VMM maps it.
struct Mapping(MmapRegion);

impl Mapping {
    fn new(file: File, pages: u32) -> Self {
        let size = pages as usize * PAGE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        Self(MmapRegion::build(Some(FileOffset::new(file, 0)), size, access, libc::MAP_SHARED).unwrap())
    }

    fn store(&self, page: u32, value: u32) {
        self.0.as_volatile_slice().store(value, page as usize * PAGE, Ordering::SeqCst).unwrap();
    }

    fn load(&self, page: u32) -> u32 {
        self.0.as_volatile_slice().load(page as usize * PAGE, Ordering::SeqCst).unwrap()
    }
}

/// Rings of a page each, of which only the indices exist.
struct Rings {
    posted: Vec<AtomicU64>,
    seen: Vec<AtomicU64>,
    mapped: Vec<AtomicBool>,
}

impl Rings {
    fn new(pages: u32) -> Arc<Self> {
        let numbers = || (0..pages).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            posted: numbers(),
            seen: numbers(),
            mapped: (0..pages).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    fn post(&self, mapping: &Mapping, page: u32) {
        let posted = self.posted[page as usize].fetch_add(1, Ordering::SeqCst);
        mapping.store(page, u32::try_from(posted & 0xffff).unwrap());
    }

    fn is_seen(&self, page: u32) -> bool {
        let [seen, posted] = [&self.seen, &self.posted].map(|list| list[page as usize].load(Ordering::SeqCst));
        seen == posted
    }
}

impl MappedDoorbells for Rings {
    fn doorbell_pages(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.posted.len()).unwrap()
    }

    fn page_touched(&self, page: u32) {
        self.mapped[page as usize].store(true, Ordering::SeqCst);
    }

    fn page_mapped(&self, _: u32) -> bool {
        false
    }

    fn pages_trapped(&self, _: &[u32], _: u64) {}

    fn poll_doorbells(&self, _now: u64, _depth: Depth) -> Outcome {
        let mut moved = 0;
        for page in (0..self.posted.len()).filter(|page| self.mapped[*page].load(Ordering::SeqCst)) {
            let posted = self.posted[page].load(Ordering::SeqCst);
            moved += u32::from(self.seen[page].swap(posted, Ordering::SeqCst) != posted);
        }
        Outcome { moved, ..Outcome::default() }
    }
}

/// The process that touches pages.
#[test]
#[ignore = "a process that the other tests of this file start"]
fn toucher() {
    let script = std::env::var(SCRIPT).unwrap();
    let file = File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let pages = 1024;
    let mapping = Mapping::new(file, pages);
    match script.as_str() {
        "each" => (1..pages).for_each(|page| mapping.store(page, page)),
        "each with huge pages" => {
            advise_huge(&mapping);
            (1..pages).for_each(|page| mapping.store(page, page));
        }
        "hammer" => (0..3_000_000).for_each(|value| mapping.store(1, value)),
        script => unreachable!("{script}"),
    }
}

/// Repeats the advice that QEMU gives for all memory that it maps for a guest.
#[expect(unsafe_code, reason = "advice, of which the C library has an unsafe function only")]
fn advise_huge(mapping: &Mapping) {
    let (address, size) = (mapping.0.as_ptr(), mapping.0.size());
    // SAFETY: it is a mapping of this size, and the advice does not change its content.
    assert_eq!(unsafe { libc::madvise(address.cast(), size, libc::MADV_HUGEPAGE) }, 0);
}

#[test]
fn each_touch_is_one_event() {
    let Some(place) = Place::new(1024) else { return };
    for (round, script) in (1..).zip(["each", "each with huge pages", "each"]) {
        place.touched_by_another(script);
        let mut touched = Vec::new();
        place.watch.pages().flags().take_touched(|page| touched.push(page));
        assert_eq!(touched, Vec::from_iter(1..1024), "{script}");
        assert_eq!((place.faults(), place.watch.pages().flags().events()), (round * 1023, round * 1023), "{script}");
        let taken = place.watch.pages().take_all();
        assert_eq!((taken.pages, taken.failed), (1023, 0), "{script}");
    }
}

/// Conformance 49: a page that was taken away is all zeros when it is present again.
#[test]
fn nothing_of_a_page_is_left_for_the_next_process() {
    let Some(place) = Place::new(8) else { return };
    let (first, second) = (place.map(), place.map());
    first.store(3, 0xdead_beef);
    assert_eq!((second.load(3), place.faults()), (0xdead_beef, 1), "both see one page");
    place.watch.renew(3);
    assert_eq!((second.load(3), place.faults()), (0, 2));
    assert_eq!((first.load(3), place.faults()), (0, 2));
}

#[test]
fn a_client_cannot_cut_the_file_short() {
    let Some(place) = Place::new(8) else { return };
    let mapping = place.map();
    mapping.store(7, 1);
    let file = File::from(place.file.try_clone().unwrap());
    assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    file.sync_all().unwrap();
    assert_eq!((file.metadata().unwrap().len(), mapping.load(7)), (8 * 4096, 1));
}

/// Pages of a device that has ended still belong to a running VMM.
#[test]
fn pages_are_served_until_their_last_mapping_ends() {
    let Some(place) = Place::new(8) else { return };
    let mapping = place.map();
    let watcher = Watcher::start(&place.watch, Rings::new(8), false).unwrap();
    mapping.store(1, 1);
    drop(watcher);
    let Place { watch, counts, file, .. } = place;
    watch.renew(1);
    let (left, faults) = (Arc::downgrade(&counts), counts.doorbell_faults.get());
    drop((watch, file));
    mapping.store(2, 1);
    mapping.store(1, 1);
    assert_eq!(counts.doorbell_faults.get(), faults + 2);
    drop((counts, mapping));
    wait_for("the end of the process that serves the pages", || (Weak::strong_count(&left) == 0).then_some(()));
}

/// A worker that was killed can keep its end of the pipe open: then the supervisor says that it serves no more.
#[test]
fn pages_are_served_in_place_of_a_process_that_closes_nothing() {
    let Ok(PageFile { device, file }) = PageFile::make(2).inspect_err(skipped) else { return };
    let (life, _open) = std::io::pipe().unwrap();
    let (supervisor, stand_in) = UnixStream::pair().unwrap();
    let serving = thread::spawn(move || super::stand_in::serve(stand_in));
    entrust(&supervisor, 2, device.as_fd(), life.as_fd()).unwrap();
    drop(device);
    let mapping = Mapping::new(File::from(file), 2);
    let (read, value) = mpsc::channel();
    thread::spawn(move || read.send(mapping.load(1)));
    tell_end(&supervisor).unwrap();
    assert_eq!(value.recv_timeout(PATIENCE), Ok(0));
    drop(supervisor);
    serving.join().unwrap().unwrap();
}

/// Only a touch wakes the watcher. A slow store may count as two: the page may be taken away before the store is
/// retried.
#[test]
fn the_watcher_sleeps_until_a_page_is_touched() {
    let Some(place) = Place::new(8) else { return };
    let (mapping, rings) = (place.map(), Rings::new(8));
    let watcher = Watcher::start(&place.watch, Arc::<Rings>::clone(&rings), false).unwrap();
    let DoorbellCounters { doorbell_sleeps, doorbell_arms, .. } = &*place.counts;
    for round in 1..=20_u64 {
        rings.post(&mapping, 5);
        let asleep = || rings.is_seen(5) && doorbell_sleeps.get() > round && place.watch.state() == "cold";
        wait_for("sleep", || asleep().then_some(()));
        let sleeps = doorbell_sleeps.get();
        let faults = place.faults();
        assert!((round..=faults).contains(&(sleeps - 1)), "{sleeps} sleeps, {faults} faults in {round} rounds");
        assert!(doorbell_arms.get() <= faults);
    }
    drop(watcher);
}

/// A process that stores all the time costs naps and an occasional invalidation.
#[test]
fn a_process_that_hammers_its_page_is_bounded() {
    let Some(place) = Place::new(1024) else { return };
    let watcher = Watcher::start(&place.watch, Rings::new(1024), true).unwrap();
    place.touched_by_another("hammer");
    let sleeps = &place.counts.doorbell_sleeps;
    wait_for("its end", || (place.watch.state() == "cold").then_some(()));
    drop(watcher);
    let [faults, arms] = [place.faults(), place.counts.doorbell_arms.get()];
    assert!(faults <= arms + 1, "{faults} faults, {arms} arms");
    // The rate of invalidations depends on time and is tested with `Pacer`.
    assert!(sleeps.get() <= arms + 2, "{} sleeps", sleeps.get());
}

/// Posts to random pages, while pages are taken away at random and the watcher is between sleeping and waking. No post
/// may be lost.
fn storm(posts: u32) {
    const PAGES: u32 = 16;
    let Some(place) = Place::new(PAGES) else { return };
    let (mapping, rings) = (place.map(), Rings::new(PAGES));
    let watcher = Watcher::start(&place.watch, Arc::<Rings>::clone(&rings), false).unwrap();
    let (over, taken) = (AtomicBool::new(false), AtomicU64::new(0));
    let seen = |page| wait_for("a post to be seen", || rings.is_seen(page).then_some(()));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            while !over.load(Ordering::Relaxed) {
                place.watch.pages().take_away(random.below(PAGES)).unwrap();
                taken.fetch_add(1, Ordering::Relaxed);
                (0..random.below(64)).for_each(|_| thread::yield_now());
            }
        });
        let _over = Stop(&over);
        let mut random = Random(1);
        for _ in 0..posts {
            let page = random.below(PAGES);
            rings.post(&mapping, page);
            match random.below(128) {
                0 => wait_for("sleep", || {
                    seen(page);
                    (place.watch.state() == "cold").then_some(())
                }),
                1..16 => seen(page),
                _ => {}
            }
        }
    });
    (0..PAGES).for_each(seen);
    wait_for("sleep", || (place.watch.state() == "cold").then_some(()));
    drop(watcher);
    let DoorbellCounters { doorbell_faults, doorbell_arms, doorbell_arms_late, doorbell_sleeps, .. } = &*place.counts;
    eprintln!(
        "{posts} posts, {} faults, {} arms, {} of them late, {} taken away, {} sleeps",
        doorbell_faults.get(),
        doorbell_arms.get(),
        doorbell_arms_late.get(),
        taken.load(Ordering::Relaxed),
        doorbell_sleeps.get()
    );
    assert!(doorbell_faults.get() <= doorbell_arms.get() + taken.load(Ordering::Relaxed) + u64::from(PAGES));
    assert!(doorbell_sleeps.get() > 1);
}

#[test]
fn no_post_is_lost() {
    storm(2_000);
}

#[test]
#[ignore = "takes minutes: run by name"]
fn slow_no_post_of_a_million_is_lost() {
    storm(1_000_000);
}

/// Rings whose owner posts at the worst moment: after the watcher has polled for the last time, and before it takes the
/// pages away. If it `forgets`, the poll after that is left out.
struct LatePost {
    rings: Arc<Rings>,
    mapping: Mapping,
    forgets: bool,
    /// Another thread is storing to the page, and may have to retry the store.
    storing: AtomicBool,
    /// The last poll was one of a watcher that is awake.
    awake: AtomicBool,
    posted: AtomicBool,
    left_out: AtomicBool,
}

impl LatePost {
    const PAGE: u32 = 3;

    fn new(mapping: Mapping, forgets: bool) -> Arc<Self> {
        let [storing, awake, posted, left_out] = [(); 4].map(|()| AtomicBool::new(false));
        Arc::new(Self { rings: Rings::new(8), mapping, forgets, storing, awake, posted, left_out })
    }
}

impl MappedDoorbells for LatePost {
    fn doorbell_pages(&self) -> std::ops::Range<u32> {
        self.rings.doorbell_pages()
    }

    fn page_touched(&self, page: u32) {
        self.rings.page_touched(page);
        // A watcher that is awake is told of each page once more before the page is taken away.
        let goes = self.awake.load(Ordering::SeqCst) && !self.storing.load(Ordering::SeqCst);
        if goes && !self.posted.swap(true, Ordering::SeqCst) {
            self.rings.post(&self.mapping, page);
        }
    }

    fn page_mapped(&self, page: u32) -> bool {
        self.rings.page_mapped(page)
    }

    fn pages_trapped(&self, pages: &[u32], now: u64) {
        self.rings.pages_trapped(pages, now);
    }

    fn poll_doorbells(&self, now: u64, depth: Depth) -> Outcome {
        self.awake.store(depth != Depth::All, Ordering::SeqCst);
        if self.forgets && self.posted.load(Ordering::SeqCst) && !self.left_out.swap(true, Ordering::SeqCst) {
            return Outcome::default();
        }
        self.rings.poll_doorbells(now, depth)
    }
}

/// A post just before the pages are taken away is found only by the poll after that: a watcher that omits this poll
/// goes to sleep with work pending, and no touch wakes it.
#[test]
fn the_poll_after_a_revocation_finds_the_last_posts() {
    for forgets in [false, true] {
        let Some(place) = Place::new(8) else { return };
        let (mapping, device) = (place.map(), LatePost::new(place.map(), forgets));
        let watcher = Watcher::start(&place.watch, Arc::<LatePost>::clone(&device), false).unwrap();
        let posted = || device.posted.load(Ordering::SeqCst);
        let cold = || place.watch.state() == "cold";
        while !posted() {
            device.storing.store(true, Ordering::SeqCst);
            device.rings.post(&mapping, LatePost::PAGE);
            device.storing.store(false, Ordering::SeqCst);
            let sleeps = || device.rings.is_seen(LatePost::PAGE) && cold();
            wait_for("a late post, or sleep", || (posted() || sleeps()).then_some(()));
        }
        let late = || place.counts.doorbell_arms_late.get() > 0;
        let over = || (late() || device.left_out.load(Ordering::SeqCst)) && cold();
        wait_for("sleep", || over().then_some(()));
        assert_eq!((device.rings.is_seen(LatePost::PAGE), late()), (!forgets, !forgets));
        drop(watcher);
    }
}

/// A pseudo-random number generator (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(end)).unwrap()
    }
}
