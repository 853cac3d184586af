//! Atomics: their values, and that none is lost between threads.

use pvrdma_verbs::{QpType, SendOp, WcOpcode, WcStatus};

use crate::testing::*;
use pvrdma_ether_link::fault::Faults;

fn word(buffer: &Buffer, offset: u64) -> u64 {
    u64::from_le_bytes(buffer.read(offset, 8).try_into().unwrap())
}

#[test]
pub(super) fn values() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    theirs.write(8, &41_u64.to_le_bytes());
    let remote = theirs.remote(8);
    pair.left.submit(1, SendOp::FetchAdd { remote, add: u64::MAX }, &[mine.sge(0, 3), mine.sge(3, 50)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.opcode, wc.status, wc.byte_len), (WcOpcode::FetchAdd, WcStatus::Success, 8));
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (41, 40));
    pair.left.submit(2, SendOp::CompareSwap { remote, compare: 41, swap: 7 }, &[mine.sge(0, 8)]);
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (40, 40));
    pair.left.submit(3, SendOp::CompareSwap { remote, compare: 40, swap: 7 }, &[mine.sge(0, 8)]);
    assert_eq!((word(&mine, 0), word(&theirs, 8)), (40, 7));
    assert_eq!(pair.left.scq.poll()[1].opcode, WcOpcode::CompareSwap);
    assert_eq!(mine.read(8, 8), [0; 8]);
}

#[test]
fn sums_from_many_threads() {
    let world = World::with(|config| config.workers = 2);
    let nodes: Vec<_> = (1..7).map(|number| world.node(number)).collect();
    sums(&world.node(9), &nodes.iter().collect::<Vec<_>>());
}

#[test]
fn sums_from_many_threads_over_a_cable() {
    on_the_wire(Faults::default(), 1, || {
        let world = World::with(|config| config.workers = 2);
        sums(&world.node(1), &[&world.node(2); 6]);
    });
}

/// Adds from a QP and a thread for each of `nodes`.
fn sums(target: &Node, nodes: &[&Node]) {
    const EACH: u64 = 2000;
    let sum = target.buffer(4096);
    let senders: Vec<_> = nodes
        .iter()
        .map(|node| {
            let (end, peer) = (node.qp(QpType::Rc), target.qp(QpType::Rc));
            end.connect(&peer, |_| {});
            peer.connect(&end, |_| {});
            let result = node.buffer(8);
            (end, peer, result)
        })
        .collect();
    std::thread::scope(|scope| {
        for (end, _, result) in &senders {
            let remote = sum.remote(0);
            let sge = result.all();
            scope.spawn(move || {
                for i in 0..EACH {
                    end.submit(i, SendOp::FetchAdd { remote, add: 3 }, &[sge]);
                }
            });
        }
    });
    for (end, ..) in &senders {
        while end.scq.total.load(std::sync::atomic::Ordering::SeqCst) < EACH {
            std::thread::yield_now();
        }
        assert!(end.scq.poll().iter().all(|c| c.status == WcStatus::Success));
    }
    assert_eq!(word(&sum, 0), nodes.len() as u64 * EACH * 3);
}
