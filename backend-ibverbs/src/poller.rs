//! Poller thread of a device: waits for completions and events of the host.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use pvrdma_base::threads::ThreadKind;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::counters::bump;
use crate::cq::Cq;
use crate::events;
use crate::objects::Objects;
use crate::reap;
use crate::verbs::{Channel, HostDevice};
use crate::worker::Worker;

/// Number of polling rounds between two checks of the descriptors.
const ROUNDS: u32 = 32;
/// Interval within which a polling guest must poll at least once. A guest that stops polling without arming its queue
/// may wait this long, once. A shorter interval would cause more wake-ups, which matter on hosts with few and slow
/// processors.
const GUEST_POLLS: Duration = Duration::from_millis(10);

/// Starts the thread.
pub(crate) fn start(objects: &Arc<Objects>) -> io::Result<Worker> {
    let weak = Arc::downgrade(objects);
    let adapter = &objects.adapter;
    let (device, channel) = (Arc::clone(&adapter.device), Arc::clone(&adapter.channel));
    Worker::start(ThreadKind::HostEvents, &format!("ibv-{}", adapter.name), move |stop| {
        run(&weak, stop, &device, &channel)
    })
}

/// Descriptors that are ready.
struct Ready {
    stop: bool,
    completions: bool,
    events: bool,
}

fn wait(stop: &OwnedFd, device: &HostDevice, channel: &Channel, timeout: Option<Duration>) -> Ready {
    let mut fds = [
        PollFd::new(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
    ];
    // Both timeouts are constants of this module for which the conversion cannot fail.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    loop {
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => {
                // Log: the last of this thread.
                log::error!("cannot wait for the host's completions: {error}");
                return Ready { stop: true, completions: false, events: false };
            }
            Ok(_) => break,
        }
    }
    let [stop, completions, events] = fds.map(|fd| !fd.revents().is_empty());
    Ready { stop, completions, events }
}

/// A queue that is not armed, because it is being polled.
struct Polled {
    cq: Arc<Cq>,
    /// Number of the guest's polls when this was last checked.
    guest_polls: u64,
}

impl Polled {
    fn new(cq: Arc<Cq>) -> Self {
        Self { guest_polls: cq.guest_polls(), cq }
    }

    /// Returns `true` if the guest has polled since the last call, and does not wait for an event.
    fn is_the_guests(&mut self) -> bool {
        let before = mem::replace(&mut self.guest_polls, self.cq.guest_polls());
        before != self.guest_polls && !self.cq.is_arm_wanted()
    }
}

/// Queues that are not armed. A queue is armed, polled by this thread, or polled by its guest.
#[derive(Default)]
struct Queues {
    /// Queues polled by this thread, each for a while after its last completion.
    busy: Vec<Polled>,
    /// Queues that their guests poll by doorbells, which find completions sooner than this thread could. This thread
    /// only checks that the guests continue to poll.
    guests: Vec<Polled>,
}

impl Queues {
    /// Returns how long the thread may sleep. `None`: without a timeout.
    fn timeout(&self) -> Option<Duration> {
        if !self.busy.is_empty() {
            Some(Duration::ZERO)
        } else if !self.guests.is_empty() {
            Some(GUEST_POLLS)
        } else {
            None
        }
    }

    /// Handles a completion event.
    fn event_came(&mut self, cq: Arc<Cq>) {
        cq.event_came();
        self.guests.retain(|known| !Arc::ptr_eq(&known.cq, &cq));
        if !self.busy.iter().any(|known| Arc::ptr_eq(&known.cq, &cq)) {
            self.busy.push(Polled::new(cq));
        }
    }

    /// Polls all busy queues. Returns the number of completions taken.
    fn poll(&self, objects: &Objects) -> usize {
        self.busy.iter().map(|known| reap::drain(&known.cq, &objects.adapter, &objects.qps)).sum()
    }

    /// Stops polling: leaves queues to guests that poll them, and arms the others.
    fn stop_polling(&mut self, objects: &Objects) {
        for mut known in mem::take(&mut self.busy) {
            if known.cq.is_armed() {
                continue;
            }
            if known.is_the_guests() {
                self.guests.push(known);
            } else if reap::arm_and_drain(&known.cq, &objects.adapter, &objects.qps) {
                self.busy.push(known);
            }
        }
    }

    /// Arms the queues of guests that have stopped polling.
    fn check_guests(&mut self, objects: &Objects) {
        let Self { busy, guests } = self;
        guests.retain_mut(|known| {
            if known.cq.is_armed() {
                return false;
            }
            if known.is_the_guests() {
                return true;
            }
            if reap::arm_and_drain(&known.cq, &objects.adapter, &objects.qps) {
                busy.push(Polled::new(Arc::clone(&known.cq)));
            }
            false
        });
    }
}

fn run(objects: &Weak<Objects>, stop: &OwnedFd, device: &HostDevice, channel: &Channel) {
    let mut queues = Queues::default();
    let mut last = Instant::now();
    let mut checked = last;
    loop {
        let ready = wait(stop, device, channel, queues.timeout());
        if ready.stop {
            return;
        }
        let Some(objects) = objects.upgrade() else { return };
        if ready.completions {
            bump(&objects.adapter.counters.wakeups);
            while let Some(address) = channel.next_event() {
                if let Some(cq) = objects.cqs.get(address) {
                    queues.event_came(cq);
                }
            }
            last = Instant::now();
        }
        if ready.events {
            while let Some(event) = device.next_event(|event| events::look_up(&objects, event)) {
                events::dispatch(&objects, event);
            }
        }
        if !queues.guests.is_empty() && checked.elapsed() >= GUEST_POLLS {
            queues.check_guests(&objects);
            checked = Instant::now();
        }
        for _ in 0..ROUNDS {
            if queues.busy.is_empty() {
                break;
            } else if queues.poll(&objects) > 0 {
                last = Instant::now();
            } else if last.elapsed() >= objects.adapter.shared.config.poll {
                queues.stop_polling(&objects);
                break;
            } else {
                thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs::{CompletionQueue, testing::Node};

    use super::*;
    use crate::fake::FakeBackend;

    /// The guest polls, requests an event after the event of an earlier completion was raised but not read, and polls
    /// once more.
    #[test]
    fn a_guest_that_armed_is_notified() {
        let node = Node::new(&FakeBackend::new(), 1);
        let objects = node.hca.objects();
        let polls_after = |asks| {
            let (handle, _sink) = node.cq();
            let mut queues = Queues::default();
            if asks {
                handle.notify_arm();
            }
            queues.event_came(Arc::clone(&handle.cq));
            handle.notify_poll();
            queues.stop_polling(objects);
            (queues.guests.len(), handle.cq.is_armed())
        };
        assert_eq!(polls_after(false), (1, false));
        assert_eq!(polls_after(true), (0, true));
    }
}
