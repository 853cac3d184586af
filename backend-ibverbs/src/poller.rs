//! The thread of a device: waits for completions and events of the host.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::adapter::{Adapter, bump};
use crate::cq::Cq;
use crate::verbs::{Channel, HostDevice};
use crate::worker::Worker;

/// Rounds of polling between two looks at the descriptors.
const ROUNDS: u32 = 32;
/// A guest that polls looks at its queue in any time of this length. One that stops without asking to be told may have to wait
/// for so long, once; waking up more often is felt where processors are few and slow.
const GUEST_LOOKS: Duration = Duration::from_millis(10);

/// Starts the thread.
pub(crate) fn start(adapter: &Arc<Adapter>) -> io::Result<Worker> {
    let weak = Arc::downgrade(adapter);
    let (device, channel) = (Arc::clone(&adapter.device), Arc::clone(&adapter.channel));
    Worker::start(&format!("ibv-{}", adapter.name), move |stop| run(&weak, stop, &device, &channel))
}

/// What there is to do.
struct Ready {
    stop: bool,
    completions: bool,
    events: bool,
}

fn wait(stop: &OwnedFd, device: &HostDevice, channel: &Channel, patience: Option<Duration>) -> Ready {
    let mut fds = [
        PollFd::new(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
    ];
    // Both constants of this module fit.
    let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
    loop {
        match rustix::event::poll(&mut fds, patience.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => {
                log::error!("cannot wait for the host's completions: {error}");
                return Ready { stop: true, completions: false, events: false };
            }
            Ok(_) => break,
        }
    }
    let [stop, completions, events] = fds.map(|fd| !fd.revents().is_empty());
    Ready { stop, completions, events }
}

/// A queue that the host does not announce: somebody looks at it.
struct Watched {
    cq: Arc<Cq>,
    /// How often its guest had looked.
    looks: u64,
}

impl Watched {
    fn new(cq: Arc<Cq>) -> Self {
        Self { looks: cq.looks(), cq }
    }

    /// Whether the guest has looked since this was last asked.
    fn guest_looks(&mut self) -> bool {
        let before = mem::replace(&mut self.looks, self.cq.looks());
        before != self.looks
    }
}

/// A queue is announced by the host, or polled by this thread, or polled by its guest.
#[derive(Default)]
struct Queues {
    /// Polled here, each for a while after its last completion.
    busy: Vec<Watched>,
    /// Polled by their guests' doorbells, which find completions sooner than this thread could; it only makes sure that they
    /// go on.
    guests: Vec<Watched>,
}

impl Queues {
    /// How long the thread may sleep.
    fn patience(&self) -> Option<Duration> {
        if !self.busy.is_empty() {
            Some(Duration::ZERO)
        } else if !self.guests.is_empty() {
            Some(GUEST_LOOKS)
        } else {
            None
        }
    }

    fn announced(&mut self, cq: Arc<Cq>) {
        cq.announced();
        self.guests.retain(|known| !Arc::ptr_eq(&known.cq, &cq));
        if !self.busy.iter().any(|known| Arc::ptr_eq(&known.cq, &cq)) {
            self.busy.push(Watched::new(cq));
        }
    }

    /// Completions that were taken.
    fn poll(&self, adapter: &Adapter) -> usize {
        self.busy.iter().map(|known| known.cq.drain(adapter)).sum()
    }

    /// Leaves queues to their guests, if these look, and to the host otherwise.
    fn stop_polling(&mut self, adapter: &Adapter) {
        for mut known in mem::take(&mut self.busy) {
            if known.cq.is_armed() {
                continue;
            }
            if known.guest_looks() {
                self.guests.push(known);
            } else if known.cq.watch(adapter) {
                self.busy.push(known);
            }
        }
    }

    /// Guests that have not looked for a while are told by the host again.
    fn check_guests(&mut self, adapter: &Adapter) {
        let Self { busy, guests } = self;
        guests.retain_mut(|known| {
            if known.cq.is_armed() {
                return false;
            }
            if known.guest_looks() {
                return true;
            }
            if known.cq.watch(adapter) {
                busy.push(Watched::new(Arc::clone(&known.cq)));
            }
            false
        });
    }
}

fn run(adapter: &Weak<Adapter>, stop: &OwnedFd, device: &HostDevice, channel: &Channel) {
    let mut queues = Queues::default();
    let mut last = Instant::now();
    let mut checked = last;
    loop {
        let ready = wait(stop, device, channel, queues.patience());
        if ready.stop {
            return;
        }
        let Some(adapter) = adapter.upgrade() else { return };
        if ready.completions {
            bump(&adapter.counters.wakeups);
            while let Some(address) = channel.next_event() {
                if let Some(cq) = adapter.cqs.read().get(&address).and_then(Weak::upgrade) {
                    queues.announced(cq);
                }
            }
            last = Instant::now();
        }
        if ready.events {
            while let Some(notice) = device.next_event() {
                adapter.notice(notice);
            }
        }
        if !queues.guests.is_empty() && checked.elapsed() >= GUEST_LOOKS {
            queues.check_guests(&adapter);
            checked = Instant::now();
        }
        for _ in 0..ROUNDS {
            if queues.busy.is_empty() {
                break;
            } else if queues.poll(&adapter) > 0 {
                last = Instant::now();
            } else if last.elapsed() >= adapter.shared.config.poll {
                queues.stop_polling(&adapter);
                break;
            } else {
                thread::yield_now();
            }
        }
    }
}
