//! Atomic operations.

use pvrdma_verbs_types::{SendOp, WcOpcode, WcStatus};

use super::Subject;
use crate::testing::Buffer;
use crate::{Backend, Hca, QueuePair};

fn word<H: Hca>(buffer: &Buffer<H>, offset: u64) -> u64 {
    u64::from_le_bytes(buffer.read(offset, 8).try_into().unwrap())
}

pub(super) fn atomic_values<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    theirs.write(8, &41_u64.to_le_bytes());
    let remote = theirs.remote(8);
    pair.left.submit(1, SendOp::FetchAdd { remote, add: u64::MAX }, &[mine.sge(0, 8)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status, wc.byte_len), (WcOpcode::FetchAdd, WcStatus::Success, 8));
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (41, 40));
    pair.left.submit(2, SendOp::CompareSwap { remote, compare: 41, swap: 7 }, &[mine.sge(0, 8)]);
    assert_eq!(pair.left.scq.one().opcode, WcOpcode::CompareSwap);
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (40, 40));
    pair.left.submit(3, SendOp::CompareSwap { remote, compare: 40, swap: 7 }, &[mine.sge(0, 8)]);
    assert_eq!(pair.left.scq.one().status, WcStatus::Success);
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (40, 7));
    assert_eq!(mine.read(8, 8), [0; 8]);
}

pub(super) fn atomics_add_up<B: Backend>(subject: &Subject<'_, B>) {
    let pair = subject.pair();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    let sum = pair.a.buffer(64);
    let remote = sum.remote(0);
    // Both ends add to the same word in the memory of the left one.
    for i in 0..50 {
        pair.right.post(i, SendOp::FetchAdd { remote, add: 3 }, &[theirs.sge(0, 8)]);
    }
    pair.right.qp.notify_send();
    let own = pair.a.qp(pvrdma_verbs_types::QpType::Rc);
    own.connect(&own, |_| {});
    for i in 0..50 {
        own.post(i, SendOp::FetchAdd { remote, add: 5 }, &[mine.sge(0, 8)]);
    }
    own.qp.notify_send();
    let all = |done: Vec<(u64, WcStatus)>| done.iter().all(|(_, status)| *status == WcStatus::Success);
    assert!(all(pair.right.scq.statuses(50)) && all(own.scq.statuses(50)));
    assert_eq!(word(&sum, 0), 50 * 8);
}
