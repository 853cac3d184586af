//! Start and end of a device's connections to iWARP peers.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::EndOnPanic;
use pvrdma_base::threads::{self, ThreadKind};
use pvrdma_ib_cm::MAD_LEN;
use pvrdma_verbs_types::{Gid, QpType, Qpn};

use super::manager::{Manager, Served};
use super::meeting::Meeting;
use super::registry::{Registry, Serviced};
use super::side::Guest;
use crate::counters::Tally;
use crate::drive::Endpoint;
use crate::gid::BoundGid;
use crate::path::directory::Node;
use crate::qp::responder::ReceivedDatagram;
use crate::sg::{FaultyList, MemoryGuard, SgList};
use crate::ud_header::{HEADER_LEN, Header};

/// Hop limit of datagrams that a peer would have sent.
const HOP_LIMIT: u8 = 64;

/// Connections of one device. Dropping it ends all that no queue pair uses.
pub(crate) struct IwarpDevice {
    meeting: Arc<Meeting>,
    /// `None` in an engine without threads.
    thread: Option<JoinHandle<()>>,
    /// Keeps the service of an engine without threads.
    _service: Option<Arc<Service>>,
}

impl fmt::Debug for IwarpDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IwarpDevice").finish_non_exhaustive()
    }
}

impl IwarpDevice {
    /// Starts the thread of a device, or adds it to the devices that the caller of an engine without threads serves.
    ///
    /// # Errors
    /// There are no descriptors left, or the system cannot start the thread.
    pub(crate) fn start(
        node: &Arc<Node<Endpoint>>,
        meeting: &Arc<Meeting>,
        threaded: bool,
        services: &Registry,
    ) -> io::Result<Self> {
        let (adapter, meeting) = (Arc::clone(&node.adapter), Arc::clone(meeting));
        let manager = Manager::new(adapter, Arc::clone(&meeting), Box::new(NodeGuest(Arc::downgrade(node))))?;
        if threaded {
            let thread = threads::spawn(ThreadKind::Engine, "rxe-iwarp", move || run(manager))?;
            return Ok(Self { meeting, thread: Some(thread), _service: None });
        }
        let service = Arc::new(Service(Mutex::new(manager)));
        let weak: Weak<Service> = Arc::downgrade(&service);
        services.add(weak);
        Ok(Self { meeting, thread: None, _service: Some(service) })
    }
}

impl Drop for IwarpDevice {
    fn drop(&mut self) {
        self.meeting.stop();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            log::error!("the thread of a device's iWARP connections panicked");
        }
        // Sockets of queue pairs that ended after the last work.
        drop(self.meeting.take_work());
    }
}

fn run(mut manager: Manager) {
    let _guard = EndOnPanic::new("the connections of a device");
    loop {
        let wait = manager.deadline().map(|deadline| deadline.saturating_sub(manager.now()));
        match manager.serve(wait) {
            Ok(Served::Idle | Served::Busy) => {}
            Ok(Served::Stopped) => return,
            Err(error) => return manager.lost(&error),
        }
    }
}

/// The connections of a device in an engine without threads.
struct Service(Mutex<Manager>);

impl Serviced for Service {
    fn service(&self) -> bool {
        let _guard = EndOnPanic::new("the connections of a device");
        let mut manager = self.0.lock();
        match manager.serve(Some(Duration::ZERO)) {
            Ok(served) => served == Served::Busy,
            Err(error) => {
                manager.lost(&error);
                false
            }
        }
    }

    fn deadline(&self) -> Option<Duration> {
        self.0.lock().deadline()
    }
}

/// The guest of a device.
struct NodeGuest(Weak<Node<Endpoint>>);

impl Guest for NodeGuest {
    fn has_queue_pair(&self, qpn: Qpn) -> bool {
        let endpoint = self.0.upgrade().and_then(|node| node.qp(qpn));
        endpoint.is_some_and(|endpoint| endpoint.qp().qp_type == QpType::Rc)
    }

    fn receive(&self, own: &BoundGid, peer: Gid, mad: &[u8; MAD_LEN]) -> bool {
        let Some(node) = self.0.upgrade() else { return false };
        let Some(endpoint) = node.qp(Qpn::GSI) else { return false };
        let (adapter, qp) = (&node.adapter, endpoint.qp());
        // A pause, a change of the link and an unbind wait until this view is released.
        let guard = MemoryGuard::open(adapter, None);
        if adapter.paused.is_set() || !adapter.is_link_up() || !adapter.gids.contains(*own) {
            return false;
        }
        let header = Header {
            kind: own.kind,
            source: peer,
            destination: own.gid,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: HOP_LIMIT,
            payload: u16::try_from(MAD_LEN).unwrap_or(u16::MAX),
            immediate: false,
        };
        let mut responder = qp.responder.lock();
        let datagram = ReceivedDatagram {
            source: Qpn::GSI,
            qkey: responder.attrs.qkey,
            immediate: None,
            solicited: false,
            network: header.network(),
            service_level: 0,
            header: header.bytes(),
            payload_len: MAD_LEN as u64,
        };
        let mut tally = Tally::default();
        let copy = |list: SgList<'_>| list.write(HEADER_LEN as u64, mad).map_err(|_| FaultyList::Target);
        // Only the sender's list could be invalid.
        let _ = responder.receive_datagram(qp, guard.own(), &datagram, &mut tally, copy);
        let delivered = tally.ud_delivered > 0;
        adapter.counters.fold(&mut tally);
        delivered
    }
}
