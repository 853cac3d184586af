//! Requests that the host or the backend refuses.

use std::sync::Arc;

use pvrdma_verbs::{
    AsyncEvent, Hca, IndexError, QpEvent, QpInit, QueuePair, VerbsError,
    testing::{Node, SEND, gid},
};
use pvrdma_verbs_types::{
    QpAttrMask, QpAttrs, QpCaps, QpState, QpType, Qpn, SendData, SendOp, Sge, UdDestination, WcStatus,
};

use super::{RTS, Reader, Receives, SUCCESS, connected, counter, qpn, request, scripted};
use crate::fake::FakeBackend;
use crate::sys::Wc;

#[test]
fn requests_that_the_host_refuses_fail_after_the_accepted_ones() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    end.recv(50, &[]);
    for wr_id in 1..=5 {
        end.post(wr_id, SEND, &[]);
    }
    backend.host.refuse_after(2);
    end.qp.notify_send();
    assert_eq!((backend.host.sends(qpn(&end)).len(), counter(&node, "sends_posted")), (2, 2));
    // No failure is reported before earlier requests have completed.
    assert!(end.scq.poll().is_empty());
    assert_eq!((end.state(), backend.host.qp_state(qpn(&end))), (QpState::Rts, RTS));
    backend.host.complete_send(qpn(&end), SUCCESS);
    backend.host.complete_send(qpn(&end), SUCCESS);
    let (ok, flushed) = (WcStatus::Success, WcStatus::Flushed);
    let expected = [(1, ok), (2, ok), (3, WcStatus::LocalQpOperation), (4, flushed), (5, flushed)];
    assert_eq!(end.scq.statuses(5), expected);
    assert_eq!(end.rcq.statuses(1), [(50, flushed)]);
    assert_eq!(end.state(), QpState::Error);
}

#[test]
fn an_error_of_the_host_flushes_posted_requests_and_the_ring() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    // More than the host's queue holds: the remainder stays in the ring.
    for wr_id in 0..70 {
        end.post(wr_id, SEND, &[]);
    }
    end.qp.notify_send();
    assert_eq!((backend.host.sends(qpn(&end)).len(), end.sends.posted.lock().len()), (64, 6));
    backend.host.complete_send(qpn(&end), 12);
    let got = end.scq.statuses(70);
    assert_eq!(got[0], (0, WcStatus::RetryExceeded));
    assert!(got[1..].iter().zip(1..).all(|(got, wr_id)| *got == (wr_id, WcStatus::Flushed)), "{got:?}");
}

/// The requests before the unreadable entry were taken from the ring: each completes.
#[test]
fn an_unreadable_ring_ends_the_queue_pair_after_the_taken_requests() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let (end, script) = scripted(&node, None);
    end.connect(&end, |_| {});
    script.push(Ok(request(1)));
    script.push(Ok(request(2)));
    script.push(Err(IndexError::OutOfRange { index: 9, capacity: 4 }.into()));
    end.qp.notify_send();
    assert_eq!(end.scq.statuses(2), [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::Fatal, end.cookie)]);
    assert_eq!(end.state(), QpState::Error);
}

#[test]
fn only_a_datagrams_receive_may_be_too_short_without_an_error_of_the_queue_pair() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let end = node.qp(QpType::Ud);
    end.start_datagrams(5);
    (0..3).for_each(|wr_id| end.recv(wr_id, &[]));
    // Adapters report a length error, rdma_rxe reports an invalid request.
    for (wr_id, code, status) in [(0, 1, WcStatus::LocalLength), (1, 9, WcStatus::RemoteInvalidRequest)] {
        backend.host.complete_receive(qpn(&end), Wc { status: code, ..Wc::default() });
        assert_eq!(end.rcq.statuses(1), [(wr_id, status)]);
        assert_eq!(end.state(), QpState::Rts);
    }
    backend.host.complete_receive(qpn(&end), Wc { status: 4, ..Wc::default() });
    assert_eq!(end.rcq.statuses(1), [(2, WcStatus::LocalProtection)]);
    backend.host.wait_error(qpn(&end));
    assert_eq!(end.state(), QpState::Error);
}

/// A bad request of a datagram QP stops its send queue, which the host does not notice.
#[test]
fn a_send_queue_error_leaves_the_host_queue_pair_unchanged() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let end = node.qp(QpType::Ud);
    end.start_datagrams(5);
    end.submit(1, SendOp::Malformed, &[]);
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::LocalQpOperation)]);
    assert_eq!((end.state(), backend.host.qp_state(qpn(&end))), (QpState::Sqe, RTS));
    end.to(QpState::Rts);
    assert_eq!(end.state(), QpState::Rts);
}

#[test]
fn nothing_is_posted_while_draining_and_the_event_comes_with_the_last_completion() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    end.submit(1, SEND, &[]);
    let drain = QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() };
    end.change(QpState::Sqd, drain, QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    assert!(end.qp.query().sq_draining && node.events.poll().is_empty());
    end.submit(2, SEND, &[]);
    backend.host.complete_send(qpn(&end), SUCCESS);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::SendQueueDrained, end.cookie)]);
    assert!(!end.qp.query().sq_draining && backend.host.sends(qpn(&end)).is_empty());
    assert_eq!(backend.host.qp_state(qpn(&end)), RTS);
    end.to(QpState::Rts);
    assert_eq!(backend.host.sends(qpn(&end)).len(), 1);
}

/// A query returns the attributes that the guest has set, and a state of the host that no event has reported.
#[test]
fn a_query_reports_an_error_without_a_completion() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    end.to(QpState::Sqd);
    end.submit(1, SEND, &[]);
    backend.host.set_qp_state(qpn(&end), 6);
    assert_eq!(end.state(), QpState::Error);
    // Nothing was in flight that could report the error.
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::Flushed)]);
    end.to(QpState::Reset);
    assert_eq!((end.state(), backend.host.qp_state(qpn(&end))), (QpState::Reset, 0));
}

#[test]
fn memory_that_is_not_the_guests_never_reaches_the_host() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    let buffer = node.buffer(64);
    end.submit(1, SEND, &[Sge { lkey: buffer.all().lkey + 1, ..buffer.all() }]);
    assert_eq!(end.scq.statuses(1), [(1, WcStatus::LocalProtection)]);
    assert!(backend.host.sends(qpn(&end)).is_empty());
}

#[test]
fn a_queue_pair_that_has_no_room_for_its_completions_is_not_made() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    backend.host.refuse_resize();
    let before = backend.host.objects();
    let (send_cq, _) = node.cq();
    let make = |depth| {
        let init = QpInit {
            cookie: 1,
            qpn: Qpn::new(1),
            qp_type: QpType::Rc,
            pd: &node.pd,
            send_cq: &send_cq,
            recv_cq: &send_cq,
            srq: None,
            send_queue: Box::new(Reader(Arc::default())),
            recv_queue: Some(Box::new(Receives(Arc::default()))),
            caps: QpCaps { max_send_wr: depth, max_recv_wr: 64, max_send_sge: 1, max_recv_sge: 1 },
            signal_all: false,
        };
        node.hca.create_qp(init)
    };
    assert!(matches!(make(256), Err(VerbsError::Host(_))));
    // The room that was reserved for it is available to others.
    let fits = make(192).unwrap();
    drop((fits, send_cq));
    assert_eq!(backend.host.objects(), before);
}

/// Returns a datagram to a GID.
fn datagram_to(number: u8) -> SendOp {
    let to = UdDestination { qpn: Qpn::new(7), dgid: gid(number), ..UdDestination::default() };
    SendOp::Send { data: SendData::None, to: Some(to) }
}

/// Regression test: an unknown peer was looked up on the doorbell's thread, with the guest's memory locked, for seconds
/// each time. The doorbell of this test did not return.
#[test]
fn an_absent_peer_stops_neither_doorbells_nor_commands() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let (end, other) = (node.qp(QpType::Ud), node.qp(QpType::Ud));
    [&end, &other].iter().for_each(|end| end.start_datagrams(5));
    backend.host.answer_look_ups(None);
    end.submit(1, datagram_to(9), &[]);
    end.submit(2, datagram_to(9), &[]);
    // Commands and other memory operations continue.
    drop(node.buffer(64));
    node.memory.set_enabled(false);
    node.memory.set_enabled(true);
    assert_eq!((end.state(), other.state()), (QpState::Rts, QpState::Rts));
    backend.host.answer_look_ups(Some(false));
    assert_eq!(end.scq.statuses(2), [(1, WcStatus::LocalQpOperation), (2, WcStatus::Flushed)]);
    assert_eq!(backend.host.look_ups(), 1);
    // The peer is not looked up again immediately.
    end.to(QpState::Rts);
    end.submit(3, datagram_to(9), &[]);
    assert_eq!(end.scq.statuses(1), [(3, WcStatus::LocalQpOperation)]);
    assert_eq!(backend.host.look_ups(), 1);
    // A peer that exists is looked up once.
    backend.host.answer_look_ups(Some(true));
    end.to(QpState::Rts);
    end.submit(4, datagram_to(8), &[]);
    end.submit(5, datagram_to(8), &[]);
    backend.host.wait_sends(qpn(&end), 2);
    assert_eq!(backend.host.look_ups(), 2);
    (0..2).for_each(|_| backend.host.complete_send(qpn(&end), SUCCESS));
    assert_eq!(end.scq.statuses(2), [(4, WcStatus::Success), (5, WcStatus::Success)]);
}

/// Destroying a queue pair does not wait for an answer, and resetting one repeatedly does not start further look-ups.
#[test]
fn an_answer_that_comes_too_late_is_ignored() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let (gone, end) = (node.qp(QpType::Ud), node.qp(QpType::Ud));
    [&gone, &end].iter().for_each(|end| end.start_datagrams(5));
    backend.host.answer_look_ups(None);
    gone.submit(1, datagram_to(9), &[]);
    end.submit(1, datagram_to(9), &[]);
    gone.qp.destroy();
    for _ in 0..10 {
        end.to(QpState::Reset);
        end.start_datagrams(5);
        end.submit(1, datagram_to(9), &[]);
    }
    end.to(QpState::Reset);
    end.start_datagrams(5);
    backend.host.answer_look_ups(Some(true));
    end.submit(2, datagram_to(8), &[]);
    backend.host.wait_sends(qpn(&end), 1);
    assert!(backend.host.look_ups() <= 3, "{}", backend.host.look_ups());
    backend.host.complete_send(qpn(&end), SUCCESS);
    assert_eq!(end.scq.statuses(1), [(2, WcStatus::Success)]);
    assert!(gone.scq.poll().is_empty());
}

/// After a look-up, the thread that did it reads the ring, without another doorbell.
#[test]
fn a_ring_that_breaks_while_a_peer_is_looked_up_ends_both_sides() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let end = node.qp(QpType::Ud);
    end.start_datagrams(5);
    end.recv(1, &[]);
    backend.host.answer_look_ups(None);
    end.submit(2, datagram_to(9), &[]);
    end.sends.break_off();
    backend.host.answer_look_ups(Some(true));
    assert_eq!(end.rcq.statuses(1), [(1, WcStatus::Flushed)]);
    assert_eq!(end.scq.statuses(1), [(2, WcStatus::Flushed)]);
    assert_eq!(node.events.wait(1), [AsyncEvent::Qp(QpEvent::Fatal, end.cookie)]);
}
