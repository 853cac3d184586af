//! Reset, destruction and what becomes of messages under way.

use std::sync::atomic::Ordering;

use pvrdma_verbs::{
    GidType, Hca, MemoryRegion, QpAttrMask, QpAttrs, QpState, QpType, QueuePair, SendOp, VerbsError, WcStatus,
};

use crate::testing::*;

/// A pair that moves a hundred bytes in a run.
fn slow() -> Pair {
    let world = World::with(|config| {
        (config.inline_bytes, config.worker_bytes) = (100, 100);
    });
    Pair::with(world, |_| {}, |_| {})
}

#[test]
pub(super) fn reset_is_silent_and_starts_over() {
    let pair = Pair::new();
    pair.left.recv(1, &[]);
    pair.left.send(1, &[]);
    pair.left.post(2, SEND, &[]);
    pair.left.to(QpState::Reset);
    pair.settle();
    assert!(pair.left.scq.poll().is_empty() && pair.left.rcq.poll().is_empty());
    assert_eq!(pair.left.sends.resets.load(Ordering::SeqCst), 1);
    assert_eq!(pair.left.receives.resets.load(Ordering::SeqCst), 1);
    assert_eq!(pair.left.qp.query().dest_qpn, pvrdma_verbs::Qpn::default());
    pair.left.connect(&pair.right, |_| {});
    pair.right.recv(2, &[]);
    pair.left.send(3, &[]);
    assert_eq!(pair.left.scq.statuses(), [(3, WcStatus::Success)]);
    // RESET is always allowed, even where it changes nothing.
    pair.left.to(QpState::Error);
    pair.left.to(QpState::Reset);
    pair.left.to(QpState::Reset);
    assert!(pair.left.qp.modify(&QpAttrs { state: QpState::Rts, ..QpAttrs::default() }, QpAttrMask::STATE).is_err());
    // From RESET to ERROR: allowed, and what is posted then is flushed.
    pair.left.to(QpState::Error);
    pair.left.send(4, &[]);
    assert_eq!(pair.left.scq.statuses(), [(4, WcStatus::Flushed)]);
}

#[test]
pub(super) fn refused_changes_change_nothing() {
    let pair = Pair::new();
    let before = pair.left.qp.query();
    let modify = |attrs: QpAttrs, mask| pair.left.qp.modify(&attrs, mask);
    let rnr = QpAttrMask::MIN_RNR_TIMER;
    assert!(matches!(modify(QpAttrs { min_rnr_timer: 32, ..before }, rnr), Err(VerbsError::Invalid(_))));
    assert!(matches!(modify(before, QpAttrMask::TIMEOUT), Err(VerbsError::Transition(_))));
    let wrong = QpAttrs { cur_state: QpState::Sqd, ..before };
    assert!(matches!(modify(wrong, QpAttrMask::CUR_STATE), Err(VerbsError::Invalid(_))));
    assert_eq!(pair.left.qp.query(), before);
    modify(QpAttrs { min_rnr_timer: 31, ..before }, rnr).unwrap();
    assert_eq!(pair.left.qp.query().min_rnr_timer, 31);
}

#[test]
pub(super) fn a_responder_that_is_reset_in_the_middle_gets_the_message_again() {
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
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::Success)]);
    assert_eq!(pair.right.rcq.statuses(), [(2, WcStatus::Success)]);
    assert_eq!(theirs.read(0, 1000), pattern(1, 1000));
    assert_eq!(pair.a.counter("retries"), 1);
}

#[test]
pub(super) fn a_destroyed_qp_publishes_nothing() {
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    pair.left.qp.destroy();
    pair.left.qp.destroy();
    pair.left.send(2, &[]);
    pair.left.recv(3, &[]);
    pair.settle();
    assert!(pair.left.scq.poll().is_empty() && pair.left.rcq.poll().is_empty());
    assert_eq!(pair.left.sends.posted.lock().len(), 1);
    assert!(matches!(pair.left.qp.modify(&QpAttrs::default(), QpAttrMask::STATE), Err(VerbsError::Gone)));
    // Its peer finds nobody.
    pair.right.send(4, &[]);
    pair.settle();
    assert_eq!(pair.right.scq.statuses(), [(4, WcStatus::RetryExceeded)]);
}

#[test]
pub(super) fn a_region_that_is_destroyed_in_the_middle() {
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    theirs.mr.destroy();
    theirs.mr.destroy();
    pair.settle();
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::RemoteAccess)]);
    let pair = slow();
    let (mine, theirs) = (pair.a.buffer(1000), pair.b.buffer(1000));
    pair.left.submit(1, SendOp::Read { remote: theirs.remote(0) }, &[mine.all()]);
    mine.mr.destroy();
    pair.settle();
    assert_eq!(pair.left.scq.statuses(), [(1, WcStatus::LocalProtection)]);
    assert_eq!(pair.right.state(), QpState::Rts);
}

#[test]
pub(super) fn a_device_that_goes_leaves_errors_and_its_addresses() {
    let Pair { world, a, b, left, right } = slow();
    let (mine, theirs) = (a.buffer(1000), b.buffer(1000));
    left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert!(matches!(a.hca.bind_gid(1, gid(2), GidType::RoceV2), Err(VerbsError::InUse(_))));
    drop((right, theirs, b));
    world.settle();
    assert_eq!(left.scq.statuses(), [(1, WcStatus::RetryExceeded)]);
    a.hca.bind_gid(1, gid(2), GidType::RoceV2).unwrap();
}

#[test]
pub(super) fn gids_belong_to_one_device_and_may_be_bound_twice_there() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    a.hca.bind_gid(5, gid(1), GidType::RoceV1).unwrap();
    a.hca.bind_gid(5, gid(1), GidType::RoceV1).unwrap();
    a.hca.unbind_gid(0);
    assert!(b.hca.bind_gid(0, gid(1), GidType::RoceV2).is_err());
    a.hca.bind_gid(5, gid(7), GidType::RoceV2).unwrap();
    b.hca.bind_gid(3, gid(1), GidType::RoceV2).unwrap();
    assert!(a.hca.bind_gid(0, pvrdma_verbs::Gid::default(), GidType::RoceV2).is_err());
}

#[test]
pub(super) fn numbers_are_unique_while_they_are_used() {
    let world = World::new();
    let a = world.node(1);
    let first = a.qp(QpType::Rc);
    let again = |qpn| {
        let ((send_cq, _), (recv_cq, _)) = (a.cq(), a.cq());
        a.empty_qp(QpType::Rc, pvrdma_verbs::Qpn::new(qpn), (&send_cq, &recv_cq))
    };
    assert!(matches!(again(first.qp.qpn().get()), Err(VerbsError::InUse(_))));
    assert!(matches!(again(1), Err(VerbsError::Invalid(_))));
    first.qp.destroy();
    assert!(again(first.qp.qpn().get()).is_ok());
}

#[test]
pub(super) fn nothing_is_left_behind() {
    let world = World::new();
    let (rxe, weak) = {
        let a = world.node(1);
        let left = a.qp(QpType::Rc);
        left.connect(&left, |_| {});
        left.send(1, &[]);
        let weak = std::sync::Arc::downgrade(&left.qp.endpoint);
        let adapter = std::sync::Arc::downgrade(a.hca.adapter());
        (adapter, weak)
    };
    world.settle();
    assert_eq!((rxe.strong_count(), weak.strong_count()), (0, 0));
}

#[test]
pub(super) fn registered_memory_is_pinned_until_it_is_deregistered() {
    use pvrdma_guest_memory::{Backing, DmaRange, DmaSpace, PageListBuilder, PinPolicy};
    use pvrdma_verbs::{FastRegister, Invalidate, MrRequest};
    let world = World::new();
    let memory = DmaSpace::new(PinPolicy::Registered);
    let mapping = std::sync::Arc::new(vm_memory::mmap::MmapRegion::new(1 << 20).unwrap());
    let backing = Some(Backing { mapping, offset: 0 });
    memory.map(DmaRange { iova: 0x10_0000, len: 1 << 20, writable: true, backing }).unwrap();
    let a = world.node_on(1, std::sync::Arc::clone(&memory));
    let first = a.register(&[0x10_0000, 0x10_1000], 0, 8192, ALL);
    let second = a.register(&[0x10_1000, 0x10_2000], 5, 4096, ALL);
    assert_eq!(memory.pinned_bytes(), 3 * 4096);
    first.mr.destroy();
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    drop(second);
    assert_eq!(memory.pinned_bytes(), 0);

    // A work request's registration, until it is invalidated or its region goes.
    let b = world.node(2);
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let mr = a.hca.register_mr(&a.pd, MrRequest::FastRegister { max_pages: 4 }).unwrap();
    let mut list = PageListBuilder::default();
    for page in [0x10_3000, 0x10_5000] {
        list.push(page).unwrap();
    }
    let key = mr.lkey();
    let request = FastRegister { key, iova: 0, length: 8192, access: ALL, pages: Some(list.finish()) };
    left.submit(1, SendOp::FastRegister(Box::new(request.clone())), &[]);
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    left.submit(2, SendOp::LocalInvalidate(Invalidate { key }), &[]);
    assert_eq!(memory.pinned_bytes(), 0);
    left.submit(3, SendOp::FastRegister(Box::new(request)), &[]);
    assert_eq!(left.scq.statuses(), [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!(memory.pinned_bytes(), 2 * 4096);
    mr.destroy();
    assert_eq!(memory.pinned_bytes(), 0);
}
