//! The thread of a device: waits for completions and events of the host.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::adapter::{Adapter, bump};
use crate::cq::Cq;
use crate::verbs::{Channel, HostDevice};
use crate::worker::Worker;

/// Rounds of polling between two looks at the descriptors.
const ROUNDS: u32 = 32;

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

fn wait(stop: &OwnedFd, device: &HostDevice, channel: &Channel, block: bool) -> Ready {
    let mut fds = [
        PollFd::new(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
    ];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match rustix::event::poll(&mut fds, if block { None } else { Some(&now) }) {
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

fn run(adapter: &Weak<Adapter>, stop: &OwnedFd, device: &HostDevice, channel: &Channel) {
    // Queues that are polled now. Each was announced, and is asked for the next announcement before it leaves.
    let mut busy: Vec<Arc<Cq>> = Vec::new();
    let mut last = Instant::now();
    loop {
        let ready = wait(stop, device, channel, busy.is_empty());
        if ready.stop {
            return;
        }
        let Some(adapter) = adapter.upgrade() else { return };
        if ready.completions {
            bump(&adapter.counters.wakeups);
            while let Some(address) = channel.next_event() {
                let cq = adapter.cqs.read().get(&address).and_then(Weak::upgrade);
                busy.extend(cq);
            }
            last = Instant::now();
        }
        if ready.events {
            while let Some(notice) = device.next_event() {
                adapter.notice(notice);
            }
        }
        for _ in 0..ROUNDS {
            let taken: usize = busy.iter().map(|cq| cq.drain(&adapter)).sum();
            if taken > 0 {
                last = Instant::now();
            } else if last.elapsed() >= adapter.shared.config.poll {
                busy.retain(|cq| sleepless(&adapter, cq));
                break;
            } else {
                thread::yield_now();
            }
        }
    }
}

/// Asks a queue to announce its next completion. Whether one came before it could.
fn sleepless(adapter: &Adapter, cq: &Cq) -> bool {
    match cq.host.arm() {
        Ok(()) => cq.drain(adapter) > 0,
        Err(error) => {
            log::error!("{}: a completion queue of the host cannot be watched: {error}", adapter.name);
            false
        }
    }
}
