//! Meeting point of a device's queue pairs, its QP 1 and the thread that connects them through the host (`host_cm/`).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Weak;

use parking_lot::Mutex;
use pvrdma_verbs_types::Gid;
use rustix::event::EventfdFlags;

use crate::datagram::Datagram;
use crate::gid::Bound;
use crate::sys::QpAttr;

/// Maximum number of datagrams that wait for the thread. A guest repeats lost ones.
const MAX_WAITING: usize = 64;

/// A queue pair that the host connects.
pub(crate) trait Connectable: Send + Sync {
    /// Continues sends that wait for the connection.
    fn connected(&self);
}

/// Attributes for the host's queue pair of a connection, with their masks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathAttributes {
    pub(crate) rtr: (QpAttr, i32),
    pub(crate) rts: (QpAttr, i32),
}

/// A connection whose attributes are known.
struct Prepared {
    /// QP of the guest. Unknown for a connection that a peer has asked for, until the guest moves a QP to RTR.
    own: Option<u32>,
    peer_qpn: u32,
    peer: Gid,
    attributes: PathAttributes,
    /// Requests may be posted.
    established: bool,
}

/// Work for the thread.
#[derive(Default)]
pub(crate) struct Work {
    /// Datagrams that the guest has sent, with the address that it has bound for them.
    pub(crate) datagrams: VecDeque<(Bound, Datagram)>,
    /// Connections, by their keys, whose QPs have ended.
    pub(crate) ended: Vec<u32>,
    /// The addresses of the device have changed.
    pub(crate) addresses: bool,
}

#[derive(Default)]
struct State {
    qps: HashMap<u32, Weak<dyn Connectable>>,
    /// By the key of the connection.
    prepared: HashMap<u32, Prepared>,
    /// Connections by the QPs that they use.
    users: HashMap<u32, u32>,
    work: Work,
    /// The thread runs.
    active: bool,
}

/// The meeting point. Its lock is a leaf.
pub(crate) struct CmPaths {
    state: Mutex<State>,
    /// Readable while there is work.
    wake: OwnedFd,
}

impl fmt::Debug for CmPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmPaths").finish_non_exhaustive()
    }
}

impl AsFd for CmPaths {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl CmPaths {
    pub(crate) fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::default(), wake })
    }

    /// Reports work to the thread. A full count is as readable as any other.
    fn wake(&self) {
        let _full = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Begins to collect work, for a new thread.
    pub(crate) fn activate(&self) {
        let mut state = self.state.lock();
        (state.active, state.work.addresses) = (true, true);
        self.wake();
    }

    /// Forgets all connections and work: the thread has ended.
    pub(crate) fn deactivate(&self) {
        let mut state = self.state.lock();
        let qps = std::mem::take(&mut state.qps);
        *state = State { qps, ..State::default() };
    }

    /// Takes all work.
    pub(crate) fn take_work(&self) -> Work {
        let _none = rustix::io::read(&self.wake, &mut [0; 8]);
        std::mem::take(&mut self.state.lock().work)
    }

    /// Queues a datagram of the guest. Returns `false` if too many wait.
    pub(crate) fn submit(&self, source: Bound, datagram: Datagram) -> bool {
        let mut state = self.state.lock();
        if !state.active || state.work.datagrams.len() >= MAX_WAITING {
            return false;
        }
        state.work.datagrams.push_back((source, datagram));
        self.wake();
        true
    }

    /// Notes that the device has bound or unbound an address.
    pub(crate) fn addresses_changed(&self) {
        let mut state = self.state.lock();
        if state.active {
            state.work.addresses = true;
            self.wake();
        }
    }

    /// Registers a queue pair that may be connected.
    pub(crate) fn add_qp(&self, qpn: u32, qp: Weak<dyn Connectable>) {
        self.state.lock().qps.insert(qpn, qp);
    }

    /// Removes a queue pair, whose connection ends.
    pub(crate) fn remove_qp(&self, qpn: u32) {
        self.state.lock().qps.remove(&qpn);
        self.end_connection_of(qpn);
    }

    /// Ends the connection of a queue pair, if it has one.
    pub(crate) fn end_connection_of(&self, qpn: u32) {
        let mut state = self.state.lock();
        if let Some(key) = state.users.remove(&qpn) {
            state.prepared.remove(&key);
            state.work.ended.push(key);
            self.wake();
        }
    }

    /// Assigns a queue pair of the guest to a connection. Returns `false` if there is no such queue pair, or it has
    /// another connection.
    pub(crate) fn claim(&self, qpn: u32, key: u32) -> bool {
        let mut state = self.state.lock();
        state.qps.contains_key(&qpn) && *state.users.entry(qpn).or_insert(key) == key
    }

    /// Assigns a queue pair of the guest to a connection whose attributes are known. Returns `false` as
    /// [`Self::claim`], or if the guest has moved another one to RTR for it.
    pub(crate) fn claim_prepared(&self, qpn: u32, key: u32) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(prepared) = state.prepared.get_mut(&key) else { return false };
        let fits = prepared.own.is_none_or(|own| own == qpn) && state.qps.contains_key(&qpn);
        if !fits || *state.users.entry(qpn).or_insert(key) != key {
            return false;
        }
        prepared.own = Some(qpn);
        true
    }

    /// Stores the attributes of a connection. `own` is the guest's queue pair, if it is known.
    pub(crate) fn prepare(&self, key: u32, own: Option<u32>, peer_qpn: u32, peer: Gid, attributes: PathAttributes) {
        let prepared = Prepared { own, peer_qpn, peer, attributes, established: false };
        self.state.lock().prepared.insert(key, prepared);
    }

    /// Returns the attributes for a queue pair that the guest moves to RTR, toward this peer. `None`: no connection of
    /// the host fits.
    pub(crate) fn begin(&self, qpn: u32, peer_qpn: u32, peer: Gid) -> Option<PathAttributes> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let fits = |prepared: &Prepared| {
            prepared.own.is_none_or(|own| own == qpn) && (prepared.peer_qpn, prepared.peer) == (peer_qpn, peer)
        };
        let (key, prepared) = state.prepared.iter_mut().find(|(_, prepared)| fits(prepared))?;
        if !state.qps.contains_key(&qpn) || *state.users.entry(qpn).or_insert(*key) != *key {
            return None;
        }
        prepared.own = Some(qpn);
        Some(prepared.attributes)
    }

    /// Returns the attributes for a queue pair that [`Self::begin`] found a connection for, and `true` if requests may
    /// be posted.
    pub(crate) fn proceed(&self, qpn: u32) -> Option<(PathAttributes, bool)> {
        let state = self.state.lock();
        let prepared = state.prepared.get(state.users.get(&qpn)?)?;
        Some((prepared.attributes, prepared.established))
    }

    /// Notes that requests may be posted on a connection.
    pub(crate) fn established(&self, key: u32) {
        let qp = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let Some(prepared) = state.prepared.get_mut(&key) else { return };
            prepared.established = true;
            prepared.own.and_then(|own| state.qps.get(&own)).and_then(Weak::upgrade)
        };
        // The lock is released first, because the queue pair posts requests.
        if let Some(qp) = qp {
            qp.connected();
        }
    }

    /// Forgets a connection.
    pub(crate) fn forget(&self, key: u32) {
        let mut state = self.state.lock();
        state.prepared.remove(&key);
        state.users.retain(|_, user| *user != key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Silent;

    impl Connectable for Silent {
        fn connected(&self) {}
    }

    fn attributes() -> PathAttributes {
        PathAttributes { rtr: (QpAttr::default(), 1), rts: (QpAttr::default(), 2) }
    }

    fn with_qps(numbers: &[u32]) -> (CmPaths, Arc<Silent>) {
        let (paths, qp) = (CmPaths::new().unwrap(), Arc::new(Silent));
        paths.activate();
        for number in numbers {
            let weak: Weak<dyn Connectable> = Arc::downgrade(&(Arc::clone(&qp) as Arc<dyn Connectable>));
            paths.add_qp(*number, weak);
        }
        (paths, qp)
    }

    #[test]
    fn a_queue_pair_has_one_connection_and_a_connection_one_queue_pair() {
        let (paths, _qp) = with_qps(&[1, 2]);
        let peer = Gid([7; 16]);
        assert!(paths.claim(1, 10) && paths.claim(1, 10));
        // In use, and unknown.
        assert!(!paths.claim(1, 11) && !paths.claim(3, 11));
        paths.prepare(10, Some(1), 99, peer, attributes());
        assert!(paths.begin(2, 99, peer).is_none() && paths.begin(1, 98, peer).is_none());
        assert!(paths.begin(1, 99, Gid::default()).is_none());
        assert!(paths.begin(1, 99, peer).is_some() && paths.proceed(1).is_some_and(|(_, established)| !established));
        paths.established(10);
        assert!(paths.proceed(1).is_some_and(|(_, established)| established));
        // The QP of a passive connection is the first that the guest moves.
        paths.prepare(20, None, 50, peer, attributes());
        assert!(paths.begin(1, 50, peer).is_none() && paths.begin(2, 50, peer).is_some());
        assert!(!paths.claim(2, 21) && paths.claim(2, 20));
    }

    #[test]
    fn a_queue_pair_that_ends_is_reported_once() {
        let (paths, _qp) = with_qps(&[1, 2]);
        assert!(paths.claim(1, 10));
        paths.end_connection_of(2);
        paths.remove_qp(1);
        paths.end_connection_of(1);
        assert_eq!(paths.take_work().ended, [10]);
        assert!(paths.proceed(1).is_none() && !paths.claim(1, 10));
    }
}
