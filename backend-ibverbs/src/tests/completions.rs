//! Completions of the host.

use std::sync::Arc;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    CompletionQueue, CompletionSink, CqOverrun, Hca, QueuePair,
    testing::{Node, SEND},
};
use pvrdma_verbs_types::{Completion, QpState, SendFlags, WcFlags, WcOpcode, WcStatus};

use super::{SUCCESS, connected, counter, qpn, request, scripted};
use crate::fake::FakeBackend;
use crate::inflight::{Epoch, WrId};
use crate::sys::{WC_RECV_RDMA_WITH_IMM, WC_WITH_IMM, Wc};

#[test]
fn an_event_of_the_host_brings_a_completion_and_the_queue_is_armed_again() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    let qpn = qpn(&end);
    for wr_id in 1..=3 {
        backend.host.wait_armed(qpn);
        end.submit(wr_id, SEND, &[]);
        backend.host.complete_send(qpn, SUCCESS);
        let got = end.scq.one();
        assert_eq!((got.wr_id, got.qp, got.status, got.opcode), (wr_id, end.cookie, WcStatus::Success, WcOpcode::Send));
    }
    backend.host.wait_armed(qpn);
    assert_eq!(backend.host.arms(qpn), 4);
}

/// Every request completes on the host, and the guest receives only the completions that it requested.
#[test]
fn a_completion_stands_for_those_before_it_and_unsignaled_ones_are_not_published() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    end.post_with(1, SEND, &[], SendFlags::empty());
    end.post_with(2, SEND, &[], SendFlags::SIGNALED);
    end.post_with(3, SEND, &[], SendFlags::empty());
    end.submit(4, SEND, &[]);
    assert_eq!((end.sends.retired(), backend.host.sends(qpn(&end)).len()), (4, 4));
    let last = backend.host.sends(qpn(&end))[3].clone();
    // An adapter may omit completions of earlier requests that succeeded.
    backend.host.forge_completion(qpn(&end), Wc { wr_id: last.wr_id, qp_num: qpn(&end), ..Wc::default() });
    assert_eq!(end.scq.statuses(2), [(2, WcStatus::Success), (4, WcStatus::Success)]);
}

#[test]
fn completions_of_requests_before_a_reset_are_ignored() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    end.submit(1, SEND, &[]);
    let old = backend.host.sends(qpn(&end))[0].wr_id;
    end.to(QpState::Reset);
    end.connect(&end, |_| {});
    end.submit(2, SEND, &[]);
    let new = backend.host.sends(qpn(&end))[0].wr_id;
    assert_eq!(WrId::decode(old).number, WrId::decode(new).number);
    // The old request, one of a queue that never existed, a number that is not in flight, a receive, and a QP that
    // never existed.
    let unknown = WrId { epoch: Epoch::begin(), ..WrId::decode(new) }.encode();
    for (wr_id, qp_num) in
        [(old, qpn(&end)), (unknown, qpn(&end)), (new + 1, qpn(&end)), (new | 1 << 63, qpn(&end)), (new, 999)]
    {
        backend.host.forge_completion(qpn(&end), Wc { wr_id, qp_num, ..Wc::default() });
    }
    // An error of the old request does not affect the new epoch.
    backend.host.forge_completion(qpn(&end), Wc { wr_id: old, qp_num: qpn(&end), status: 12, ..Wc::default() });
    backend.host.complete_send(qpn(&end), SUCCESS);
    assert_eq!(end.scq.statuses(1), [(2, WcStatus::Success)]);
    assert!(end.rcq.poll().is_empty());
    assert_eq!((counter(&node, "stale_completions"), end.state()), (6, QpState::Rts));
}

#[test]
fn a_guest_that_polls_has_the_hosts_queue_polled() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    end.submit(1, SEND, &[]);
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.scq.one();
    // The thread has left the queue to the guest, or has armed it; either way the completion arrives without delay.
    end.submit(2, SEND, &[]);
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.cqs.0.notify_poll();
    end.scq.one();
    // The guest stops polling: the queue is armed again without its help.
    backend.host.wait_armed(qpn(&end));
    end.submit(3, SEND, &[]);
    end.cqs.0.notify_arm();
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.scq.one();
}

#[test]
fn a_receive_completion_has_the_values_of_the_host() {
    let backend = FakeBackend::new();
    let (end, _node) = connected(&backend);
    for wr_id in 1..=3 {
        end.recv(wr_id, &[]);
    }
    let arrived = |wc| {
        backend.host.complete_receive(qpn(&end), wc);
        end.rcq.one()
    };
    let plain = arrived(Wc { byte_len: 100, opcode: 128, ..Wc::default() });
    assert_eq!((plain.wr_id, plain.opcode, plain.byte_len, plain.flags), (1, WcOpcode::Recv, 100, WcFlags::empty()));
    // The host does not report whether the sender requested the event, and a waiting guest must not miss it.
    assert!(plain.solicited);
    let written = arrived(Wc {
        byte_len: 8,
        opcode: WC_RECV_RDMA_WITH_IMM,
        wc_flags: WC_WITH_IMM,
        extra: [1, 2, 3, 4],
        ..Wc::default()
    });
    assert_eq!((written.opcode, written.flags), (WcOpcode::RecvRdmaWithImmediate, WcFlags::IMMEDIATE));
    assert_eq!(written.immediate, [1, 2, 3, 4]);
    backend.host.fail_receive(qpn(&end), Wc { status: 1, byte_len: 8, wc_flags: WC_WITH_IMM, ..Wc::default() });
    let failed = end.rcq.one();
    assert_eq!((failed.status, failed.byte_len, failed.flags), (WcStatus::LocalLength, 0, WcFlags::empty()));
    // The error ends the QP on the host. If it were moved to the error state, rdma_rxe would not report the error to
    // the peer.
    end.recv(4, &[]);
    assert_eq!(end.rcq.statuses(1), [(4, WcStatus::Flushed)]);
    assert!(end.state() == QpState::Error && !backend.host.was_stopped(qpn(&end)));
}

/// A guest's queue without room.
struct Full;

impl CompletionSink for Full {
    fn complete(&self, _: &DmaView<'_>, _: &Completion) -> Result<(), CqOverrun> {
        Err(CqOverrun)
    }
}

#[test]
fn a_guest_whose_queue_overruns_loses_its_queue_pairs() {
    let backend = FakeBackend::new();
    let node = Node::new(&backend, 1);
    let full = node.hca.create_cq(Arc::new(Full)).unwrap();
    let (end, script) = scripted(&node, Some(full));
    end.connect(&end, |_| {});
    script.push(Ok(request(1)));
    end.qp.notify_send();
    end.recv(7, &[]);
    backend.host.complete_send(qpn(&end), SUCCESS);
    backend.host.wait_error(qpn(&end));
    assert_eq!(end.rcq.statuses(1), [(7, WcStatus::Flushed)]);
    assert_eq!((end.state(), counter(&node, "cq_overruns")), (QpState::Error, 1));
}
