//! A connected QP without errors: counters, doorbells, budgets.

use pvrdma_guest_memory::MemoryBudget;
use pvrdma_verbs::{AsyncEvent, QpEvent, QueuePair};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpType, SendOp, WcStatus};

use crate::world::*;

#[test]
fn operations_are_counted() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    pair.right.recv(1, &[theirs.all()]);
    pair.right.recv(2, &[]);
    pair.left.send(1, &[mine.sge(0, 8)]);
    pair.left.submit(2, SendOp::Write { remote: theirs.remote(8), immediate: Some([0; 4]) }, &[mine.sge(0, 16)]);
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    let counts = ["rc_sends", "rc_send_bytes", "rc_write_bytes"];
    assert_eq!(counts.map(|name| pair.a.counter(name)), [1, 8, 16]);
}

#[test]
fn the_old_value_of_an_atomic_is_scattered() {
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    theirs.write(8, &pattern(1, 8));
    let op = SendOp::FetchAdd { remote: theirs.remote(8), add: 1 };
    pair.left.submit(1, op, &[mine.sge(0, 3), mine.sge(10, 5)]);
    let wc = pair.left.scq.one();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 8));
    assert_eq!([mine.read(0, 3), mine.read(10, 5)].concat(), pattern(1, 8));
    assert_eq!((mine.read(3, 7), mine.read(15, 49)), (vec![0; 7], vec![0; 49]));
}

#[test]
fn a_qp_that_is_its_own_peer() {
    let world = World::new();
    let a = world.node(1);
    let own = a.qp(QpType::Rc);
    own.connect(&own, |_| {});
    let buffer = a.buffer(4096);
    // Overlapping copies behave like memmove.
    buffer.write(0, &pattern(3, 2000));
    own.submit(3, write(buffer.remote(16)), &[buffer.sge(0, 2000)]);
    assert_eq!(buffer.read(16, 2000), pattern(3, 2000));
    // An error ends both halves.
    own.recv(5, &[]);
    own.submit(4, write(Default::default()), &[buffer.sge(0, 1)]);
    world.settle();
    assert_eq!(own.scq.poll().last().unwrap().status, WcStatus::RemoteAccess);
    assert_eq!(own.rcq.poll_statuses(), [(5, WcStatus::Flushed)]);
    assert_eq!(own.state(), QpState::Error);
}

#[test]
fn two_adapters_on_one_guest_memory() {
    let world = World::new();
    let a = world.node(1);
    let b = world.node_beside(&a, 2);
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let (mine, theirs) = (a.buffer(100), b.buffer(100));
    mine.write(0, b"shared");
    left.submit(1, write(theirs.remote(0)), &[mine.sge(0, 6)]);
    right.submit(1, write(mine.remote(50)), &[theirs.sge(0, 6)]);
    assert_eq!(mine.read(50, 6), b"shared");
}

#[test]
fn doorbells_are_hints() {
    let pair = Pair::new();
    // A request that is posted while another one runs needs no further doorbell, and a doorbell may find no work.
    pair.left.qp.notify_send();
    pair.left.post(1, write(Default::default()), &[]);
    pair.left.post(2, write(Default::default()), &[]);
    pair.left.qp.notify_send();
    pair.left.qp.notify_send();
    assert_eq!(pair.left.scq.poll().len(), 2);
}

#[test]
fn the_budget_of_a_doorbell_ends_and_the_rest_is_left_to_workers() {
    let world = World::with(|config| (config.inline_bytes, config.inline_requests) = (10_000, 8));
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(30_000), pair.b.buffer(30_000));
    for i in 0..20 {
        pair.left.post(i, write(Default::default()), &[]);
    }
    pair.left.qp.notify_send();
    assert_eq!(pair.left.scq.poll().len(), 8);
    pair.settle();
    assert_eq!(pair.left.scq.poll().len(), 12);
    mine.write(0, &pattern(5, 30_000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert!(pair.left.scq.poll().is_empty());
    assert_eq!(theirs.read(0, 30_000)[..10_000], pattern(5, 30_000)[..10_000]);
    assert_eq!(theirs.read(10_000, 20_000), vec![0; 20_000]);
    pair.settle();
    assert_eq!(pair.left.scq.one().status, WcStatus::Success);
    assert_eq!(theirs.read(0, 30_000), pattern(5, 30_000));
}

/// The log of written pages names only those that a run has reached, although the run checks the whole range.
#[test]
fn a_run_marks_only_the_pages_that_it_writes() {
    const PAGE: u64 = 4096;
    const BYTES: u64 = 16 * PAGE;
    let world = World::with(|config| config.inline_bytes = 2 * PAGE);
    let pair = Pair::with(world, |_| {}, |_| {});
    // Ascending pages are one extent. A message in one that fits into a run is looked up once.
    let [(mine, _), (theirs, start)] = [&pair.a, &pair.b].map(|node| {
        let mut pages = node.pages(BYTES / PAGE);
        pages.sort_unstable();
        (node.register(&node.pd, &pages, 0, BYTES, ALL), pages[0])
    });
    let memory = &pair.b.memory;
    memory.start_dirty_log(&[(start, BYTES)], &MemoryBudget::new(1 << 20)).unwrap();
    let written = || memory.report_dirty(start, BYTES, PAGE).unwrap();
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert_eq!(written(), [0b11]);
    pair.settle();
    assert_eq!(written(), [0xfffc]);
    pair.left.submit(2, write(theirs.remote(PAGE)), &[mine.sge(0, 100)]);
    assert_eq!(written(), [0b10]);
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn sqd_finishes_started_requests_and_raises_the_event() {
    let world = World::with(|config| config.inline_bytes = 100);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    let drain = |end: &End| {
        end.change(
            QpState::Sqd,
            QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() },
            QpAttrMask::EN_SQD_ASYNC_NOTIFY,
        )
    };
    let drained = [AsyncEvent::Qp(QpEvent::SendQueueDrained, pair.left.cookie)];
    pair.left.post(1, write(theirs.remote(0)), &[mine.all()]);
    pair.left.submit(2, write(Default::default()), &[]);
    assert!(pair.left.scq.poll().is_empty());
    // The modify call acts as a doorbell and runs the next hundred bytes only.
    drain(&pair.left);
    assert!(pair.left.qp.query().sq_draining);
    assert!(pair.a.events.poll().is_empty());
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(pair.a.events.poll(), drained);
    assert!(!pair.left.qp.query().sq_draining);
    pair.left.qp.notify_send();
    assert!(pair.left.scq.poll().is_empty());
    // It still takes requests of the peer.
    pair.right.submit(3, write(mine.remote(0)), &[theirs.sge(0, 10)]);
    assert_eq!(pair.right.scq.one().status, WcStatus::Success);
    pair.left.to(QpState::Rts);
    assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
    drain(&pair.left);
    assert_eq!(pair.a.events.poll(), drained);
}

over_a_cable! {
    operations_are_counted
    the_old_value_of_an_atomic_is_scattered
    two_adapters_on_one_guest_memory
}

on_slow_memory! {
    operations_are_counted
    the_old_value_of_an_atomic_is_scattered
    two_adapters_on_one_guest_memory
}
