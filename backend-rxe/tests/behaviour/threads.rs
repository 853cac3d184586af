//! Real threads: workers, doorbells from everywhere, and destruction under traffic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pvrdma_link::{MonotonicClock, fault::Faults};
use pvrdma_rxe::RxeQp;
use pvrdma_verbs::{Hca, MemoryRegion, QueuePair, SharedReceiveQueue};
use pvrdma_verbs_types::{QpState, QpType, RecvWr, SendOp, WcStatus};

use crate::gate::Gate;
use crate::world::*;

pub(crate) fn threaded(workers: usize) -> World {
    World::with(|config| {
        config.workers = workers;
        config.clock = Arc::new(MonotonicClock::default());
        (config.inline_bytes, config.inline_requests) = (4096, 4);
        (config.worker_bytes, config.worker_requests) = (64 << 10, 16);
    })
}

/// Waits for a condition that another thread fulfils.
pub(crate) fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::yield_now();
    }
}

#[test]
fn both_directions_at_once_with_late_receives() {
    const COUNT: u64 = 3000;
    let pair = Pair::with(threaded(2), |_| {}, |a| a.min_rnr_timer = 1);
    let (mine, theirs) = (pair.a.buffer(4096), pair.b.buffer(4096));
    let ends =
        [(&pair.left, mine.sge(0, 512), mine.sge(2048, 512)), (&pair.right, theirs.sge(0, 512), theirs.sge(2048, 512))];
    std::thread::scope(|scope| {
        for (end, from, to) in ends {
            scope.spawn(move || (0..COUNT).for_each(|i| end.send(i, &[from])));
            scope.spawn(move || (0..COUNT).for_each(|i| end.recv(i, &[to])));
        }
    });
    let expected: Vec<_> = (0..COUNT).map(|i| (i, WcStatus::Success)).collect();
    for end in [&pair.left, &pair.right] {
        for queue in [&end.scq, &end.rcq] {
            wait("the end of all messages", || queue.total() == COUNT);
            assert!(queue.poll_statuses() == expected, "completions are out of order or have errors");
        }
    }
}

#[test]
fn wakeups_are_not_lost() {
    // The RNR wait is too long to expire, so every message depends on the receiver's notification.
    let pair = Pair::with(threaded(1), |_| {}, |a| a.min_rnr_timer = 0);
    let start = Instant::now();
    for i in 0..300 {
        std::thread::scope(|scope| {
            scope.spawn(|| pair.left.send(i, &[]));
            scope.spawn(|| pair.right.recv(i, &[]));
        });
        wait("a message", || pair.left.scq.total() == i + 1);
    }
    assert!(start.elapsed() < Duration::from_secs(30), "messages waited for timers instead of wake-ups");
    assert_eq!(pair.a.counter("rnr_retries"), 0);
}

#[test]
fn destruction_under_traffic() {
    let world = threaded(2);
    let (a, b) = (world.node(1), world.node(2));
    for round in 0..60_u64 {
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        let (mine, theirs) = (a.buffer(20_000), b.buffer(20_000));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (end, from, to) in [(&left, &mine, &theirs), (&right, &theirs, &mine)] {
                let stop = &stop;
                scope.spawn(move || {
                    let mut i = 0;
                    while !stop.load(Ordering::SeqCst) {
                        if end.sends.posted.lock().len() < 64 {
                            end.submit(i, write(to.remote(0)), &[from.all()]);
                            end.recv(i, &[]);
                            end.submit(i, SEND, &[]);
                        }
                        i += 1;
                    }
                });
            }
            wait("traffic", || left.scq.total() > 20);
            match round % 6 {
                0 => left.qp.destroy(),
                1 => right.qp.destroy(),
                2 => theirs.mr.destroy(),
                3 => left.to(QpState::Reset),
                4 => right.to(QpState::Error),
                _ => {
                    left.qp.destroy();
                    right.qp.destroy();
                }
            }
            if round % 6 < 2 {
                // A destroyed QP publishes no more completions.
                let end = if round % 6 == 0 { &left } else { &right };
                let before = (end.scq.total(), end.rcq.total());
                std::thread::yield_now();
                let after = (end.scq.total(), end.rcq.total());
                assert_eq!(before, after);
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}

#[test]
fn unmapping_under_traffic() {
    let pair = Pair::with(threaded(2), |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(1 << 20), pair.b.buffer(1 << 20));
    // The traffic continues until the error: a fixed number of requests may all end before the memory is unmapped.
    let write_until_error = |end: &End, from: &Buffer, to: &Buffer| {
        for i in (0..).take_while(|_| end.state() != QpState::Error) {
            end.submit(i, write(to.remote(0)), &[from.all()]);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| write_until_error(&pair.left, &mine, &theirs));
        scope.spawn(|| write_until_error(&pair.right, &theirs, &mine));
        wait("traffic", || pair.left.scq.total() > 3);
        pair.b.memory.unmap_all();
    });
    wait("errors", || pair.left.state() == QpState::Error && pair.right.state() == QpState::Error);
}

#[test]
fn timers_of_the_real_clock() {
    let pair = Pair::with(threaded(1), |a| (a.timeout, a.retry_cnt) = (10, 2), |_| {});
    pair.right.qp.destroy();
    let start = Instant::now();
    pair.left.send(1, &[]);
    wait("the end of the retries", || pair.left.scq.total() == 1);
    assert_eq!(pair.left.scq.one().status, WcStatus::RetryExceeded);
    assert!(start.elapsed() >= Duration::from_nanos(4096 << 10) * 3);
}

#[test]
fn workers_end_with_their_backend() {
    for _ in 0..50 {
        let Pair { world, a, b, left, right } = Pair::with(threaded(2), |_| {}, |_| {});
        left.send(1, &[]);
        drop((world, a, b));
        left.send(2, &[]);
        drop((left, right));
    }
}

/// Checks that `end` does not return while a batch of the pair is being processed.
fn must_wait(what: &str, end: impl Fn(&Pair, &Buffer, &Buffer, &RxeQp) + Sync) {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    let (gate, reached, leave) = Gate::new();
    let cq = pair.a.hca.create_cq(gate).unwrap();
    let (left, right) = (pair.a.qp_on(QpType::Rc, None, [Some(&cq), None], |_| {}).unwrap(), pair.b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| left.submit(1, write(theirs.remote(0)), &[mine.all()]));
        reached.recv().unwrap();
        let ender = scope.spawn(|| {
            end(&pair, &mine, &theirs, &left.qp);
            ended.store(true, Ordering::SeqCst);
        });
        // A waiting thread cannot be observed, so it gets enough chances to return too early.
        for _ in 0..200 {
            std::thread::yield_now();
            assert!(!ended.load(Ordering::SeqCst), "{what} did not wait");
        }
        leave.send(()).unwrap();
        ender.join().unwrap();
    });
    assert!(ended.load(Ordering::SeqCst));
}

#[test]
fn taking_memory_away_waits_for_its_users() {
    must_wait("destroying the local region", |_, mine, _, _| mine.mr.destroy());
    must_wait("destroying the remote region", |_, _, theirs, _| theirs.mr.destroy());
    must_wait("destroying the QP", |_, _, _, qp| qp.destroy());
    must_wait("resetting the QP", |_, _, _, qp| {
        let attrs = pvrdma_verbs_types::QpAttrs { state: QpState::Reset, ..Default::default() };
        qp.modify(&attrs, pvrdma_verbs_types::QpAttrMask::STATE).unwrap();
    });
    must_wait("unbinding the sender's GID", |pair, _, _, _| pair.a.hca.unbind_gid(0));
    must_wait("unbinding the receiver's GID", |pair, _, _, _| pair.b.hca.unbind_gid(0));
    must_wait("unmapping the sender's memory", |pair, _, _, _| pair.a.memory.unmap_all());
    must_wait("unmapping the receiver's memory", |pair, _, _, _| pair.b.memory.unmap_all());
}

#[test]
fn many_qps_share_the_workers() {
    const QPS: usize = 40;
    const COUNT: u64 = 50;
    let world = threaded(2);
    let (a, b) = (world.node(1), world.node(2));
    let (mine, theirs) = (a.buffer(100_000), b.buffer(100_000));
    let (srq, receives) = b.srq(0);
    let pairs: Vec<_> = (0..QPS)
        .map(|_| {
            let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, Some(&srq), |_| {}));
            left.connect(&right, |_| {});
            right.connect(&left, |a| a.min_rnr_timer = 0);
            (left, right)
        })
        .collect();
    std::thread::scope(|scope| {
        let (mine, theirs) = (&mine, &theirs);
        for chunk in pairs.chunks(QPS / 4) {
            scope.spawn(move || {
                for i in 0..COUNT {
                    for (left, _) in chunk {
                        left.submit(i, write(theirs.remote(0)), &[mine.all()]);
                        left.send(COUNT + i, &[mine.sge(0, 8)]);
                    }
                }
            });
        }
        scope.spawn(|| {
            for wr_id in 0..COUNT * QPS as u64 {
                receives.posted.lock().push_back(RecvWr { wr_id, sges: vec![theirs.sge(0, 8)], malformed: false });
                srq.notify_recv();
            }
        });
    });
    for (left, right) in &pairs {
        wait("the end of all messages", || left.scq.total() == 2 * COUNT);
        assert!(left.scq.poll().iter().all(|c| c.status == WcStatus::Success));
        assert_eq!(right.rcq.poll().len() as u64, COUNT);
    }
    assert!(receives.posted.lock().is_empty());
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

/// A port with three threads, which full batches of frames call: each of several queue pairs gets its messages complete
/// and in order.
#[test]
fn several_threads_of_a_port_keep_each_queue_pair_in_order() {
    const QPS: u64 = 6;
    const COUNT: u64 = 60;
    const LEN: u64 = 30_000;
    on_the_wire(Faults::default(), 2, || {
        let world = threaded(2);
        let (a, b) = (world.node(1), world.node(2));
        let pairs: Vec<_> = (0..QPS)
            .map(|index| {
                let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
                left.connect(&right, |_| {});
                right.connect(&left, |_| {});
                let (from, to) = (a.buffer(LEN + COUNT), b.buffer(LEN * COUNT));
                from.write(0, &pattern(index, LEN + COUNT));
                (left, right, from, to)
            })
            .collect();
        let helper_calls = || b.hca.inspect()["port"]["helper_calls"].as_u64().unwrap();
        assert_eq!(helper_calls(), 0);
        let (start, mut done) = (Instant::now(), 0);
        while helper_calls() == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "no second thread took part");
            done += COUNT;
            std::thread::scope(|scope| {
                for (left, right, from, to) in &pairs {
                    scope.spawn(move || {
                        for i in 0..COUNT {
                            right.recv(i, &[to.sge(i * LEN, LEN)]);
                        }
                        for i in 0..COUNT {
                            left.send(i, &[from.sge(i, LEN)]);
                        }
                    });
                }
            });
            let expected: Vec<_> = (0..COUNT).map(|i| (i, WcStatus::Success)).collect();
            for (left, right, from, to) in &pairs {
                wait("the end of all messages", || (left.scq.total(), right.rcq.total()) == (done, done));
                assert!(left.scq.poll_statuses() == expected && right.rcq.poll_statuses() == expected);
                for i in 0..COUNT {
                    assert!(to.read(i * LEN, LEN) == from.read(i, LEN), "message {i}");
                }
            }
        }
    });
}

/// Executes atomic additions from a QP and a thread for each of `nodes`.
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
        wait("the end of all atomics", || end.scq.total() == EACH);
        assert!(end.scq.poll().iter().all(|c| c.status == WcStatus::Success));
    }
    assert_eq!(sum.read(0, 8), u64::to_le_bytes(nodes.len() as u64 * EACH * 3));
}
