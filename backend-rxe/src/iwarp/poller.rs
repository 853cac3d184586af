//! Sockets of a device, and their events.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::meeting::{READABLE, StreamLink, WRITABLE};

/// Number of events that are taken at a time.
const BATCH: usize = 64;

/// Owner of a file.
#[derive(Clone, Debug)]
pub(super) enum Watched {
    /// The file that reports work.
    Work,
    /// A listening socket.
    Listener,
    /// A socket that a peer has connected, until its request is complete.
    Incoming,
    /// The startup of the connection with this key.
    Startup(u32),
    /// The queue pair of a connection.
    Stream(Weak<StreamLink>),
    /// The socket of a connection that has ended.
    Closing,
}

/// Files of a device, by numbers that are never reused.
#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    watched: HashMap<u64, Watched>,
    next: u64,
}

impl Poller {
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, watched: HashMap::new(), next: 1 })
    }

    /// Watches a file whose events are reported for as long as it is ready.
    pub(super) fn add_level(&mut self, file: &impl AsFd, watched: Watched) -> io::Result<u64> {
        self.add(file, watched, epoll::EventFlags::IN)
    }

    /// Watches a socket that is reported once whenever it becomes ready: its owner uses it until that fails.
    pub(super) fn add_edge(&mut self, file: &impl AsFd, watched: Watched) -> io::Result<u64> {
        self.add(file, watched, epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET)
    }

    fn add(&mut self, file: &impl AsFd, watched: Watched, flags: epoll::EventFlags) -> io::Result<u64> {
        let token = self.next;
        epoll::add(&self.epoll, file, epoll::EventData::new_u64(token), flags)?;
        self.next = self.next.wrapping_add(1);
        self.watched.insert(token, watched);
        Ok(token)
    }

    /// Gives a file to another owner.
    pub(super) fn give(&mut self, token: u64, watched: Watched) {
        self.watched.insert(token, watched);
    }

    /// Forgets a file that is closed. The kernel has forgotten it by then.
    pub(super) fn remove(&mut self, token: u64) {
        self.watched.remove(&token);
    }

    /// Forgets the sockets of queue pairs that have ended.
    pub(super) fn forget_dead(&mut self) {
        self.watched.retain(|_, watched| !matches!(watched, Watched::Stream(link) if link.strong_count() == 0));
    }

    /// Waits for events, at most for this time. Returns the owners with what their files are ready for.
    pub(super) fn wait(&self, time: Option<Duration>) -> io::Result<Vec<(u64, Watched, u8)>> {
        let time = time.map(Timespec::try_from).transpose().map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut events: Vec<epoll::Event> = Vec::with_capacity(BATCH);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), time.as_ref()) {
            // The caller looks at the time and waits again.
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready = |event: &epoll::Event| {
            let (flags, token) = (event.flags, event.data.u64());
            let ends = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            let readable = if ends || flags.contains(epoll::EventFlags::IN) { READABLE } else { 0 };
            let writable = if ends || flags.contains(epoll::EventFlags::OUT) { WRITABLE } else { 0 };
            Some((token, self.watched.get(&token)?.clone(), readable | writable))
        };
        Ok(events.iter().filter_map(ready).collect())
    }
}
