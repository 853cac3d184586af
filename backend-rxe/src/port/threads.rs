//! Threads of a port. The first one waits for the links. With more than one, the others help it when frames arrive
//! faster than it handles them: a thread that is free reads the next batch, and empties receive queues that no other
//! thread is emptying.

use std::hint;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_link::Bell;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{Port, SOON};

/// Time for which a thread polls for more work before it sleeps: about the time that waking it takes.
const LINGER: Duration = Duration::from_micros(50);

impl Port {
    /// Starts the threads of a port, one for each receive queue.
    pub(super) fn start_threads(self: &Arc<Self>, threads: &mut Vec<JoinHandle<()>>) -> io::Result<()> {
        let me = Arc::clone(self);
        threads.push(threads::spawn(ThreadKind::Port, format!("port-{}", self.mac), move || me.work())?);
        for number in 1..self.queues.len() {
            let me = Arc::clone(self);
            let name = format!("port-{}-{number}", self.mac);
            threads.push(threads::spawn(ThreadKind::Port, name, move || me.help())?);
        }
        Ok(())
    }

    /// Makes the threads end. Does not wait for them.
    pub(super) fn end_threads(&self) {
        self.stopping.store(true, Ordering::Release);
        self.helpers.end();
        self.wake();
    }

    fn work(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            if !self.service_timed() {
                self.wait();
            }
        }
    }

    fn help(&self) {
        while self.helpers.wait() {
            let mut idle_since = None;
            while !self.stopping.load(Ordering::Acquire) {
                if self.service_timed() {
                    idle_since = None;
                } else if self.now() >= *idle_since.get_or_insert_with(|| self.now()) + LINGER {
                    break;
                } else {
                    rest();
                }
            }
            // The first thread may be waiting for an event that this thread has consumed.
            self.wake();
        }
    }

    fn service_timed(&self) -> bool {
        let began = self.now();
        let busy = self.service();
        self.share.add_port_time(self.now().saturating_sub(began));
        busy
    }

    /// Blocks until a link has an event, or another thread wakes this one.
    fn wait(&self) {
        if !(self.queues.are_many() && self.wait_for_helper()) {
            self.waker.sleep(|bell| self.wait_for_links(bell));
        }
    }

    fn wait_for_links(&self, bell: &Bell) {
        let ends: Vec<_> = self.ends().map(|end| (end.link.readiness(), end.is_blocked())).collect();
        let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
        for (readiness, full) in &ends {
            for fd in [&readiness.readable, &readiness.changed].into_iter().flatten() {
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
            }
            if let (Some(fd), true) = (&readiness.writable, full) {
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT));
            }
        }
        // A link that is gone never becomes writable. Frames that wait for it are flushed into it, and are lost there.
        let stuck = ends.iter().any(|(readiness, full)| *full && readiness.writable.is_none());
        let wait = ends.iter().filter_map(|(readiness, _)| readiness.wait).chain(stuck.then_some(SOON)).min();
        let timeout = wait.and_then(|wait| Timespec::try_from(wait).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                self.log.error(module_path!(), "port", format_args!("{}: cannot wait: {errno}", self.mac));
                std::thread::sleep(SOON);
            }
        }
    }

    /// Waits for a helper that reads, or that works on a full queue. Returns `false` if there is none. The link stays
    /// readable meanwhile, so waiting for the link would return immediately.
    fn wait_for_helper(&self) -> bool {
        let full = || self.queues.iter().find(|queue| queue.is_full());
        let since = self.now();
        while self.reading.is_locked() || full().is_some() {
            if self.now() >= since + LINGER {
                drop(self.reading.lock());
                full().inspect(|queue| queue.wait());
                return true;
            }
            rest();
        }
        false
    }
}

/// Spins for a fraction of a microsecond.
fn rest() {
    (0..32).for_each(|_| hint::spin_loop());
}
