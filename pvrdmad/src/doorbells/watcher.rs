//! Thread that polls a device's rings while stores to its doorbell pages cause no request.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use log::error;
use nix::time::ClockId;
use pvrdma_base::{
    LogLimit,
    threads::{self, ThreadKind},
};
use pvrdma_dev::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};
use pvrdma_handover::Waker;
use pvrdma_link::Bell;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::counts::DoorbellCounters;
use super::pacer::{Pacer, Step};
use super::pages::Pages;

/// The words of [`Pacer::word`], indexed so that another thread can read the state.
const WORDS: [&str; 4] = ["cold", "warm", "hot", "polled"];

/// Maximum length in nanoseconds of a piece of spinning that is reported to the pacer.
const SPIN_NOTED: u64 = 1_000_000;

/// State shared by the thread, the device and the thread that serves the pages.
#[derive(Debug)]
pub(super) struct Watch {
    name: String,
    start: Instant,
    /// Ends the thread's sleep.
    waker: Waker<Bell>,
    ends: AtomicBool,
    pages: Arc<Pages>,
    counts: Arc<DoorbellCounters>,
    state: AtomicU8,
    log: LogLimit,
}

impl Watch {
    /// Creates the pages of a file, and keeps `life` open as long as this process may serve them. They are not served
    /// yet, and the rings are not polled.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub(super) fn new(
        name: &str,
        device: OwnedFd,
        life: Option<OwnedFd>,
        pages: u32,
        counts: Arc<DoorbellCounters>,
    ) -> io::Result<Arc<Self>> {
        let bell = Bell::new()?;
        let (start, waker) = (Instant::now(), Waker::new(bell.clone()));
        let faults = Arc::clone(&counts);
        let told = move || {
            faults.doorbell_faults.increment();
            waker.wake();
        };
        let pages = Pages::new(name, device, life, pages, start, told)?;
        Ok(Arc::new(Self {
            name: name.to_owned(),
            start,
            waker: Waker::new(bell),
            ends: AtomicBool::new(false),
            pages,
            counts,
            state: AtomicU8::new(0),
            log: LogLimit::new(),
        }))
    }

    /// Returns the pages.
    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Returns `true` if a page was ever touched.
    pub(super) fn is_touched(&self) -> bool {
        self.pages.flags().events() > 0
    }

    /// Serves pages that another process has served. Any of them may be present, if there was a touch.
    pub(super) fn take_over(&self, touched: bool) {
        if touched {
            self.pages.flags().mark_all();
            self.wake();
        }
        self.pages.answer();
    }

    /// Returns the state of the thread as a word.
    pub(super) fn state(&self) -> &'static str {
        WORDS.get(usize::from(self.state.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    fn sleep(&self, due: Option<u64>) {
        let left = due.map(|due| Duration::from_nanos(due.saturating_sub(self.now())));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let wait = |bell: &Bell| rustix::event::poll(&mut [PollFd::new(bell, PollFlags::IN)], timeout.as_ref());
        // An error ends the sleep like any other event.
        let _ = self.waker.sleep(wait);
    }
}

impl DoorbellWatcher for Watch {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn wake(&self) {
        self.waker.wake();
    }

    fn renew(&self, page: u32) {
        // A restored device gives its pages to the same processes again. Another worker still answers the kernel.
        if !self.pages.is_answering() {
            return;
        }
        if let Err(error) = self.pages.take_away(page) {
            self.counts.doorbell_arms_failed.increment();
            self.log.error(module_path!(), &self.name, format_args!("doorbell page {page} keeps its content: {error}"));
            // The page counts as touched, because stores to a present page cause no request.
            self.wake();
        }
    }
}

/// Returns the processor time of this thread in nanoseconds.
fn processor_time() -> u64 {
    // `rustix` would first ask the kernel for the address of its vDSO, with a system call that the sandbox of this
    // thread forbids.
    let time = nix::time::clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Handle of the thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Watcher {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Polls the rings of `device` from now on. `spins`: a processor may be free for it.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn start(watch: &Arc<Watch>, device: Arc<dyn MappedDoorbells>, spins: bool) -> io::Result<Self> {
        let body =
            Body { watch: Arc::clone(watch), device, pacer: Pacer::new(spins), spin: None, events: 0, due: None };
        let thread = threads::spawn(ThreadKind::Doorbells, format!("{} doorbells", watch.name), move || body.run())?;
        Ok(Self { watch: Arc::clone(watch), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watch.ends.store(true, Ordering::SeqCst);
        self.watch.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last message of this thread.
            error!("{}: the thread that looks at rings panicked", self.watch.name);
        }
    }
}

struct Body {
    watch: Arc<Watch>,
    device: Arc<dyn MappedDoorbells>,
    pacer: Pacer,
    /// Start of the current spin: time of the watch, and processor time of this thread.
    spin: Option<(u64, u64)>,
    /// Number of touches that were handled.
    events: u64,
    /// Time of the next deadline.
    due: Option<u64>,
}

impl Body {
    fn run(mut self) {
        // With the default timer slack, naps would take three times as long.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        while !self.watch.ends.load(Ordering::SeqCst) {
            let now = self.watch.now();
            let step = self.pacer.next(now);
            self.note_spin(step, now);
            match step {
                Step::Spin => {
                    self.look(Depth::Hot);
                }
                Step::Nap(nap) => {
                    self.watch.counts.doorbell_naps.increment();
                    // A touch does not end the nap. Otherwise each touch would cause a poll.
                    thread::sleep(Duration::from_nanos(nap));
                    self.look(Depth::Hot);
                }
                Step::Rest(rest) => self.rest(rest),
                Step::Arm => self.arm(),
                Step::Block => self.block(),
            }
            let word = self.pacer.word(now);
            let state = WORDS.iter().position(|known| *known == word).and_then(|at| u8::try_from(at).ok());
            self.watch.state.store(state.unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Tells the pacer for how much of its spinning the thread had a processor.
    fn note_spin(&mut self, step: Step, now: u64) {
        let begins = || Some((now, processor_time()));
        match self.spin {
            None if step == Step::Spin => self.spin = begins(),
            Some((since, ran)) if step != Step::Spin || now.saturating_sub(since) >= SPIN_NOTED => {
                let ran = processor_time().saturating_sub(ran);
                self.pacer.spun(now, now.saturating_sub(since), ran);
                self.spin = (step == Step::Spin).then(begins).flatten();
            }
            _ => {}
        }
    }

    /// Polls rings with recent activity. Returns `true` if work was found or a request completed.
    fn look(&mut self, depth: Depth) -> bool {
        self.take_touched();
        let out = self.poll(depth);
        let now = self.watch.now();
        if out.completed {
            self.pacer.completed(now);
        }
        if out.moved > 0 {
            self.pacer.worked(now)
        } else {
            self.pacer.idled()
        }
        out.moved > 0 || out.completed
    }

    /// Polls, and rests if there was no work. The poll comes first, so that a completion after it ends the rest.
    fn rest(&mut self, rest: u64) {
        if !self.look(Depth::Rest) {
            self.watch.counts.doorbell_naps.increment();
            let until = self.watch.now().saturating_add(rest);
            self.watch.sleep(Some(self.due.map_or(until, |due| due.min(until))));
        }
    }

    /// Takes the pages away and polls everything once more. The poll finds work that was posted before the removal;
    /// work that is posted later touches a page.
    fn arm(&mut self) {
        let watch = Arc::clone(&self.watch);
        let before = watch.pages.flags().events();
        // A page may have been touched before it was assigned to its process, so the touch is reported again.
        watch.pages.flags().for_present(|page| self.device.page_touched(page));
        let taken = watch.pages.take_all();
        watch.counts.doorbell_arms.add(taken.pages);
        watch.counts.doorbell_arms_failed.add(taken.failed);
        self.take_touched();
        let out = self.poll(Depth::All);
        let now = watch.now();
        if out.moved > 0 {
            watch.counts.doorbell_arms_late.increment();
            self.pacer.worked(now);
        } else if taken.failed > 0 || watch.pages.flags().events() != before {
            self.pacer.refused(now);
        } else {
            self.pacer.armed(now);
        }
    }

    /// Sleeps until a page is touched or a deadline passes.
    fn block(&mut self) {
        let watch = Arc::clone(&self.watch);
        watch.counts.doorbell_sleeps.increment();
        watch.sleep(self.due);
        let touched = self.take_touched();
        let out = self.poll(Depth::All);
        let now = watch.now();
        if out.moved > 0 {
            self.pacer.worked(now);
        } else if touched {
            self.pacer.touched(watch.pages.last(), now);
        }
    }

    fn poll(&mut self, depth: Depth) -> Outcome {
        let out = self.device.poll_doorbells(self.watch.now(), depth);
        self.due = out.due;
        out
    }

    /// Reports touched pages to the device. Returns `true` if there were any.
    fn take_touched(&mut self) -> bool {
        let events = self.watch.pages.flags().events();
        if events == self.events {
            return false;
        }
        self.events = events;
        self.watch.pages.flags().take_touched(|page| self.device.page_touched(page));
        true
    }
}
