//! Races between threads: the state that one has read changes before it continues.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    AsyncEvent, Hca, IndexError, MemoryRegion, MrRequest, PortEvent, QpEvent, QueueError, QueuePair, RecvSource,
    SendSource, SharedReceiveQueue, SrqEvent, SrqInit,
    testing::{End, Node, SEND},
};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpType, RecvWr, SendOp, SendWr, WcStatus};

use super::memory::fill;
use super::{SUCCESS, connected, qpn, request, until};
use crate::fake::{Call, FakeBackend};
use crate::handles::{IbvMr, IbvQp};
use crate::hca::IbvHca;
use crate::sys::{EVENT_PORT_ACTIVE, Wc};

/// A receive queue that returns these results, including errors.
#[derive(Clone, Default)]
struct Given(Arc<Mutex<VecDeque<Result<RecvWr, QueueError>>>>);

impl Given {
    /// Adds receives without memory, followed by an unreadable entry.
    fn break_after(&self, wr_ids: impl IntoIterator<Item = u64>) {
        let receives = wr_ids.into_iter().map(|wr_id| Ok(RecvWr { wr_id, ..RecvWr::default() }));
        self.0.lock().extend(receives.chain([Err(IndexError::OutOfRange { index: 9, capacity: 4 }.into())]));
    }
}

impl RecvSource for Given {
    fn pop(&mut self, _: &DmaView<'_>, wr: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(self.0.lock().pop_front().transpose()?.map(|next| *wr = next).is_some())
    }

    fn posted(&mut self, _: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.lock().len()).unwrap())
    }

    fn reset(&mut self) {}
}

/// A send queue with one request at a time, which meets the test at a barrier twice before it returns the request.
#[derive(Clone)]
struct Met {
    next: Arc<Mutex<Option<SendWr>>>,
    meeting: Arc<Barrier>,
}

impl Met {
    fn new() -> Self {
        Self { next: Arc::default(), meeting: Arc::new(Barrier::new(2)) }
    }

    /// Posts a request and rings. Runs `meanwhile` on this thread after the state of the queue pair was read and before
    /// the request is taken from the ring.
    fn submit(&self, end: &End<IbvHca>, wr: SendWr, meanwhile: impl FnOnce()) {
        *self.next.lock() = Some(wr);
        thread::scope(|scope| {
            scope.spawn(|| end.qp.notify_send());
            self.meeting.wait();
            meanwhile();
            self.meeting.wait();
        });
    }
}

impl SendSource for Met {
    fn pop(&mut self, _: &DmaView<'_>, wr: &mut SendWr) -> Result<bool, QueueError> {
        if self.next.lock().is_none() {
            return Ok(false);
        }
        self.meeting.wait();
        self.meeting.wait();
        Ok(self.next.lock().take().map(|next| *wr = next).is_some())
    }

    fn retire(&mut self, _: &DmaView<'_>) {}

    fn reset(&mut self) {}
}

/// Returns the state as known to the daemon, without querying the host.
fn known_state(end: &End<IbvHca>) -> QpState {
    loop {
        if let Some(attrs) = end.qp.try_query() {
            return attrs.state;
        }
        thread::yield_now();
    }
}

/// A refused request of a datagram QP stops its sends, but does not override a state that a command has set meanwhile.
#[test]
fn a_send_queue_error_does_not_undo_a_change_of_the_state() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let met = Met::new();
    let end = node.qp_with(QpType::Ud, None, |init| init.send_queue = Box::new(met.clone()));
    end.start_datagrams(5);
    thread::scope(|scope| {
        let refused = SendWr { op: SendOp::Malformed, ..request(1) };
        met.submit(&end, refused, || {
            scope.spawn(|| end.to(QpState::Error));
            until("the QP is not in its error state", || known_state(&end) == QpState::Error);
        });
    });
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::LocalQpOperation)]);
    assert_eq!(known_state(&end), QpState::Error);
}

/// In the next epoch, a message would go to memory that has been returned to the guest.
#[test]
fn requests_posted_during_a_reset_end_with_it() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    let reset = || {
        thread::scope(|scope| {
            scope.spawn(|| end.to(QpState::Reset));
            until("the QP is not reset", || known_state(&end) == QpState::Reset);
            backend.host.let_go();
        });
    };
    thread::scope(|scope| {
        backend.host.hold(Call::PostReceive);
        scope.spawn(|| end.recv(1, &[]));
        backend.host.wait_held();
        reset();
    });
    assert!(backend.host.receives(qpn(&end)).is_empty());
    end.connect(&end, |_| {});
    thread::scope(|scope| {
        backend.host.hold(Call::PostSend);
        scope.spawn(|| end.submit(2, SEND, &[]));
        backend.host.wait_held();
        reset();
    });
    assert!(backend.host.sends(qpn(&end)).is_empty());
    assert_eq!((end.state(), backend.host.qp_state(qpn(&end))), (QpState::Reset, 0));
}

/// The thread that notices the error stops the host's queue pair, unless a reset came first.
#[test]
fn a_queue_pair_that_was_reset_is_not_stopped_for_an_earlier_error() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let end = node.qp(QpType::Ud);
    end.start_datagrams(5);
    end.recv(1, &[]);
    backend.host.hold(Call::Stop);
    backend.host.complete_receive(qpn(&end), Wc { status: 4, ..Wc::default() });
    thread::scope(|scope| {
        // The device's thread, which holds no lock.
        backend.host.wait_held();
        scope.spawn(|| end.to(QpState::Reset));
        until("the QP is not reset", || known_state(&end) == QpState::Reset);
        backend.host.let_go();
    });
    assert_eq!((known_state(&end), backend.host.qp_state(qpn(&end))), (QpState::Reset, 0));
}

/// The event means that nothing of the queue is in flight any more.
#[test]
fn a_queue_is_not_drained_before_a_concurrent_post_has_ended() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let met = Met::new();
    let end = node.qp_with(QpType::Rc, None, |init| init.send_queue = Box::new(met.clone()));
    end.connect(&end, |_| {});
    let notify = QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() };
    thread::scope(|scope| {
        met.submit(&end, request(1), || {
            scope.spawn(|| end.change(QpState::Sqd, notify, QpAttrMask::EN_SQD_ASYNC_NOTIFY));
            until("the QP does not drain", || known_state(&end) == QpState::Sqd);
        });
    });
    assert!(node.events.poll().is_empty() && end.qp.query().sq_draining);
    // Changing an attribute does not cancel the notification.
    end.change(QpState::Sqd, QpAttrs { timeout: 9, ..QpAttrs::default() }, QpAttrMask::TIMEOUT);
    backend.host.complete_send(qpn(&end), SUCCESS);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::SendQueueDrained, end.cookie)]);
}

/// The host completes nothing any more.
#[test]
fn requests_that_are_being_posted_at_the_loss_of_the_device_are_flushed() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let met = Met::new();
    let end = node.qp_with(QpType::Rc, None, |init| init.send_queue = Box::new(met.clone()));
    end.connect(&end, |_| {});
    let IbvQp::Host(qp) = &end.qp else { unreachable!() };
    thread::scope(|scope| {
        met.submit(&end, request(1), || {
            scope.spawn(|| qp.abandon());
            until("the QP does not end", || known_state(&end) == QpState::Error);
        });
    });
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::Flushed)]);
}

/// A fast registration is being posted when `end` ends it. Returns the number of registrations after that.
fn registered_after(end: impl FnOnce(&Node<IbvHca>, &IbvMr) + Send) -> usize {
    let backend = FakeBackend::new();
    let (poster, node) = connected(&backend);
    let region = node.hca.register_mr(&node.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    thread::scope(|scope| {
        backend.host.hold(Call::PostSend);
        scope.spawn(|| poster.submit(1, fill(&node, region.rkey() | 1), &[]));
        backend.host.wait_held();
        let ended = scope.spawn(|| {
            end(&node, &region);
            backend.host.regions()
        });
        until("the resource does not end by itself", || node.memory.try_view().is_none() || ended.is_finished());
        backend.host.let_go();
        ended.join().unwrap()
    })
}

/// The window that is being bound keeps the region that it is bound to.
#[test]
fn ending_a_fast_registration_waits_for_its_post() {
    assert_eq!(registered_after(|node, _| node.memory.set_enabled(false)), 0);
    assert_eq!(registered_after(|_, region| region.destroy()), 0);
}

/// A receive queue without receives, which meets the test at a barrier twice when it is asked for its length.
struct Counted(Arc<Barrier>);

impl RecvSource for Counted {
    fn pop(&mut self, _: &DmaView<'_>, _: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(false)
    }

    fn posted(&mut self, _: &DmaView<'_>) -> Result<u32, QueueError> {
        self.0.wait();
        self.0.wait();
        Ok(0)
    }

    fn reset(&mut self) {}
}

/// The guest sets another limit, or the same again, while the host's event for the old one is being handled.
#[test]
fn a_limit_that_fires_does_not_undo_a_new_one() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let meeting = Arc::new(Barrier::new(2));
    let queue = Box::new(Counted(Arc::clone(&meeting)));
    let init = SrqInit { cookie: 77, pd: &node.pd, queue, limit: 3, max_wr: 64, max_sge: 4 };
    let srq = node.hca.create_srq(init).unwrap();
    for limit in [5, 5] {
        backend.host.reach_srq_limit();
        meeting.wait();
        srq.set_limit(limit);
        meeting.wait();
        backend.host.raise(EVENT_PORT_ACTIVE, 0);
        assert_eq!(node.events.wait(1), [AsyncEvent::Port(PortEvent::Active)]);
        assert_eq!((srq.limit(), backend.host.srq_limit()), (limit, limit));
    }
}

/// Receives before the unreadable entry were posted to the host, which flushes them. The sends of the QP end too,
/// although the guest does not ring for them.
#[test]
fn receives_in_front_of_a_broken_place_of_the_ring_complete() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let given = Given::default();
    let end = node.qp_with(QpType::Rc, None, |init| init.recv_queue = Some(Box::new(given.clone())));
    end.connect(&end, |_| {});
    end.post(7, SEND, &[]);
    given.break_after([1, 2]);
    end.qp.notify_recv();
    let flushed = |wr_id| (wr_id, WcStatus::Flushed);
    assert_eq!(end.rcq.statuses(2), [flushed(1), flushed(2)]);
    assert_eq!(end.scq.statuses(1), [flushed(7)]);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::Fatal, end.cookie)]);
    assert_eq!(end.state(), QpState::Error);
    assert!(backend.host.was_stopped(qpn(&end)));
}

#[test]
fn a_shared_queue_posts_the_receives_before_an_invalid_entry() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let given = Given::default();
    given.break_after([1, 2]);
    let init = SrqInit { cookie: 77, pd: &node.pd, queue: Box::new(given), limit: 0, max_wr: 64, max_sge: 4 };
    let srq = node.hca.create_srq(init).unwrap();
    srq.notify_recv();
    assert_eq!(node.events.wait(1), [AsyncEvent::Srq(SrqEvent::Error, 77)]);
    assert_eq!(backend.host.shared_receives(), 2);
}
