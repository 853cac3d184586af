//! RESET and destruction of queue pairs, with messages in flight.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PinPolicy};
use pvrdma_verbs::{Hca, MemoryRegion, MrRequest, QueuePair, VerbsError};
use pvrdma_verbs_types::{FastRegister, Gid, GidType, Invalidate, QpState, QpType, Qpn, SendOp, WcStatus};

use crate::claims::has;
use crate::world::*;

/// Time for which an address stays reserved after its owner has gone.
const HOLD: Duration = Duration::from_secs(60);

/// A pair that moves a hundred bytes per run.
fn slow() -> Pair {
    let world = World::with(|config| {
        (config.inline_bytes, config.worker_bytes) = (100, 100);
    });
    Pair::with(world, |_| {}, |_| {})
}

/// A responder after RESET is another one for the requester, even with the same numbers.
#[test]
fn a_responder_that_is_reset_in_the_middle_ends_the_connection() {
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    mine.write(0, &pattern(1, 1000));
    pair.right.recv(1, &[theirs.all()]);
    pair.left.send(1, &[mine.all()]);
    assert!(theirs.read(0, 100) == pattern(1, 1000)[..100]);
    pair.right.to(QpState::Reset);
    theirs.write(0, &[0; 1000]);
    pair.right.connect(&pair.left, |_| {});
    pair.right.recv(2, &[theirs.all()]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
    assert_eq!((pair.right.rcq.poll().len(), theirs.read(0, 1000)), (0, vec![0; 1000]));
    assert_eq!(pair.a.counter("retries"), 7);
    pair.left.to(QpState::Reset);
    pair.left.connect(&pair.right, |_| {});
    pair.left.send(3, &[mine.all()]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::Success)]);
    assert_eq!(pair.right.rcq.poll_statuses(), [(2, WcStatus::Success)]);
    assert_eq!(theirs.read(0, 1000), pattern(1, 1000));
}

#[test]
fn a_qp_that_is_destroyed_in_the_middle_publishes_nothing() {
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    pair.left.qp.destroy();
    pair.settle();
    assert!(pair.left.scq.poll().is_empty());
}

#[test]
fn a_region_that_is_destroyed_in_the_middle() {
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    theirs.mr.destroy();
    theirs.mr.destroy();
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RemoteAccess)]);
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
    mine.mr.destroy();
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::LocalProtection)]);
    assert_eq!(pair.right.state(), QpState::Rts);
}

#[test]
fn a_device_that_leaves_causes_errors_and_frees_its_addresses() {
    let Pair { world, a, b, left, right } = slow();
    let (mine, theirs) = (a.buffer(1000), b.buffer(1000));
    left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    a.hca.bind_gid(1, gid(2), GidType::RoceV2).unwrap();
    assert!(!has(&a, gid(2)));
    drop((right, theirs, b));
    world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
    world.clock.advance(HOLD);
    world.run();
    assert!(has(&a, gid(2)));
}

#[test]
fn gids_belong_to_one_device_and_may_be_bound_twice_there() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    a.hca.bind_gid(5, gid(1), GidType::RoceV1).unwrap();
    a.hca.bind_gid(5, gid(1), GidType::RoceV1).unwrap();
    a.hca.unbind_gid(0);
    b.hca.bind_gid(3, gid(1), GidType::RoceV2).unwrap();
    assert!(!has(&b, gid(1)));
    a.hca.bind_gid(5, gid(7), GidType::RoceV2).unwrap();
    world.run();
    assert!(!has(&b, gid(1)), "its owner may come back");
    world.clock.advance(HOLD);
    world.run();
    assert!(has(&b, gid(1)));
    assert!(a.hca.bind_gid(0, Gid::default(), GidType::RoceV2).is_err());
}

#[test]
fn numbers_are_unique_while_they_are_used() {
    let world = World::new();
    let a = world.node(1);
    let first = a.qp(QpType::Rc);
    let again = |qpn| a.qp_on(QpType::Rc, None, [None, None], |init| init.qpn = qpn);
    assert!(matches!(again(first.qp.qpn()), Err(VerbsError::InUse(_))));
    assert!(matches!(again(Qpn::GSI), Err(VerbsError::Invalid(_))));
    first.qp.destroy();
    assert!(again(first.qp.qpn()).is_ok());
}

#[test]
fn nothing_is_left_behind() {
    let world = World::new();
    let (completions, events) = {
        let a = world.node(1);
        let left = a.qp(QpType::Rc);
        left.connect(&left, |_| {});
        left.send(1, &[]);
        (Arc::downgrade(&left.scq), Arc::downgrade(&a.events))
    };
    world.settle();
    // A QP holds its completion queues, and an adapter the sink of its events. Both are released.
    assert_eq!((completions.strong_count(), events.strong_count()), (0, 0));
}

#[test]
fn registered_memory_is_pinned_until_it_is_deregistered() {
    let world = World::new();
    let memory = DmaSpace::new(PinPolicy::Registered);
    let mapping = Arc::new(vm_memory::mmap::MmapRegion::new(1 << 20).unwrap());
    let backing = Some(Backing { mapping, offset: 0 });
    memory.map(DmaRange { iova: 0x10_0000, len: 1 << 20, writable: true, backing }).unwrap();
    let a = world.node_on(1, Arc::clone(&memory));
    let first = a.register(&a.pd, &[0x10_0000, 0x10_1000], 0, 8192, ALL);
    let second = a.register(&a.pd, &[0x10_1000, 0x10_2000], 5, 4096, ALL);
    assert_eq!(memory.pinned_bytes(), 3 * 4096);
    first.mr.destroy();
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    drop(second);
    assert_eq!(memory.pinned_bytes(), 0);

    // Memory that a work request registered stays pinned until the key is invalidated or the region is deregistered.
    let b = world.node(2);
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let mr = a.hca.register_mr(&a.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let key = mr.lkey();
    let request =
        FastRegister { key, iova: 0, length: 8192, access: ALL, pages: Some(page_list(&[0x10_3000, 0x10_5000])) };
    left.submit(1, SendOp::FastRegister(Box::new(request.clone())), &[]);
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    left.submit(2, SendOp::LocalInvalidate(Invalidate { key }), &[]);
    assert_eq!(memory.pinned_bytes(), 0);
    left.submit(3, SendOp::FastRegister(Box::new(request)), &[]);
    assert_eq!(left.scq.poll_statuses(), [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    mr.destroy();
    assert_eq!(memory.pinned_bytes(), 0);
}

over_a_cable! {
    numbers_are_unique_while_they_are_used
    nothing_is_left_behind
    registered_memory_is_pinned_until_it_is_deregistered
}

on_slow_memory! {
    nothing_is_left_behind
}
