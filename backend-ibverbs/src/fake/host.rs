//! State of the fake adapter, and the test's control of it.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use pvrdma_verbs::testing::DEADLINE;
use rustix::event::EventfdFlags;

use super::cm::CmState;
use super::gate::{Call, Gate};
use crate::sys::{EVENT_SRQ_LIMIT_REACHED, QpAttr, Sge, Wc};

/// QP states, as the library's numbers.
pub(super) const RESET: c_int = 0;
pub(super) const ERROR: c_int = 6;
/// Completion statuses, as the library's numbers.
const SUCCESS: c_int = 0;
const FLUSHED: c_int = 5;

/// A posted request.
#[derive(Clone, Debug)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    /// `IBV_WR_` number. 0 for a receive.
    pub(crate) opcode: c_int,
    pub(crate) sges: Vec<Sge>,
}

impl Posted {
    /// Returns the local key of the first SGE.
    pub(crate) fn lkey(&self) -> u32 {
        self.sges.first().map_or(0, |sge| sge.lkey)
    }
}

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) key: u32,
    /// Start in this process's memory.
    pub(crate) start: usize,
    pub(crate) length: usize,
    /// Address by which requests refer to the first byte.
    pub(crate) iova: u64,
    pub(crate) access: c_int,
}

#[derive(Default)]
pub(super) struct Qp {
    pub(super) state: c_int,
    /// The owner has moved the QP to its error state.
    pub(super) stopped: bool,
    pub(super) send_cq: usize,
    pub(super) recv_cq: usize,
    pub(super) srq: Option<usize>,
    pub(super) sends: VecDeque<Posted>,
    pub(super) receives: VecDeque<Posted>,
    /// Changes of attributes, with their masks.
    pub(super) modified: Vec<(QpAttr, c_int)>,
}

#[derive(Default)]
pub(super) struct Cq {
    pub(super) entries: VecDeque<Wc>,
    pub(super) armed: bool,
    /// Number of times the queue was armed.
    pub(super) arms: u32,
    /// Descriptor of the channel, which reports events.
    pub(super) channel: Option<Arc<OwnedFd>>,
}

#[derive(Default)]
pub(super) struct State {
    /// `IBV_TRANSPORT_` number of the adapter; by default InfiniBand, which includes RoCE.
    pub(super) transport: c_int,
    /// Vendor of the adapter.
    pub(super) vendor: u32,
    /// `IBV_LINK_LAYER_` number of the port; by default Ethernet.
    pub(super) link_layer: Option<u8>,
    /// Number of existing objects.
    pub(super) objects: usize,
    pub(super) next_number: u32,
    pub(super) qps: HashMap<u32, Qp>,
    /// QPNs by the QPs' addresses.
    pub(super) qp_numbers: HashMap<usize, u32>,
    pub(super) cqs: HashMap<usize, Cq>,
    /// Limit and receives of each shared receive queue.
    pub(super) srqs: HashMap<usize, (u32, VecDeque<Posted>)>,
    pub(super) regions: Vec<Region>,
    /// For each QP created so far: maximum number of SGEs in a send and in a receive.
    pub(super) max_sges: Vec<[u32; 2]>,
    /// Completion events that were not fetched: addresses of the CQs.
    pub(super) completion_events: VecDeque<usize>,
    /// Asynchronous events that were not fetched: event number and object address.
    pub(super) async_events: VecDeque<(c_int, usize)>,
    pub(super) async_fd: Option<Arc<OwnedFd>>,
    /// Number of sends that are accepted before one is refused.
    pub(super) sends_until_refused: Option<usize>,
    pub(super) refuse_resize: bool,
    pub(super) refuse_registration: bool,
    /// Number of peer look-ups.
    pub(super) look_ups: usize,
    /// Look-ups get no answer.
    pub(super) hold_look_ups: bool,
    pub(super) refuse_look_ups: bool,
    pub(super) gate: Gate,
    pub(super) cm: CmState,
}

impl FakeHost {
    /// Sets the answer to look-ups from now on; `None`: no answer.
    pub(crate) fn answer_look_ups(&self, answer: Option<bool>) {
        let mut state = self.state.lock();
        (state.hold_look_ups, state.refuse_look_ups) = (answer.is_none(), answer == Some(false));
        drop(state);
        self.changed.notify_all();
    }

    /// Sets the transport of the adapter and the link layer of its port.
    pub(crate) fn speak(&self, transport: c_int, link_layer: u8) {
        let mut state = self.state.lock();
        (state.transport, state.link_layer) = (transport, Some(link_layer));
    }

    /// Sets the vendor of the adapter.
    pub(crate) fn made_by(&self, vendor: u32) {
        self.with(|state| state.vendor = vendor);
    }

    /// Returns the number of peer look-ups.
    pub(crate) fn look_ups(&self) -> usize {
        self.state.lock().look_ups
    }

    /// Looks a peer up. Waits while there is no answer, with a limit.
    pub(super) fn look_up(&self) -> bool {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        state.look_ups += 1;
        self.changed.notify_all();
        while state.hold_look_ups {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return false;
            }
        }
        !state.refuse_look_ups
    }

    /// Holds the next call of this kind before it takes effect.
    pub(crate) fn hold(&self, call: Call) {
        self.with(|state| state.gate = Gate { held: Some(call), came: false });
    }

    /// Waits until a call is held.
    pub(crate) fn wait_held(&self) {
        self.wait("no thread makes the call that is held", |state| state.gate.came);
    }

    /// Releases the held call, and lets later ones pass.
    pub(crate) fn let_go(&self) {
        self.with(|state| state.gate = Gate::default());
    }

    /// Waits while this call is held, with a limit. Further calls of the same kind are not held in the meantime.
    pub(super) fn pass(&self, call: Call) {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        if state.gate.held != Some(call) || state.gate.came {
            return;
        }
        state.gate.came = true;
        self.changed.notify_all();
        while state.gate.came && !self.changed.wait_until(&mut state, end).timed_out() {}
    }
}

/// A fake adapter.
#[derive(Default)]
pub(crate) struct FakeHost {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

/// Creates an event file, which is readable once for each event.
pub(super) fn event_file() -> Arc<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    Arc::new(rustix::event::eventfd(0, flags).unwrap())
}

fn announce(file: Option<&Arc<OwnedFd>>) {
    rustix::io::write(file.unwrap(), &1_u64.to_ne_bytes()).unwrap();
}

impl State {
    fn complete(&mut self, cq: usize, wc: Wc) {
        let queue = self.cqs.get_mut(&cq).unwrap();
        queue.entries.push_back(wc);
        if std::mem::take(&mut queue.armed) {
            announce(queue.channel.as_ref());
            self.completion_events.push_back(cq);
        }
    }

    /// Flushes the posted requests, as an adapter does for a QP in its error state.
    pub(super) fn flush(&mut self, qpn: u32) {
        let qp = self.qps.get_mut(&qpn).unwrap();
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        let sends: Vec<_> = qp.sends.drain(..).map(|posted| (send_cq, posted)).collect();
        let receives: Vec<_> = qp.receives.drain(..).map(|posted| (recv_cq, posted)).collect();
        for (cq, posted) in sends.into_iter().chain(receives) {
            self.complete(cq, Wc { wr_id: posted.wr_id, status: FLUSHED, qp_num: qpn, ..Wc::default() });
        }
    }
}

impl FakeHost {
    /// Reads or changes the state, and wakes the waiting threads.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until the adapter reaches a state.
    pub(super) fn wait(&self, what: &str, reached: impl Fn(&State) -> bool) {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        while !reached(&state) {
            assert!(!self.changed.wait_until(&mut state, end).timed_out(), "{what}");
        }
    }

    /// Completes the oldest send of a QP, which ends the QP if `status` is not success.
    pub(crate) fn complete_send(&self, qpn: u32, status: c_int) {
        self.with(|state| {
            let qp = state.qps.get_mut(&qpn).unwrap();
            let (cq, posted) = (qp.send_cq, qp.sends.pop_front().unwrap());
            if status != SUCCESS {
                qp.state = ERROR;
            }
            state.complete(cq, Wc { wr_id: posted.wr_id, status, qp_num: qpn, ..Wc::default() });
            if status != SUCCESS {
                state.flush(qpn);
            }
        });
    }

    /// Completes the oldest receive of a QP, or of its SRQ, with `wc`.
    pub(crate) fn complete_receive(&self, qpn: u32, wc: Wc) {
        self.with(|state| {
            let qp = state.qps.get_mut(&qpn).unwrap();
            let cq = qp.recv_cq;
            let posted = match qp.srq {
                Some(srq) => state.srqs.get_mut(&srq).unwrap().1.pop_front(),
                None => qp.receives.pop_front(),
            };
            state.complete(cq, Wc { wr_id: posted.unwrap().wr_id, qp_num: qpn, ..wc });
        });
    }

    /// Completes the oldest receive with an error, which ends a connected QP.
    pub(crate) fn fail_receive(&self, qpn: u32, wc: Wc) {
        self.complete_receive(qpn, wc);
        self.with(|state| {
            state.qps.get_mut(&qpn).unwrap().state = ERROR;
            state.flush(qpn);
        });
    }

    /// Puts an arbitrary entry into the CQ of a QP's sends.
    pub(crate) fn forge_completion(&self, qpn: u32, wc: Wc) {
        self.with(|state| {
            let cq = state.qps[&qpn].send_cq;
            state.complete(cq, wc);
        });
    }

    /// Raises an asynchronous event by its number and the address of its object.
    pub(crate) fn raise(&self, number: c_int, address: usize) {
        self.with(|state| {
            state.async_events.push_back((number, address));
            announce(state.async_fd.as_ref());
        });
    }

    /// Returns the address of a QP's completion queue for sends.
    pub(crate) fn send_cq(&self, qpn: u32) -> usize {
        self.with(|state| state.qps[&qpn].send_cq)
    }

    /// Returns the address of a QP.
    pub(crate) fn qp(&self, qpn: u32) -> usize {
        self.with(|state| *state.qp_numbers.iter().find(|(_, number)| **number == qpn).unwrap().0)
    }

    /// Fires the limit of the only SRQ, which disarms it.
    pub(crate) fn reach_srq_limit(&self) {
        let address = self.with(|state| {
            let (address, srq) = state.srqs.iter_mut().next().unwrap();
            srq.0 = 0;
            *address
        });
        self.raise(EVENT_SRQ_LIMIT_REACHED, address);
    }

    /// Returns the armed limit of the only SRQ.
    pub(crate) fn srq_limit(&self) -> u32 {
        self.with(|state| state.srqs.values().next().unwrap().0)
    }

    /// Returns a QP's sends that have not completed.
    pub(crate) fn sends(&self, qpn: u32) -> Vec<Posted> {
        self.with(|state| state.qps[&qpn].sends.iter().cloned().collect())
    }

    /// Returns a QP's receives that have not completed.
    pub(crate) fn receives(&self, qpn: u32) -> Vec<Posted> {
        self.with(|state| state.qps[&qpn].receives.iter().cloned().collect())
    }

    /// Returns the maximum numbers of SGEs in a send and in a receive of each QP created so far.
    pub(crate) fn max_sges(&self) -> Vec<[u32; 2]> {
        self.with(|state| state.max_sges.clone())
    }

    /// Returns the region that contains an SGE.
    pub(crate) fn region(&self, sge: &Sge) -> Option<Region> {
        let inside = |region: &&Region| {
            let into = sge.addr.checked_sub(region.iova);
            let end = into.map(|into| into + u64::from(sge.length));
            region.key == sge.lkey && end.is_some_and(|end| end <= region.length as u64)
        };
        self.with(|state| state.regions.iter().find(inside).copied())
    }

    /// Returns the number of receives that the only SRQ holds.
    pub(crate) fn shared_receives(&self) -> usize {
        self.with(|state| state.srqs.values().next().unwrap().1.len())
    }

    /// Returns the state of a QP, as the library's number.
    pub(crate) fn qp_state(&self, qpn: u32) -> c_int {
        self.with(|state| state.qps[&qpn].state)
    }

    /// Returns the changes of a QP so far: attributes and masks.
    pub(crate) fn modifications(&self, qpn: u32) -> Vec<(QpAttr, c_int)> {
        self.with(|state| state.qps[&qpn].modified.clone())
    }

    /// Changes the state of a QP without an event.
    pub(crate) fn set_qp_state(&self, qpn: u32, number: c_int) {
        self.with(|state| state.qps.get_mut(&qpn).unwrap().state = number);
    }

    /// Returns how often a QP's completion queue for sends was armed.
    pub(crate) fn arms(&self, qpn: u32) -> u32 {
        self.with(|state| state.cqs[&state.qps[&qpn].send_cq].arms)
    }

    /// Waits until a QP's completion queue for sends is armed.
    pub(crate) fn wait_armed(&self, qpn: u32) {
        self.wait("the queue is not armed", |state| state.cqs[&state.qps[&qpn].send_cq].armed);
    }

    /// Waits until a QP is in its error state.
    pub(crate) fn wait_error(&self, qpn: u32) {
        self.wait("the QP is not stopped", |state| state.qps[&qpn].state == ERROR);
    }

    /// Returns `true` if the owner moved the QP to its error state, rather than an error.
    pub(crate) fn was_stopped(&self, qpn: u32) -> bool {
        self.with(|state| state.qps[&qpn].stopped)
    }

    /// Waits until `count` sends of a QP are posted and have not completed.
    pub(crate) fn wait_sends(&self, qpn: u32, count: usize) {
        self.wait("the sends are not posted", |state| state.qps[&qpn].sends.len() == count);
    }

    /// Waits until the only SRQ holds `count` receives.
    pub(crate) fn wait_shared_receives(&self, count: usize) {
        self.wait("the receives are not posted", |state| state.srqs.values().all(|srq| srq.1.len() == count));
    }

    /// Waits until the only SRQ has this limit.
    pub(crate) fn wait_srq_limit(&self, limit: u32) {
        self.wait("the limit is not armed", |state| state.srqs.values().all(|srq| srq.0 == limit));
    }

    /// Accepts `sends` more sends, and refuses the next.
    pub(crate) fn refuse_after(&self, sends: usize) {
        self.with(|state| state.sends_until_refused = Some(sends));
    }

    /// Refuses to enlarge completion queues from now on.
    pub(crate) fn refuse_resize(&self) {
        self.with(|state| state.refuse_resize = true);
    }

    /// Sets whether registrations of memory are refused.
    pub(crate) fn refuse_registration(&self, refuse: bool) {
        self.with(|state| state.refuse_registration = refuse);
    }

    /// Returns the number of existing objects, devices included.
    pub(crate) fn objects(&self) -> usize {
        self.with(|state| state.objects)
    }

    /// Returns the number of registered regions.
    pub(crate) fn regions(&self) -> usize {
        self.with(|state| state.regions.len())
    }
}
