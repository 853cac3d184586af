//! The thread that sends for a device.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::message::{LONGEST, Outgoing};
use super::umad::Umad;
use crate::adapter::{Adapter, Counters, bump};
use crate::gid::HostGids;
use crate::worker::{Worker, wait};

/// Datagrams that wait. A guest repeats what is lost.
const MAX_WAITING: usize = 64;

/// Sends what it is given, in order, until dropped; what waits then is lost.
pub(crate) struct Sender {
    queue: Arc<Queue>,
    _thread: Worker,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

struct Queue {
    waiting: Mutex<VecDeque<Outgoing>>,
    /// Readable once for each that waits.
    count: OwnedFd,
}

impl Sender {
    pub(super) fn start(file: Umad, gids: HostGids, adapter: &Adapter) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let queue = Arc::new(Queue { waiting: Mutex::default(), count: rustix::event::eventfd(0, flags)? });
        let device = Device {
            name: adapter.name.clone(),
            counters: Arc::clone(&adapter.counters),
            queue: Arc::clone(&queue),
            file,
            gids,
        };
        let thread = Worker::start(&format!("ibcm-{}", adapter.name), move |stop| {
            if let Err(error) = device.run(stop) {
                log::error!("{}: the connection manager sends nothing any more: {error}", device.name);
            }
        })?;
        Ok(Self { queue, _thread: thread })
    }

    /// `false` when too many wait already.
    pub(crate) fn send(&self, outgoing: Outgoing) -> bool {
        let mut waiting = self.queue.waiting.lock();
        if waiting.len() >= MAX_WAITING || rustix::io::write(&self.queue.count, &1_u64.to_ne_bytes()).is_err() {
            return false;
        }
        waiting.push_back(outgoing);
        true
    }
}

/// What the thread has.
struct Device {
    name: String,
    counters: Arc<Counters>,
    queue: Arc<Queue>,
    file: Umad,
    gids: HostGids,
}

impl Device {
    fn run(&self, stop: &OwnedFd) -> io::Result<()> {
        let mut room = vec![0; LONGEST];
        loop {
            let mut files = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&self.queue.count, PollFlags::IN),
                PollFd::new(&self.file, PollFlags::IN),
            ];
            wait(&mut files)?;
            let [stopped, waiting, arrived] = files.map(|file| file.revents());
            if !stopped.is_empty() {
                return Ok(());
            }
            // Some answers of other classes find any agent whose number a peer guesses. Nobody asked for them.
            if !arrived.is_empty() {
                match self.file.read(&mut room)? {
                    Some(_) => bump(&self.counters.cm_refused),
                    None if !arrived.contains(PollFlags::IN) => {
                        return Err(io::Error::other("the host's device is gone"));
                    }
                    None => {}
                }
            }
            // One at a time, so that this thread ends soon when it is to end.
            if !waiting.is_empty() && rustix::io::read(&self.queue.count, &mut [0; 8]).is_ok() {
                let next = self.queue.waiting.lock().pop_front();
                if let Some(outgoing) = next {
                    self.write(&outgoing);
                }
            }
        }
    }

    fn write(&self, outgoing: &Outgoing) {
        // The index may have been given to another address since the guest bound its own.
        if self.gids.entry(outgoing.source.index) != Some(outgoing.source) {
            log::debug!("{}: the host does not have {} any more", self.name, outgoing.source.gid);
            return bump(&self.counters.cm_refused);
        }
        match self.file.write(&outgoing.encode(self.file.agent())) {
            Ok(()) => bump(&self.counters.cm_sent),
            Err(error) => {
                log::debug!("{}: a management datagram to {} is lost: {error}", self.name, outgoing.peer());
                bump(&self.counters.cm_failed);
            }
        }
    }
}
