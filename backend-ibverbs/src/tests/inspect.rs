//! Snapshots of objects.

use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs::{CompletionQueue, Hca, MemoryRegion, QueuePair, SharedReceiveQueue, testing::SEND};
use pvrdma_verbs_types::QpState;
use serde_json::json;

use super::{SUCCESS, connected, qpn};
use crate::fake::FakeBackend;

#[test]
fn objects_describe_themselves_without_asking_the_host() {
    let backend = FakeBackend::new();
    let (end, node) = connected(&backend);
    end.submit(1, SEND, &[]);
    let shown = end.qp.inspect();
    assert_eq!((&shown["state"], &shown["host_qpn"]), (&json!("RTS"), &json!(qpn(&end))), "{shown}");
    assert_eq!((&shown["sends_in_flight"], &shown["receives_in_flight"]), (&json!(1), &json!(0)), "{shown}");
    assert_eq!(end.qp.try_query().map(|attrs| attrs.state), Some(QpState::Rts));
    backend.host.complete_send(qpn(&end), SUCCESS);
    end.scq.one();
    // The lock is free once the device's thread has processed the completion.
    drop(end.cqs.0.cq.lock());
    assert_eq!(end.qp.inspect()["sends_in_flight"], 0);

    // The thread continues to poll for a while.
    let cq = std::iter::repeat_with(|| end.cqs.0.inspect()).find(|cq| cq["host"] != "busy").unwrap();
    assert!(cq["host"]["entries"].as_u64() >= cq["host"]["needed"].as_u64(), "{cq}");
    let taking = end.cqs.0.cq.lock();
    assert_eq!(end.cqs.0.inspect()["host"], "busy");
    drop(taking);

    let buffer = node.buffer(64);
    assert_eq!(buffer.mr.inspect(), json!({"alive": true, "registered_bytes": PAGE_SIZE}));
    let shown = node.hca.inspect();
    assert_eq!((&shown["registered_bytes"], &shown["host_port"]), (&json!(PAGE_SIZE), &json!(1)), "{shown}");
    buffer.mr.destroy();
    assert_eq!(buffer.mr.inspect(), json!({"alive": false, "registered_bytes": 0}));

    let (srq, _ring) = node.srq(2);
    let shown = SharedReceiveQueue::inspect(&srq);
    assert_eq!((&shown["limit"], &shown["receives_in_flight"]), (&json!(2), &json!(0)), "{shown}");
}
