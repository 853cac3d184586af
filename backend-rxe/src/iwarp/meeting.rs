//! Meeting point of a device's queue pairs, its QP 1 and the manager of its connections.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_handover::Pending;
use pvrdma_iwarp::Connection;
use pvrdma_verbs_types::Gid;
use rustix::event::EventfdFlags;

use super::sockets::IwarpConfig;
use crate::gid::BoundGid;
use crate::task::Task;

/// Maximum number of datagrams that wait for the manager. A guest repeats lost ones.
const MAX_WAITING: usize = 64;

/// The socket may have bytes or an end to read.
pub(crate) const READABLE: u8 = 1;
/// The socket may have room.
pub(crate) const WRITABLE: u8 = 2;
/// The connection is to be closed once everything was sent.
pub(crate) const HANG_UP: u8 = 4;

/// A connection that a queue pair takes over.
#[derive(Debug)]
pub(crate) struct Established {
    pub(crate) connection: Connection,
    pub(crate) socket: TcpStream,
    /// Number by which the manager knows the socket.
    pub(crate) token: u64,
}

/// Socket of a connection that has ended.
#[derive(Debug)]
pub(crate) struct ClosingSocket {
    pub(crate) socket: TcpStream,
    pub(crate) token: u64,
    /// Bytes that are still to be sent.
    pub(crate) rest: Vec<u8>,
}

#[derive(Debug, Default)]
struct LinkState {
    established: Option<Established>,
    /// Task of the queue pair, once there is one.
    task: Option<Arc<Task>>,
    /// The queue pair has ended.
    ended: bool,
}

/// One connection, as its queue pair and the manager see it.
#[derive(Debug)]
pub(crate) struct StreamLink {
    key: u32,
    /// Reports for the queue pair.
    reports: Pending,
    state: Mutex<LinkState>,
}

impl StreamLink {
    fn new(key: u32) -> Arc<Self> {
        Arc::new(Self { key, reports: Pending::new(), state: Mutex::default() })
    }

    /// Takes the reports of the manager since the last call.
    pub(crate) fn take_reports(&self) -> u8 {
        if self.reports.is_empty() { 0 } else { self.reports.take() }
    }

    /// Takes over the connection, if it is established.
    pub(crate) fn take_established(&self) -> Option<Established> {
        self.state.lock().established.take()
    }

    /// Reports to the queue pair that the socket is ready, or that it is to be closed.
    pub(super) fn report(&self, report: u8) {
        self.reports.add(report);
        self.schedule();
    }

    /// Passes a connection to the queue pair. Returns `false`, and closes the connection, if the queue pair has ended.
    pub(super) fn establish(&self, established: Established) -> bool {
        {
            let mut state = self.state.lock();
            if state.ended {
                return false;
            }
            state.established = Some(established);
        }
        self.schedule();
        true
    }

    fn schedule(&self) {
        // The lock is released first, because the task may run at once.
        let task = self.state.lock().task.clone();
        if let Some(task) = task {
            task.schedule();
        }
    }
}

/// A connection that the guest's queue pair may take.
#[derive(Debug)]
struct Prepared {
    /// QP of the guest. Unknown for a connection that a peer has asked for, until the guest moves a QP to RTR.
    own: Option<u32>,
    peer_qpn: u32,
    peer: Gid,
    link: Arc<StreamLink>,
}

/// A datagram that the guest has sent to the QP 1 of a peer.
#[derive(Debug)]
pub(crate) struct GuestDatagram {
    pub(crate) own: BoundGid,
    pub(crate) peer: Gid,
    pub(crate) payload: Vec<u8>,
}

/// Work for the manager.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) datagrams: VecDeque<GuestDatagram>,
    /// Connections, by their keys, that have ended for their queue pairs or by their peers.
    pub(super) ended: Vec<u32>,
    pub(super) closing: Vec<ClosingSocket>,
    /// The addresses of the device have changed.
    pub(super) addresses: bool,
    /// The device ends.
    pub(super) stop: bool,
}

#[derive(Debug, Default)]
struct State {
    /// By the key of the connection.
    prepared: HashMap<u32, Prepared>,
    /// Connections by the QPs that use them.
    users: HashMap<u32, u32>,
    work: Work,
}

/// The meeting point. Its locks are leaves.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(super) config: IwarpConfig,
    state: Mutex<State>,
    /// Readable while there is work.
    wake: OwnedFd,
}

impl AsFd for Meeting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Meeting {
    /// # Errors
    /// There are no descriptors left.
    pub(crate) fn new(config: IwarpConfig) -> io::Result<Arc<Self>> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let work = Work { addresses: true, ..Work::default() };
        let meeting = Self { config, state: Mutex::new(State { work, ..State::default() }), wake };
        meeting.wake();
        Ok(Arc::new(meeting))
    }

    /// Returns `true` if a peer is reached by iWARP.
    pub(crate) fn reaches(&self, peer: Gid) -> bool {
        self.config.reaches(peer)
    }

    /// Reports work to the manager. A full count is as readable as any other.
    fn wake(&self) {
        let _full = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    // Work for the manager.

    /// Takes all work.
    pub(super) fn take_work(&self) -> Work {
        let _none = rustix::io::read(&self.wake, &mut [0; 8]);
        std::mem::take(&mut self.state.lock().work)
    }

    /// Makes the manager end.
    pub(super) fn stop(&self) {
        self.state.lock().work.stop = true;
        self.wake();
    }

    /// Queues a datagram of the guest. Returns `false` if too many wait.
    pub(crate) fn submit(&self, datagram: GuestDatagram) -> bool {
        {
            let datagrams = &mut self.state.lock().work.datagrams;
            if datagrams.len() >= MAX_WAITING {
                return false;
            }
            datagrams.push_back(datagram);
        }
        self.wake();
        true
    }

    /// Notes that the device has got or lost an address.
    pub(crate) fn addresses_changed(&self) {
        self.state.lock().work.addresses = true;
        self.wake();
    }

    // Queue pairs.

    /// Returns the connection for a queue pair that the guest moves to RTR toward this peer. `None`: none fits.
    pub(crate) fn begin(&self, qpn: u32, peer_qpn: u32, peer: Gid, task: &Arc<Task>) -> Option<Arc<StreamLink>> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let fits = |prepared: &Prepared| {
            prepared.own.is_none_or(|own| own == qpn) && (prepared.peer_qpn, prepared.peer) == (peer_qpn, peer)
        };
        let (key, prepared) = state.prepared.iter_mut().find(|(_, prepared)| fits(prepared))?;
        if *state.users.entry(qpn).or_insert(*key) != *key {
            return None;
        }
        let mut link = prepared.link.state.lock();
        // A connection has one queue pair in its life.
        if link.task.is_some() {
            return None;
        }
        link.task = Some(Arc::clone(task));
        prepared.own = Some(qpn);
        drop(link);
        Some(Arc::clone(&prepared.link))
    }

    /// Ends the connection of a queue pair that is reset or destroyed, if it has one.
    pub(crate) fn queue_pair_ended(&self, qpn: u32) {
        let mut state = self.state.lock();
        if let Some(key) = state.users.remove(&qpn) {
            state.work.ended.push(key);
            self.wake();
        }
    }

    /// Notes that the peer has closed a connection.
    pub(crate) fn peer_closed(&self, link: &StreamLink) {
        self.state.lock().work.ended.push(link.key);
        self.wake();
    }

    /// Notes that a queue pair has ended, with the socket if it is still in use.
    pub(crate) fn ended(&self, link: &StreamLink, socket: Option<ClosingSocket>) {
        {
            let mut connection = link.state.lock();
            (connection.ended, connection.task, connection.established) = (true, None, None);
        }
        let work = &mut self.state.lock().work;
        work.ended.push(link.key);
        work.closing.extend(socket);
        self.wake();
    }

    // The manager.

    /// Assigns a queue pair of the guest to a connection. Returns `false` if it has another connection.
    pub(super) fn claim(&self, qpn: u32, key: u32) -> bool {
        *self.state.lock().users.entry(qpn).or_insert(key) == key
    }

    /// Assigns a queue pair of the guest to a connection that is prepared. Returns `false` as [`Self::claim`], or if
    /// the guest has moved another one to RTR for it.
    pub(super) fn claim_prepared(&self, qpn: u32, key: u32) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(prepared) = state.prepared.get_mut(&key) else { return false };
        if prepared.own.is_some_and(|own| own != qpn) || *state.users.entry(qpn).or_insert(key) != key {
            return false;
        }
        prepared.own = Some(qpn);
        true
    }

    /// Notes that a queue pair may take a connection. `own` is the guest's queue pair, if it is known.
    pub(super) fn prepare(&self, key: u32, own: Option<u32>, peer_qpn: u32, peer: Gid) -> Arc<StreamLink> {
        let link = StreamLink::new(key);
        let prepared = Prepared { own, peer_qpn, peer, link: Arc::clone(&link) };
        self.state.lock().prepared.insert(key, prepared);
        link
    }

    /// Returns a connection that a queue pair may take or has taken.
    pub(super) fn link(&self, key: u32) -> Option<Arc<StreamLink>> {
        self.state.lock().prepared.get(&key).map(|prepared| Arc::clone(&prepared.link))
    }

    /// Forgets a connection. A queue pair that has taken it closes it once everything was sent.
    pub(super) fn forget(&self, key: u32) {
        let prepared = {
            let mut state = self.state.lock();
            state.users.retain(|_, user| *user != key);
            state.prepared.remove(&key)
        };
        if let Some(prepared) = prepared {
            prepared.link.report(HANG_UP);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr, TcpListener};
    use std::sync::Weak;

    use super::super::sockets::Sockets;
    use super::*;
    use crate::budget::Budget;
    use crate::task::Runnable;

    #[derive(Debug)]
    struct NoSockets;

    impl Sockets for NoSockets {
        fn connect(&self, _: IpAddr, _: SocketAddr) -> io::Result<TcpStream> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn listen(&self, _: SocketAddr) -> io::Result<TcpListener> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    struct Idle;

    impl Runnable for Idle {
        fn run(&self, _: &mut Budget) -> bool {
            false
        }
    }

    #[test]
    fn a_queue_pair_has_one_connection_and_a_connection_one_queue_pair() {
        let meeting = Meeting::new(IwarpConfig::new(Arc::new(NoSockets), Vec::new())).unwrap();
        let task = Task::new(&Arc::default(), &Arc::default(), Weak::<Idle>::new());
        let begin = |qpn, peer_qpn, peer| meeting.begin(qpn, peer_qpn, peer, &task);
        let peer = Gid([7; 16]);
        assert!(meeting.claim(1, 10) && meeting.claim(1, 10) && !meeting.claim(1, 11));
        meeting.prepare(10, Some(1), 99, peer);
        assert!(begin(2, 99, peer).is_none() && begin(1, 98, peer).is_none() && begin(1, 99, Gid([8; 16])).is_none());
        let link = begin(1, 99, peer).unwrap();
        assert!(begin(1, 99, peer).is_none(), "it was taken");
        // The QP of a connection that a peer has asked for is the first that the guest moves.
        meeting.prepare(20, None, 50, peer);
        assert!(begin(1, 50, peer).is_none() && begin(2, 50, peer).is_some());
        assert!(!meeting.claim_prepared(3, 20) && meeting.claim_prepared(2, 20) && !meeting.claim_prepared(2, 30));
        meeting.ended(&link, None);
        assert_eq!(meeting.take_work().ended, [10]);
        meeting.forget(10);
        assert_eq!(link.take_reports(), HANG_UP);
        assert!(meeting.link(10).is_none() && meeting.claim(1, 12));
    }
}
