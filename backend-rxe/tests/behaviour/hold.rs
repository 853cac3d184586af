//! Peers on other hosts are held off while a device is paused.

use std::time::Duration;

use pvrdma_link::{Clock, fault::Faults};
use pvrdma_roce::wire::{Extension, Packet, Syndrome};
use pvrdma_rxe::HeldRequests::{self, All, Off, Sends};
use pvrdma_verbs::PauseHca;
use pvrdma_verbs_types::{
    QpType, SendOp,
    WcStatus::{self, RetryExceeded, RnrRetryExceeded, Success},
};

use crate::world::*;

const MS: Duration = Duration::from_millis(1);
/// Time from the beginning of a pause until requests are held off.
const GRACE: Duration = Duration::from_millis(50);

type Operation = fn(&Buffer) -> SendOp;

fn read(theirs: &Buffer) -> SendOp {
    SendOp::Read { remote: theirs.remote(0) }
}

fn add(theirs: &Buffer) -> SendOp {
    SendOp::FetchAdd { remote: theirs.remote(0), add: 1 }
}

/// Posts a request with one retry to a device that is paused for this time. Returns its status.
fn request_in_a_pause(held: HeldRequests, operation: Operation, rnr_retry: u8, pause: Duration) -> WcStatus {
    let mut status = None;
    on_the_wire(Faults::default(), 1, || {
        holding(held, || {
            let pair = Pair::with(World::new(), |a| (a.retry_cnt, a.rnr_retry) = (1, rnr_retry), |_| {});
            let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
            (0..2).for_each(|id| pair.right.recv(id, &[theirs.all()]));
            pair.left.send(0, &[mine.all()]);
            assert_eq!(pair.left.scq.poll_statuses(), [(0, Success)]);
            assert!(pair.b.hca.pause());
            let end = pair.world.clock.now() + pause;
            pair.left.submit(1, operation(&theirs), &[mine.all()]);
            while pair.world.next_deadline().is_some_and(|next| next < end) {
                pair.world.step();
            }
            pair.world.clock.advance(end.saturating_sub(pair.world.clock.now()));
            let held_off = pair.b.counter("wire_held");
            assert!(pair.b.hca.resume());
            pair.settle();
            let [(1, only)] = pair.left.scq.poll_statuses()[..] else { unreachable!("one completion") };
            assert_eq!(held_off > 0, pause > GRACE && only != RetryExceeded, "{held:?}");
            // A request is never executed twice, and one that failed was not executed.
            let received = pair.right.rcq.poll_statuses();
            let sends = matches!(operation(&theirs), SendOp::Send { .. });
            assert_eq!(received.len(), 1 + usize::from(sends && only == Success));
            status = Some(only);
        });
    });
    status.unwrap()
}

#[test]
fn a_peer_with_one_retry_survives_a_minute() {
    let minute = 60_000 * MS;
    let send: Operation = |_| SEND;
    let put: Operation = |theirs| write(theirs.remote(0));
    for (held, operation, status) in [
        (Off, send, RetryExceeded),
        (Sends, send, Success),
        (Sends, put, RetryExceeded),
        (Sends, read, RetryExceeded),
        (All, send, Success),
        (All, put, Success),
        (All, read, Success),
        (All, add, Success),
    ] {
        assert_eq!(request_in_a_pause(held, operation, 7, minute), status, "{held:?}");
    }
    // A number of RNR retries is a budget of its own.
    assert_eq!(request_in_a_pause(Sends, send, 6, minute), RnrRetryExceeded);
    assert_eq!(request_in_a_pause(Sends, send, 6, 200 * MS), Success);
}

/// After a pause as short as a hand-over, the peer must not wait for the end of an RNR wait.
#[test]
fn a_short_pause_holds_nothing_off() {
    assert_eq!(request_in_a_pause(All, |_| SEND, 7, GRACE), Success);
}

/// Attack: hosts flood a paused device. The NAKs are bounded, and only expected requests of the peer get one.
#[test]
fn the_naks_of_a_paused_device_are_bounded() {
    let frames = requests(3);
    let (world, node, cable, _station) = exposed(10_000);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let buffer = node.buffer(8);
    (0..3).for_each(|id| end.recv(id, &[buffer.all()]));
    give(&cable, &frames[0]);
    world.run();
    assert_eq!((end.rcq.poll().len(), taken(&cable).len()), (1, 1));

    assert!(node.hca.pause());
    let send = |frame: &[u8], count: usize| {
        (0..count).for_each(|_| give(&cable, frame));
        world.run();
        taken(&cable)
    };
    world.clock.advance(GRACE - MS);
    assert!(send(&frames[1], 1).is_empty());
    world.clock.advance(MS);
    // Executed already, too early, and damaged.
    let mut damaged = frames[1].clone();
    *damaged.last_mut().unwrap() ^= 1;
    for frame in [&frames[0], &frames[2], &damaged] {
        assert!(send(frame, 1).is_empty());
    }
    assert_eq!((node.counter("wire_held"), node.counter("wire_dropped_paused")), (0, 4));
    let naks = send(&frames[1], 3000);
    assert_eq!(naks.len(), 1000);
    for nak in &naks {
        let Extension::Aeth(aeth) = Packet::parse(nak).unwrap().header.extension else { panic!("no NAK") };
        assert_eq!(aeth.syndrome, Syndrome::RnrNak { timer: 24 });
    }
    assert_eq!((node.counter("wire_held"), node.counter("wire_dropped_paused")), (1000, 2004));
    // The budget is 10,000 in a second.
    world.clock.advance(10 * MS);
    assert_eq!(send(&frames[1], 3000).len(), 100);
    assert!(end.rcq.poll().is_empty());

    assert!(node.hca.resume());
    send(&frames[1], 1);
    assert_eq!(end.rcq.poll().len(), 1);
}
