//! Asynchronous events of the host.

use pvrdma_verbs::{
    AsyncEvent, Hca, PortEvent, QpEvent, QueuePair, SharedReceiveQueue, SrqEvent,
    testing::{Node, SEND},
};
use pvrdma_verbs_types::{QpState, QpType, RecvWr, WcStatus};

use super::{SUCCESS, connected, counter, qpn};
use crate::fake::{FakeBackend, unacknowledged};
use crate::sys::{
    EVENT_CQ_ERR, EVENT_DEVICE_FATAL, EVENT_PORT_ACTIVE, EVENT_PORT_ERR, EVENT_QP_ACCESS_ERR,
    EVENT_QP_LAST_WQE_REACHED, EVENT_SQ_DRAINED, Wc,
};
use crate::verbs::HostEvent;

#[test]
fn an_overrun_of_the_hosts_queue_ends_the_queue_pairs_of_it_only() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let other = node.qp(QpType::Rc);
    other.connect(&end, |_| {});
    end.submit(1, SEND, &[]);
    backend.host.raise(EVENT_CQ_ERR, backend.host.send_cq(qpn(&end)));
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::Fatal, end.cookie)]);
    other.submit(2, SEND, &[]);
    backend.host.complete_send(qpn(&other), SUCCESS);
    assert_eq!(other.scq.statuses(1), [(2, WcStatus::Success)]);
    assert_eq!((end.state(), other.state()), (QpState::Error, QpState::Rts));
    assert!(end.scq.poll().is_empty());
}

#[test]
fn a_lost_device_flushes_everything_and_leaves_nothing_registered() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let buffer = node.buffer(4096);
    end.recv(5, &[buffer.all()]);
    end.post(1, SEND, &[buffer.all()]);
    end.submit(2, SEND, &[]);
    assert_eq!(backend.host.regions(), 1);
    backend.host.raise(EVENT_DEVICE_FATAL, 0);
    assert_eq!(end.scq.statuses(2), [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]);
    assert_eq!(end.rcq.statuses(1), [(5, WcStatus::Flushed)]);
    let events = node.events.wait(2);
    assert_eq!(events, [AsyncEvent::Port(PortEvent::Error), AsyncEvent::Qp(QpEvent::Fatal, end.cookie)]);
    // Requests that the guest posts later do not wait for an adapter that will not answer.
    end.submit(3, SEND, &[]);
    assert_eq!(end.scq.statuses(1), [(3, WcStatus::Flushed)]);
    // The registrations end last.
    backend.host.raise(EVENT_PORT_ACTIVE, 0);
    node.events.wait(1);
    assert_eq!((backend.host.regions(), counter(&node, "regions_revoked")), (0, 1));
}

#[test]
fn events_reach_the_object_that_they_are_about() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let qp = backend.host.qp(qpn(&end));
    // Events of objects that never existed, an event without meaning, and a drain event, which the host must not cause
    // because draining is implemented by the backend.
    for (number, address) in [(EVENT_QP_ACCESS_ERR, 8), (EVENT_CQ_ERR, 8), (99, qp), (EVENT_SQ_DRAINED, qp)] {
        backend.host.raise(number, address);
    }
    backend.host.raise(EVENT_PORT_ERR, 0);
    backend.host.raise(EVENT_PORT_ACTIVE, 0);
    let (down, up) = (AsyncEvent::Port(PortEvent::Error), AsyncEvent::Port(PortEvent::Active));
    assert_eq!(node.events.wait(2), [down, up]);
    backend.host.raise(EVENT_QP_ACCESS_ERR, qp);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::AccessError, end.cookie)]);
    backend.host.raise(EVENT_PORT_ACTIVE, 0);
    node.events.wait(1);
    assert_eq!(end.state(), QpState::Error);
}

/// After the acknowledgement, another object may have the same address.
#[test]
fn an_event_is_acknowledged_when_its_object_was_looked_up() {
    let backend = FakeBackend::new();
    let device = backend.open();
    backend.host.raise(EVENT_QP_ACCESS_ERR, 8);
    let found = device.next_event(|event| (event, unacknowledged()));
    assert_eq!(found, Some((HostEvent::Qp { event: QpEvent::AccessError, qp: 8 }, 1)));
    assert_eq!((unacknowledged(), device.next_event(|_| ())), (0, None));
}

#[test]
fn the_last_wqe_is_announced_once_until_the_queue_pair_starts_over() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let qp = backend.host.qp(qpn(&end));
    let announce = || {
        backend.host.raise(EVENT_QP_LAST_WQE_REACHED, qp);
        backend.host.raise(EVENT_PORT_ACTIVE, 0);
    };
    let last = AsyncEvent::Qp(QpEvent::LastWqeReached, end.cookie);
    let up = AsyncEvent::Port(PortEvent::Active);
    // An event of an earlier epoch.
    announce();
    assert_eq!(node.events.wait(1), [up]);
    // The host may report this before any other event reports the error.
    backend.host.set_qp_state(qpn(&end), 6);
    announce();
    assert_eq!(node.events.wait(2), [last, up]);
    announce();
    assert_eq!(node.events.wait(1), [up]);
    end.to(QpState::Reset);
    announce();
    assert_eq!(node.events.wait(1), [up]);
    end.connect(&end, |_| {});
    end.to(QpState::Error);
    announce();
    assert_eq!(node.events.wait(2), [last, up]);
}

#[test]
fn an_srq_limit_counts_receives_that_the_host_does_not_have_yet() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let (srq, ring) = node.srq(3);
    let end = node.qp_with(QpType::Rc, Some(&srq), |_| {});
    end.connect(&end, |_| {});
    ring.posted.lock().extend((0..70).map(|wr_id| RecvWr { wr_id, ..RecvWr::default() }));
    srq.notify_recv();
    assert_eq!((backend.host.shared_receives(), ring.posted.lock().len()), (64, 6));
    // The host has few receives left, but the guest has posted more, so the guest is not notified. The host has no room
    // for them and would fire again at once, so the limit is not armed before receives are posted to the host.
    backend.host.reach_srq_limit();
    backend.host.raise(EVENT_PORT_ACTIVE, 0);
    assert_eq!(node.events.wait(1), [AsyncEvent::Port(PortEvent::Active)]);
    assert_eq!((srq.limit(), backend.host.srq_limit()), (3, 0));
    for _ in 0..6 {
        backend.host.complete_receive(qpn(&end), Wc { opcode: 128, ..Wc::default() });
    }
    // A shared queue is refilled by the backend.
    assert_eq!(end.rcq.wait(6).len(), 6);
    backend.host.wait_shared_receives(64);
    assert!(ring.posted.lock().is_empty());
    backend.host.wait_srq_limit(3);
    backend.host.reach_srq_limit();
    assert_eq!(node.events.wait(1), [AsyncEvent::Srq(SrqEvent::LimitReached, 77)]);
    assert_eq!(srq.limit(), 0);
    // A limit that has fired is disarmed.
    backend.host.reach_srq_limit();
    backend.host.raise(EVENT_PORT_ERR, 0);
    assert_eq!(node.events.wait(1), [AsyncEvent::Port(PortEvent::Error)]);
}

#[test]
fn a_device_that_ends_leaves_nothing_at_the_host() {
    let backend = FakeBackend::new();
    {
        let (end, node) = connected(&backend);
        let (srq, _ring) = node.srq(0);
        let shared = node.qp_with(QpType::Rc, Some(&srq), |_| {});
        let datagrams = node.qp(QpType::Ud);
        datagrams.start_datagrams(1);
        let buffer = node.buffer(64);
        end.recv(1, &[buffer.all()]);
        end.submit(1, SEND, &[buffer.all()]);
        end.qp.destroy();
        // Nothing is published for it any more, and destroying it again has no effect.
        end.qp.destroy();
        assert!(end.scq.poll().is_empty() && end.rcq.poll().is_empty());
        drop((shared, buffer));
        assert!(node.hca.limits().max_qp > 0);
    }
    assert_eq!((backend.host.objects(), backend.host.regions()), (0, 0));
}
