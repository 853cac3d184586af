//! The history that a failed queue pair reports.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_link::fault::Faults;
use pvrdma_rxe::QpFailure;
use pvrdma_verbs::QueuePair;
use pvrdma_verbs_types::{QpState, SendOp, WcStatus};

use crate::world::*;

/// Records the failures that are reported for a device.
fn watch(world: &World, number: u8) -> (Arc<Mutex<Vec<QpFailure>>>, pvrdma_rxe::ObservedFailures) {
    let told = Arc::<Mutex<Vec<QpFailure>>>::default();
    let list = Arc::clone(&told);
    let observed = world.station(number).observe_failures(move |failure| list.lock().push(failure.clone()));
    (told, observed)
}

#[test]
fn a_peer_that_does_not_answer() {
    on_the_wire(Faults { loss: 10_000, ..Faults::default() }, 1, || {
        let pair = Pair::with(World::new(), |left| (left.timeout, left.retry_cnt) = (10, 3), |_| {});
        let (told, observed) = watch(&pair.world, 1);
        pair.left.send(1, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
        // Later requests are flushed, too, but only the first failure is reported.
        pair.left.send(2, &[]);
        pair.settle();
        let told = told.lock();
        assert_eq!((told.len(), told[0].qpn, told[0].peer), (1, pair.left.qp.qpn(), gid(2)));
        let history = &told[0].history;
        assert!(history.starts_with("its requester; "), "{history}");
        assert!(history.contains("timeout") && history.contains("request ended: RetryExceeded"), "{history}");
        drop(observed);
    });
}

fn refused_requests_are_reported_at_both_ends() {
    let pair = Pair::new();
    let (former, replaced) = watch(&pair.world, 1);
    let (told, _observed) = watch(&pair.world, 1);
    // The end of an observer that was replaced changes nothing.
    drop(replaced);
    let (mine, theirs) = (pair.a.buffer(100), pair.b.buffer(100));
    let mut remote = theirs.remote(0);
    remote.rkey ^= 1 << 20;
    pair.left.post(1, SendOp::Read { remote }, &[mine.all()]);
    pair.left.qp.notify_send();
    pair.settle();
    let told = told.lock();
    assert_eq!(told.iter().filter(|failure| failure.qpn == pair.left.qp.qpn()).count(), 1, "{told:?}");
    assert!(told[0].history.contains("request ended: RemoteAccess"), "{told:?}");
    assert!(former.lock().is_empty());
}

#[test]
fn refused_requests() {
    refused_requests_are_reported_at_both_ends();
}

#[test]
fn refused_requests_on_the_wire() {
    on_the_wire(Faults::default(), 1, refused_requests_are_reported_at_both_ends);
}

/// A queue pair that its guest ends reports no failure, whatever happened to it before.
#[test]
fn a_guest_that_ends_its_queue_pair_is_no_failure() {
    on_the_wire(Faults { loss: 2000, ..Faults::default() }, 3, || {
        let pair = Pair::new();
        let (told, _observed) = watch(&pair.world, 1);
        let (mine, theirs) = (pair.a.buffer(100_000), pair.b.buffer(100_000));
        pair.left.post(1, SendOp::Write { remote: theirs.remote(0), immediate: None }, &[mine.all()]);
        pair.left.qp.notify_send();
        pair.settle();
        assert!(pair.a.counter("wire_resent") > 0);
        pair.left.to(QpState::Error);
        pair.left.send(2, &[]);
        pair.settle();
        assert_eq!(*told.lock(), []);
    });
}
