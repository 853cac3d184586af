//! State of a device's pages in the kernel, and the thread that answers the kernel's requests for them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use log::error;
use parking_lot::{Condvar, Mutex};
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_handover::{KeptPages, PresentPages, Taken};
use pvrdma_link::Bell;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::fuse::{Connection, Notifier, REQUEST, Served};

/// Time for the thread to answer its current request.
const CURRENT: Duration = Duration::from_secs(1);

/// Pages of a device. They are served as long as a process has them mapped, even after the device has ended.
///
/// For a hand-over, two processes have the connection to the kernel, and one of them answers: [`Self::stop`] ends the
/// answers of this process, and [`Self::answer`] begins them. Meanwhile, a processor of the guest that touches an
/// absent page waits, as does a thread that takes a page away.
#[derive(Debug)]
pub(super) struct Pages {
    notifier: Notifier,
    flags: PresentPages,
    /// Time of the last touch, in nanoseconds after `start`.
    last: AtomicU64,
    start: Instant,
    turn: Mutex<Turn>,
    /// Notified when `turn` changes.
    changed: Condvar,
    /// Makes the thread look at `turn`.
    bell: Bell,
    /// Open as long as this process answers the kernel, now or later.
    life: Mutex<Option<OwnedFd>>,
}

/// Process whose turn it is to answer the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    /// This process.
    Here,
    /// This process, until the thread has answered the current request.
    Ending,
    /// Another process.
    There,
    /// The thread has ended.
    Over,
}

impl Pages {
    /// Creates the state of `count` pages of a file, with the thread that answers the kernel from [`Self::answer`] on,
    /// until the file is no longer open or mapped anywhere. Then `life` is closed. `told` is called for each touch,
    /// before the touching processor continues.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub(super) fn new(
        name: &str,
        device: OwnedFd,
        life: Option<OwnedFd>,
        count: u32,
        start: Instant,
        told: impl Fn() + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let pages = Arc::new(Self {
            notifier: Notifier::of(&device)?,
            flags: PresentPages::new(count),
            last: AtomicU64::new(0),
            start,
            turn: Mutex::new(Turn::There),
            changed: Condvar::new(),
            bell: Bell::new()?,
            life: Mutex::new(life),
        });
        let (answering, name) = (Answering(Arc::clone(&pages)), name.to_owned());
        threads::spawn(ThreadKind::DoorbellPages, format!("{name} pages"), move || {
            if let Err(problem) = answering.run(&Connection::new(device, count), told) {
                // Log: the last message of this thread.
                error!("{name}: doorbell pages: {problem}");
            }
        })?;
        Ok(pages)
    }

    /// Returns `true` if this process answers the kernel.
    pub(super) fn is_answering(&self) -> bool {
        *self.turn.lock() != Turn::There
    }

    /// Begins to answer the kernel.
    pub(super) fn answer(&self) {
        let mut turn = self.turn.lock();
        if *turn == Turn::There {
            *turn = Turn::Here;
            self.changed.notify_all();
        }
    }

    /// Stops answering the kernel, until the result is dropped. When this returns, the thread has answered each request
    /// that it has read.
    ///
    /// # Errors
    /// The thread has ended, or is stuck; it continues in that case.
    pub(super) fn stop(&self) -> io::Result<StoppedPages<'_>> {
        // This waits for a thread that takes a page away. It comes first, because that thread waits for this process to
        // answer the kernel.
        let kept = self.flags.keep();
        let mut turn = self.turn.lock();
        match *turn {
            Turn::Here => *turn = Turn::Ending,
            Turn::There => return Err(io::Error::other("another process serves the doorbell pages")),
            Turn::Ending | Turn::Over => {}
        }
        self.bell.ring();
        let deadline = Instant::now() + CURRENT;
        while *turn == Turn::Ending {
            if self.changed.wait_until(&mut turn, deadline).timed_out() && *turn == Turn::Ending {
                *turn = Turn::Here;
            }
        }
        match *turn {
            Turn::There => Ok(StoppedPages { pages: self, _kept: kept }),
            Turn::Over => Err(io::Error::other("doorbell pages are not served any more")),
            Turn::Here | Turn::Ending => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Ends a thread that has not begun to answer: another process serves the pages.
    pub(super) fn leave(&self) {
        let mut turn = self.turn.lock();
        if *turn == Turn::There {
            *turn = Turn::Over;
            self.changed.notify_all();
        }
    }

    /// Returns duplicates of the connection to the kernel and of `life`.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(super) fn duplicates(&self) -> io::Result<(OwnedFd, Option<OwnedFd>)> {
        let life = self.life.lock().as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok((self.notifier.connection()?, life))
    }

    /// Marks a page before its touch is answered.
    fn mark(&self, page: u32) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::SeqCst);
        self.flags.mark(page);
    }

    /// Returns the flags of present and touched pages.
    pub(super) const fn flags(&self) -> &PresentPages {
        &self.flags
    }

    /// Returns the time of the last touch.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Takes a page away: stored values are discarded, and the next store to it causes a request.
    ///
    /// # Errors
    /// The kernel failed: the page may still be present.
    pub(super) fn take_away(&self, page: u32) -> io::Result<()> {
        self.flags.take_away(page, || self.notifier.invalidate(page))
    }

    /// Takes all present pages away.
    pub(super) fn take_all(&self) -> Taken {
        self.flags.take_all(|page| self.notifier.invalidate(page))
    }
}

/// Pages for which this process does not answer the kernel. Dropping it answers again.
#[derive(Debug)]
pub(super) struct StoppedPages<'a> {
    pages: &'a Pages,
    _kept: KeptPages<'a>,
}

impl Drop for StoppedPages<'_> {
    fn drop(&mut self) {
        self.pages.answer();
    }
}

/// Thread that answers the kernel.
struct Answering(Arc<Pages>);

impl Answering {
    fn run(&self, connection: &Connection, told: impl Fn()) -> io::Result<()> {
        // No lock is taken in here: a virtual processor of the guest waits for the reply, and its VMM may hold a lock
        // of its own meanwhile.
        let touched = |page| {
            self.0.mark(page);
            told();
        };
        let mut buffer = vec![0; REQUEST];
        let mut is_over = !self.wait();
        while !is_over {
            let mut poll = [PollFd::new(connection, PollFlags::IN), PollFd::new(&self.0.bell, PollFlags::IN)];
            match rustix::event::poll(&mut poll, None) {
                Ok(_) if !poll[1].revents().is_empty() => is_over = !self.wait(),
                // The connection does not block, because a request may be withdrawn before it is read.
                Ok(_) => is_over = connection.serve(&mut buffer, &touched)? == Served::Ended,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits until it is the turn of this process. Returns `false` if that will never be.
    fn wait(&self) -> bool {
        self.0.bell.clear();
        let mut turn = self.0.turn.lock();
        if *turn == Turn::Ending {
            *turn = Turn::There;
            self.0.changed.notify_all();
        }
        while *turn == Turn::There {
            self.0.changed.wait(&mut turn);
        }
        *turn != Turn::Over
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        *self.0.turn.lock() = Turn::Over;
        self.0.changed.notify_all();
        *self.0.life.lock() = None;
    }
}
