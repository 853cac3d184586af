//! Sending thread of a device.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::threads::ThreadKind;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::message::{LONGEST, Outgoing};
use super::umad::Umad;
use crate::counters::{Counters, bump};
use crate::gid::HostGids;
use crate::worker::{Worker, wait};

/// Maximum number of waiting datagrams. A guest repeats lost ones.
const MAX_WAITING: usize = 64;

/// Sends datagrams in order, until it is dropped; datagrams that are waiting then are lost.
pub(crate) struct Sender {
    queue: Arc<Queue>,
    _thread: Worker,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl Sender {
    /// Starts a sender for the device with this name, whose counters count the results.
    pub(super) fn start(file: Umad, gids: HostGids, name: &str, counters: &Arc<Counters>) -> io::Result<Self> {
        let queue = Arc::new(Queue::new()?);
        let (name, counters) = (name.to_owned(), Arc::clone(counters));
        let device = Device { name, counters, queue: Arc::clone(&queue), file, gids };
        let thread = Worker::start(ThreadKind::HostManagement, &format!("ibcm-{}", device.name), move |stop| {
            if let Err(error) = device.run(stop) {
                // Log: the last of this thread.
                log::error!("{}: the connection manager sends nothing any more: {error}", device.name);
            }
        })?;
        Ok(Self { queue, _thread: thread })
    }

    /// Queues a datagram. Returns `false` if too many are waiting.
    pub(crate) fn send(&self, outgoing: Outgoing) -> bool {
        self.queue.push(outgoing)
    }
}

struct Queue {
    waiting: Mutex<VecDeque<Outgoing>>,
    /// Semaphore descriptor, readable while datagrams are waiting.
    count: OwnedFd,
}

impl Queue {
    fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        Ok(Self { waiting: Mutex::default(), count: rustix::event::eventfd(0, flags)? })
    }

    fn push(&self, outgoing: Outgoing) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.len() >= MAX_WAITING || rustix::io::write(&self.count, &1_u64.to_ne_bytes()).is_err() {
            return false;
        }
        waiting.push_back(outgoing);
        true
    }

    fn pop(&self) -> Option<Outgoing> {
        rustix::io::read(&self.count, &mut [0; 8]).ok()?;
        self.waiting.lock().pop_front()
    }
}

/// State of the thread.
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
            // Responses of other classes can reach any agent whose number a peer guesses. They are unsolicited, so they
            // are dropped.
            if !arrived.is_empty() {
                match self.file.read(&mut room)? {
                    Some(_) => bump(&self.counters.cm_refused),
                    None if !arrived.contains(PollFlags::IN) => {
                        return Err(io::Error::other("the host's device is gone"));
                    }
                    None => {}
                }
            }
            // One datagram is sent per round, so that this thread soon notices a request to end.
            if !waiting.is_empty()
                && let Some(outgoing) = self.queue.pop()
            {
                self.write(&outgoing);
            }
        }
    }

    fn write(&self, outgoing: &Outgoing) {
        // The index may have been assigned to another address since the guest bound its own.
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

#[cfg(test)]
mod tests {

    use pvrdma_verbs_types::{Gid, GidType, Qpn, UdDestination};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::datagram::Datagram;
    use crate::gid::{Bound, HostGid};

    fn host(index: u8) -> HostGid {
        HostGid { index, gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, index]), kind: GidType::RoceV2 }
    }

    fn outgoing(index: u8) -> Outgoing {
        let host = host(index);
        let mut payload = vec![index; 256];
        payload[..4].copy_from_slice(&[1, 7, 2, 3]);
        let to = UdDestination { qpn: Qpn::GSI, ..UdDestination::default() };
        let datagram = Datagram { from: host.gid, to, kind: host.kind, immediate: None, solicited: false, payload };
        Outgoing::new(&Bound { gid: host.gid, kind: host.kind, host }, &datagram).unwrap()
    }

    #[test]
    fn sends_from_addresses_that_the_host_still_has() {
        let (flags, folder) = (SocketFlags::empty(), tempfile::tempdir().unwrap());
        let (kernel, ours) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let gids = HostGids::in_folder(folder.path());
        gids.set(&host(1));
        gids.set(&HostGid { index: 2, ..host(7) });
        let counters = Arc::<Counters>::default();
        // An unsolicited response.
        rustix::io::write(&kernel, b"a response").unwrap();
        let sender = Sender::start(Umad::stand_in(ours), gids, "test", &counters).unwrap();
        for index in [1, 2, 3, 1] {
            assert!(sender.send(outgoing(index)));
        }
        let mut room = vec![0; LONGEST];
        for _ in 0..2 {
            let length = rustix::io::read(&kernel, &mut room).unwrap();
            assert_eq!((length, room[0], room[33], room[319]), (320, 9, 1, 1));
        }
        drop(sender);
        assert_eq!((counters.cm_sent.get(), counters.cm_refused.get()), (2, 3));
    }

    #[test]
    fn waiting_datagrams_are_bounded() {
        let queue = Queue::new().unwrap();
        let taken = (0..1000).filter(|_| queue.push(outgoing(1))).count();
        assert_eq!(taken, MAX_WAITING);
        assert!(queue.pop().is_some() && queue.push(outgoing(1)) && !queue.push(outgoing(1)));
    }
}
