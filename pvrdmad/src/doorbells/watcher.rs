//! The thread that looks at a device's rings while its doorbells are not heard.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use log::error;
use nix::time::ClockId;
use pvrdma_dev::{Depth, DoorbellWatcher, MappedDoorbells, Outcome};
use pvrdma_ether_link::Bell;
use pvrdma_handover::Waker;
use pvrdma_verbs::LogLimit;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::DoorbellCounters;
use super::pacer::{Pacer, Step};
use super::pages::Pages;

/// The words of [`Pacer::word`], to be told by another thread.
const WORDS: [&str; 4] = ["cold", "warm", "hot", "polled"];

/// Spinning is judged in pieces of this length, in nanoseconds, if it does not end before.
const SPIN_NOTED: u64 = 1_000_000;

/// What the thread, the device and whoever serves the pages share.
#[derive(Debug)]
pub(super) struct Watch {
    name: String,
    start: Instant,
    /// Ends the thread's sleep.
    waker: Waker<Bell>,
    ends: AtomicBool,
    /// Set once, before anybody has the file.
    pages: Arc<Pages>,
    counts: Arc<DoorbellCounters>,
    state: AtomicU8,
    log: LogLimit,
}

impl Watch {
    /// Serves the pages of a file, and keeps `life` meanwhile; nobody looks at rings yet.
    ///
    /// # Errors
    /// There is no room for a thread or a descriptor.
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
            // It goes with the thread that tells.
            let _ = &life;
        };
        let pages = Pages::serve(name, device, pages, start, told)?;
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

    /// The pages.
    #[cfg(test)]
    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// What the thread does now, in a word.
    pub(super) fn state(&self) -> &'static str {
        WORDS.get(usize::from(self.state.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    fn sleep(&self, due: Option<u64>) {
        let left = due.map(|due| Duration::from_nanos(due.saturating_sub(self.now())));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let wait = |bell: &Bell| rustix::event::poll(&mut [PollFd::new(bell, PollFlags::IN)], timeout.as_ref());
        // An error is an end of the sleep like any other.
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
        if let Err(error) = self.pages.take_away(page) {
            self.counts.doorbell_arms_failed.increment();
            self.log.error(
                module_path!(),
                &self.name,
                format_args!("doorbell page {page} keeps what is in it: {error}"),
            );
            // It counts as touched: its process is not heard.
            self.wake();
        }
    }
}

/// Nanoseconds that this thread has had a processor.
fn processor_time() -> u64 {
    // That of `rustix` asks the kernel first where its own is to be found, by a call that this thread may not make.
    let time = nix::time::clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The thread. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Watcher {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Looks at the rings of `device` from now on. `spins`: there may be a processor to spare.
    ///
    /// # Errors
    /// There is no room for a thread.
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
            // Log: the last of this thread.
            error!("{}: the thread that looks at rings panicked", self.watch.name);
        }
    }
}

struct Body {
    watch: Arc<Watch>,
    device: Arc<dyn MappedDoorbells>,
    pacer: Pacer,
    /// When it began to spin, by the watch and by the processor time of this thread.
    spin: Option<(u64, u64)>,
    /// Touches that were seen.
    events: u64,
    /// When something is due.
    due: Option<u64>,
}

impl Body {
    fn run(mut self) {
        // As it is by default naps would take three times as long.
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
                    // Whoever touches does not end it: that would be one look for each touch.
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

    /// Tells the pacer how much of the time in which it spun this thread had a processor.
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

    /// A look at what is hot. Returns `true` if something happened: it was found, or has completed.
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

    /// Looks first: what completes from then on ends the rest.
    fn rest(&mut self, rest: u64) {
        if !self.look(Depth::Rest) {
            self.watch.counts.doorbell_naps.increment();
            let until = self.watch.now().saturating_add(rest);
            self.watch.sleep(Some(self.due.map_or(until, |due| due.min(until))));
        }
    }

    /// Takes the pages away, and looks at everything once more: what was posted before is found, what comes after is
    /// a touch.
    fn arm(&mut self) {
        let watch = Arc::clone(&self.watch);
        let before = watch.pages.flags().events();
        // A page may have been touched before its process had it.
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

    /// Sleeps until a page is touched, or something is due.
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

    /// Tells the device which pages were touched. Returns `true` if some were.
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
