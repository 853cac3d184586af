//! Faults on request: the statuses, states and events of the real cause, at both ends.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pvrdma_link::Clock;
use pvrdma_rxe::faults::{DeviceEffect, DeviceFaults, FaultRule};
use pvrdma_verbs::{AsyncEvent, Hca, QpEvent, QueuePair, SrqEvent};
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpType, RemoteAddress, SendFlags, SendOp, WcStatus};

use crate::world::*;

/// Requests that each test posts.
const REQUESTS: u64 = 4;
/// The request that the faults of these tests hit.
const HIT: u64 = 2;

/// Operation of the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Send,
    Write,
    WriteWithImmediate,
    Read,
    FetchAdd,
}

impl Kind {
    fn op(self, remote: RemoteAddress) -> SendOp {
        match self {
            Self::Send => SEND,
            Self::Write => write(remote),
            Self::WriteWithImmediate => SendOp::Write { remote, immediate: Some([7; 4]) },
            Self::Read => SendOp::Read { remote },
            Self::FetchAdd => SendOp::FetchAdd { remote, add: 1 },
        }
    }
}

fn set(world: &World, number: u8, rules: &[&str]) -> DeviceFaults {
    let faults = world.station(number).faults();
    let rules: Vec<FaultRule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    faults.set(&rules).unwrap();
    faults
}

/// All that the two guests see.
#[derive(PartialEq, Eq, Debug)]
struct Outcome {
    left: Vec<(u64, WcStatus)>,
    right: Vec<(u64, WcStatus)>,
    states: (QpState, QpState),
    events: (Vec<AsyncEvent>, Vec<AsyncEvent>),
    /// Number of faults.
    happened: u64,
}

/// Posts requests from left to right, with a fault at one of the devices.
fn run(number: u8, rule: &str, kind: Kind) -> (Pair, Outcome) {
    let (pair, outcome, _faults) = post(number, rule, kind, false);
    (pair, outcome)
}

/// As [`run`], with each request posted when the one before it has ended: on the wire, one response may answer several
/// requests. Returns the faults too, which last until they are dropped.
fn run_one_by_one(number: u8, rule: &str, kind: Kind) -> (Pair, Outcome, DeviceFaults) {
    post(number, rule, kind, true)
}

fn post(number: u8, rule: &str, kind: Kind, one_by_one: bool) -> (Pair, Outcome, DeviceFaults) {
    let world = World::new();
    let faults = set(&world, number, &[rule]);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(64), pair.b.buffer(64));
    for wr_id in 0..REQUESTS {
        pair.right.recv(100 + wr_id, &[theirs.sge(0, 8)]);
        pair.left.post(wr_id, kind.op(theirs.remote(0)), &[mine.sge(0, 8)]);
        if one_by_one {
            pair.left.qp.notify_send();
            pair.settle();
        }
    }
    pair.left.qp.notify_send();
    pair.settle();
    let outcome = Outcome {
        left: pair.left.scq.poll_statuses(),
        right: pair.right.rcq.poll_statuses(),
        states: (pair.left.state(), pair.right.state()),
        events: (pair.a.events.poll(), pair.b.events.poll()),
        happened: faults.status()[0].happened,
    };
    (pair, outcome, faults)
}

/// Returns the completions of a queue whose entry number [`HIT`] has this status: those before it succeeded, and those
/// behind it were flushed.
fn failed(first: u64, status: WcStatus) -> Vec<(u64, WcStatus)> {
    let of = |at: u64| match at.cmp(&HIT) {
        std::cmp::Ordering::Less => WcStatus::Success,
        std::cmp::Ordering::Equal => status,
        std::cmp::Ordering::Greater => WcStatus::Flushed,
    };
    (0..REQUESTS).map(|at| (first + at, of(at))).collect()
}

#[test]
fn errors_of_the_requester() {
    for (rule, kind, status) in [
        ("local-length/nth:3", Kind::Send, WcStatus::LocalLength),
        ("local-protection/nth:3", Kind::Send, WcStatus::LocalProtection),
        ("local-protection/nth:3", Kind::Write, WcStatus::LocalProtection),
        ("local-operation/nth:3", Kind::Write, WcStatus::LocalQpOperation),
        ("qp-error/nth:3", Kind::Send, WcStatus::Flushed),
    ] {
        let (pair, outcome) = run(1, rule, kind);
        assert_eq!(outcome.left, failed(0, status), "{rule}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Rts), "{rule}");
        assert_eq!(outcome.events, (vec![], vec![]), "{rule}");
        // Later requests are flushed.
        pair.left.send(9, &[]);
        assert_eq!(pair.left.scq.poll_statuses(), [(9, WcStatus::Flushed)], "{rule}");
    }
}

#[test]
fn errors_of_the_responder() {
    let (operation, invalid, access) =
        (WcStatus::RemoteOperation, WcStatus::RemoteInvalidRequest, WcStatus::RemoteAccess);
    // Rule, operation, status at the requester, status of the receive that reports it, event.
    for (rule, kind, left, right, event) in [
        ("receive-length/nth:3", Kind::Send, invalid, Some(WcStatus::LocalLength), None),
        ("receive-protection/nth:3", Kind::Send, operation, Some(WcStatus::LocalProtection), None),
        ("receive-malformed/nth:3", Kind::Send, operation, Some(WcStatus::LocalQpOperation), None),
        ("receive-queue/nth:3", Kind::Send, operation, None, Some(QpEvent::Fatal)),
        ("remote-access/nth:3", Kind::Write, access, None, Some(QpEvent::AccessError)),
        ("remote-access/nth:3", Kind::Read, access, None, Some(QpEvent::AccessError)),
        ("remote-access/nth:3", Kind::FetchAdd, access, None, Some(QpEvent::AccessError)),
        ("remote-access/nth:3", Kind::WriteWithImmediate, access, Some(WcStatus::LocalAccess), None),
        ("key-revoked/nth:3", Kind::Write, access, None, Some(QpEvent::AccessError)),
        ("invalid-request/nth:3", Kind::Write, invalid, None, Some(QpEvent::RequestError)),
        ("invalid-request/nth:3", Kind::Read, invalid, None, Some(QpEvent::RequestError)),
    ] {
        let (pair, outcome) = run(2, rule, kind);
        assert_eq!(outcome.left, failed(0, left), "{rule} {kind:?}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Error), "{rule} {kind:?}");
        if let Some(status) = right {
            assert_eq!(outcome.right, failed(100, status), "{rule} {kind:?}");
        }
        let events: Vec<_> = event.map(|event| AsyncEvent::Qp(event, pair.right.cookie)).into_iter().collect();
        assert_eq!(outcome.events, (vec![], events), "{rule} {kind:?}");
    }
}

#[test]
fn losses_are_retried_until_the_retries_are_used_up() {
    for kind in [Kind::Send, Kind::Write, Kind::Read] {
        let (_, outcome) = run(2, "loss/nth:3", kind);
        assert!(outcome.left.iter().all(|(_, status)| *status == WcStatus::Success), "{kind:?} {outcome:?}");
        assert_eq!(outcome.states, (QpState::Rts, QpState::Rts), "{kind:?}");
        assert_eq!(outcome.happened, 1, "{kind:?}");
        let (_, outcome) = run(2, "loss/nth:3/times:always", kind);
        assert_eq!(outcome.left, failed(0, WcStatus::RetryExceeded), "{kind:?}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Rts), "{kind:?}");
    }
}

#[test]
fn withheld_receives_make_the_peer_wait_and_then_fail() {
    for kind in [Kind::Send, Kind::WriteWithImmediate] {
        let (_, outcome) = run(2, "rnr/nth:3/times:2", kind);
        assert!(outcome.left.iter().all(|(_, status)| *status == WcStatus::Success), "{kind:?} {outcome:?}");
        assert_eq!((outcome.right.len() as u64, outcome.states), (REQUESTS, (QpState::Rts, QpState::Rts)), "{kind:?}");
    }
    let world = World::new();
    let _faults = set(&world, 2, &["rnr/times:always"]);
    let pair = Pair::with(world, |attrs| attrs.rnr_retry = 3, |_| {});
    pair.right.recv(100, &[]);
    pair.left.submit(1, SEND, &[]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded)]);
    // The receive was never taken.
    assert_eq!((pair.right.state(), pair.right.rcq.total()), (QpState::Rts, 0));
}

#[test]
fn a_full_completion_queue_ends_its_queue_pair() {
    for flags in [SendFlags::SIGNALED, SendFlags::empty()] {
        let world = World::new();
        let faults = set(&world, 2, &["cq-overrun/nth:3"]);
        let pair = Pair::with(world, |_| {}, |_| {});
        for wr_id in 0..REQUESTS {
            pair.right.recv(100 + wr_id, &[]);
            pair.left.post_with(wr_id, SEND, &[], flags);
        }
        pair.left.qp.notify_send();
        pair.settle();
        assert_eq!((pair.right.state(), pair.right.rcq.total()), (QpState::Error, HIT));
        assert_eq!(pair.b.counter("cq_overruns"), 1);
        let left = pair.left.scq.poll_statuses();
        assert_eq!(left.iter().find(|(wr_id, _)| *wr_id == HIT), Some(&(HIT, WcStatus::RemoteOperation)), "{left:?}");
        // The queue stays dead after the fault.
        drop(faults);
        pair.right.recv(200, &[]);
        assert_eq!(pair.right.rcq.total(), HIT);
    }
}

#[test]
fn a_shared_receive_queue_reports_that_it_is_broken() {
    let world = World::new();
    let _faults = set(&world, 2, &["receive-queue"]);
    let (a, b) = (world.node(1), world.node(2));
    let (srq, ring) = b.srq(0);
    let (left, right) = (a.qp(QpType::Rc), b.qp_with(QpType::Rc, Some(&srq), |_| {}));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    post_shared(&srq, &ring, 1..2);
    left.submit(1, SEND, &[]);
    world.settle();
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RemoteOperation)]);
    let events = b.events.poll();
    assert!(events.iter().any(|event| matches!(event, AsyncEvent::Srq(SrqEvent::Error, _))), "{events:?}");
    assert!(events.contains(&AsyncEvent::Qp(QpEvent::LastWqeReached, right.cookie)), "{events:?}");
}

#[test]
fn a_revoked_key_is_refused_to_other_connections_too() {
    let world = World::new();
    let _faults = set(&world, 2, &["key-revoked"]);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, revoked, other) = (pair.a.buffer(64), pair.b.buffer(64), pair.b.buffer(64));
    let attempt = |wr_id, remote| {
        let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        left.submit(wr_id, write(remote), &[mine.sge(0, 8)]);
        pair.settle();
        left.scq.poll_statuses()
    };
    assert_eq!(attempt(1, revoked.remote(0)), [(1, WcStatus::RemoteAccess)]);
    assert_eq!(attempt(2, other.remote(0)), [(2, WcStatus::Success)]);
    assert_eq!(attempt(3, revoked.remote(8)), [(3, WcStatus::RemoteAccess)]);
}

#[test]
fn a_rule_for_one_queue_pair_leaves_the_others_alone() {
    let world = World::new();
    let pair = Pair::with(world, |_| {}, |_| {});
    let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let _faults = set(&pair.world, 2, &[&format!("receive-length/qp:{}", right.qp.qpn().get())]);
    let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
    for (end, peer) in [(&pair.left, &pair.right), (&left, &right)] {
        peer.recv(100, &[theirs.sge(0, 8)]);
        end.submit(1, SEND, &[mine.sge(0, 8)]);
    }
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::RemoteInvalidRequest)]);
}

/// The peer has executed the requests whose responses are lost, and executes none of them twice.
#[test]
fn lost_responses_are_retried_and_execute_nothing_twice() {
    let good = |count: u64| (0..count).map(|at| (100 + at, WcStatus::Success)).collect::<Vec<_>>();
    for kind in [Kind::Send, Kind::WriteWithImmediate, Kind::Write, Kind::Read, Kind::FetchAdd] {
        let takes = matches!(kind, Kind::Send | Kind::WriteWithImmediate);
        let (_, outcome, _faults) = run_one_by_one(1, "response-loss/nth:3", kind);
        assert!(outcome.left.iter().all(|(_, status)| *status == WcStatus::Success), "{kind:?} {outcome:?}");
        assert_eq!(outcome.states, (QpState::Rts, QpState::Rts), "{kind:?}");
        assert_eq!((outcome.left.len() as u64, outcome.happened), (REQUESTS, 1), "{kind:?}");
        assert_eq!(outcome.right, good(if takes { REQUESTS } else { 0 }), "{kind:?}");
        let (_, outcome, _faults) = run_one_by_one(1, "response-loss/nth:3/times:always", kind);
        assert_eq!(outcome.left, failed(0, WcStatus::RetryExceeded), "{kind:?}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Rts), "{kind:?}");
        assert_eq!(outcome.right, good(if takes { HIT + 1 } else { 0 }), "{kind:?}");
    }
}

#[test]
fn an_atomic_whose_response_is_lost_is_executed_once() {
    let world = World::new();
    let faults = set(&world, 1, &["response-loss/nth:1/times:2"]);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
    theirs.write(0, &7_u64.to_le_bytes());
    pair.left.submit(1, SendOp::FetchAdd { remote: theirs.remote(0), add: 5 }, &[mine.sge(0, 8)]);
    pair.settle();
    assert_eq!((pair.left.scq.poll_statuses(), faults.status()[0].happened), (vec![(1, WcStatus::Success)], 2));
    assert_eq!((mine.read(0, 8), theirs.read(0, 8)), (7_u64.to_le_bytes().to_vec(), 12_u64.to_le_bytes().to_vec()));
}

#[test]
fn a_response_that_contradicts_the_protocol_ends_the_requester() {
    for kind in [Kind::Send, Kind::Write, Kind::Read, Kind::FetchAdd] {
        let (_, outcome, _faults) = run_one_by_one(1, "bad-response/nth:3", kind);
        assert_eq!(outcome.left, failed(0, WcStatus::BadResponse), "{kind:?}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Rts), "{kind:?}");
        assert_eq!(outcome.events, (vec![], vec![]), "{kind:?}");
        assert_eq!(outcome.right.len() as u64, if kind == Kind::Send { HIT + 1 } else { 0 }, "{kind:?}");
    }
}

/// Two devices, of which the first has this fault and has posted all requests.
fn sending(rule: &str) -> (Pair, DeviceFaults) {
    let world = World::new();
    let faults = set(&world, 1, &[rule]);
    let pair = Pair::with(world, |_| {}, |_| {});
    for wr_id in 0..REQUESTS {
        pair.right.recv(100 + wr_id, &[]);
        pair.left.post(wr_id, SEND, &[]);
    }
    pair.left.qp.notify_send();
    pair.world.run();
    (pair, faults)
}

#[test]
fn delayed_requests_begin_late_and_in_order() {
    let (pair, _faults) = sending("delay/nth:3/by:20ms");
    assert_eq!(pair.right.rcq.poll().len() as u64, HIT);
    let start = pair.world.clock.now();
    while pair.right.rcq.total() == HIT {
        assert!(pair.world.step());
    }
    assert_eq!(pair.world.clock.now() - start, Duration::from_millis(20));
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), all_good());
}

#[test]
fn a_delayed_request_can_be_flushed() {
    let (pair, _faults) = sending("delay/nth:2/by:20ms");
    let error = QpAttrs { state: QpState::Error, ..QpAttrs::default() };
    pair.left.qp.modify(&error, QpAttrMask::STATE).unwrap();
    pair.settle();
    let statuses = pair.left.scq.poll_statuses();
    assert_eq!(statuses[0], (0, WcStatus::Success));
    assert_eq!(statuses[1..], [1, 2, 3].map(|at| (at, WcStatus::Flushed)));
}

/// Returns the statuses of all requests, all successful.
fn all_good() -> Vec<(u64, WcStatus)> {
    (0..REQUESTS).map(|at| (at, WcStatus::Success)).collect()
}

#[test]
fn a_delay_ends_with_its_rules() {
    let (pair, faults) = sending("delay/nth:3/by:20s");
    faults.set(&[]).unwrap();
    pair.world.run();
    assert_eq!(pair.left.scq.poll_statuses(), all_good());
    // New rules count the request that waited.
    let (pair, faults) = sending("delay/nth:3/by:20s");
    faults.set(&["delay/nth:2/by:20ms".parse().unwrap()]).unwrap();
    pair.world.run();
    assert_eq!((pair.left.scq.poll_statuses(), faults.status()[0].seen), (all_good()[..3].to_vec(), 2));
    assert!(pair.settle() < Duration::from_secs(1));
    assert_eq!(pair.left.scq.poll_statuses(), all_good()[3..]);
    // The end of the handle is the end of the rules.
    let (pair, faults) = sending("delay/nth:3/by:20s");
    drop(faults);
    pair.world.run();
    assert_eq!(pair.left.scq.poll_statuses(), all_good());
}

/// A delay that was cut short is not taken for that of a later request.
#[test]
fn later_rules_count_from_their_first_request() {
    let (pair, faults) = sending("delay/nth:3/by:20s");
    faults.set(&[]).unwrap();
    pair.settle();
    faults.set(&["delay/by:20ms".parse().unwrap()]).unwrap();
    let start = pair.world.clock.now();
    pair.right.recv(9, &[]);
    pair.left.submit(9, SEND, &[]);
    while pair.left.scq.total() == REQUESTS {
        assert!(pair.world.step());
    }
    assert_eq!(pair.world.clock.now() - start, Duration::from_millis(20));
    assert_eq!(faults.status()[0].happened, 1);
}

/// The peer fails after its retries, and the device that is gone sees nothing.
#[test]
fn a_device_that_is_gone_answers_nothing_until_it_returns() {
    for kind in [Kind::Send, Kind::Read] {
        let (pair, outcome, faults) = run_one_by_one(2, "peer-gone/nth:3", kind);
        assert_eq!(outcome.left, failed(0, WcStatus::RetryExceeded), "{kind:?}");
        assert_eq!(outcome.states, (QpState::Error, QpState::Rts), "{kind:?}");
        assert_eq!(outcome.right.len() as u64, if kind == Kind::Send { HIT } else { 0 }, "{kind:?}");
        // Its own requests are lost as well, as those of all its connections.
        let attempt = |wr_id| {
            let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
            left.recv(wr_id, &[]);
            right.submit(wr_id, SEND, &[]);
            pair.settle();
            right.scq.poll_statuses()
        };
        assert_eq!(attempt(1), [(1, WcStatus::RetryExceeded)], "{kind:?}");
        faults.set(&[]).unwrap();
        assert_eq!(attempt(2), [(2, WcStatus::Success)], "{kind:?}");
    }
}

#[test]
fn a_link_that_flaps_costs_retries() {
    let world = World::new();
    let faults = set(&world, 1, &["link-down/nth:3/for:5ms"]);
    let effects = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&effects);
    faults.apply_by(move |effect| told.lock().unwrap().push(effect));
    let pair = Pair::with(world, |attrs| attrs.retry_cnt = 7, |_| {});
    for wr_id in 0..REQUESTS {
        pair.right.recv(100 + wr_id, &[]);
        pair.left.post(wr_id, SEND, &[]);
    }
    pair.left.qp.notify_send();
    let time = pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), all_good());
    assert!(time >= Duration::from_millis(5), "{time:?}");
    assert_eq!(*effects.lock().unwrap(), [false, true].map(|up| DeviceEffect::Link { up }));
}

#[test]
fn a_removed_gid_loses_its_connections_and_can_return() {
    let (pair, outcome, faults) = run_one_by_one(1, "gid-removed/nth:3", Kind::Send);
    assert_eq!(outcome.left, failed(0, WcStatus::RetryExceeded));
    assert_eq!(outcome.states, (QpState::Error, QpState::Rts));
    let shown = pair.a.hca.inspect().to_string();
    assert!(shown.contains("removed"), "{shown}");
    let attempt = |wr_id| {
        let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
        left.connect(&right, |_| {});
        right.connect(&left, |_| {});
        right.recv(wr_id, &[]);
        left.submit(wr_id, SEND, &[]);
        pair.settle();
        left.scq.poll_statuses()
    };
    assert_eq!(attempt(1), [(1, WcStatus::RetryExceeded)]);
    faults.set(&[]).unwrap();
    pair.settle();
    assert_eq!(attempt(2), [(2, WcStatus::Success)]);
}

#[test]
fn a_rule_for_the_nth_connection_hits_that_one() {
    let world = World::new();
    let _faults = set(&world, 2, &["receive-length/connection:3/times:always"]);
    let pair = Pair::with(world, |_| {}, |_| {});
    let (mine, theirs) = (pair.a.buffer(8), pair.b.buffer(8));
    // The pair itself has the first connection.
    let statuses: Vec<_> = (2..=4)
        .map(|wr_id| {
            let (left, right) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
            left.connect(&right, |_| {});
            right.connect(&left, |_| {});
            right.recv(wr_id, &[theirs.sge(0, 8)]);
            left.submit(wr_id, SEND, &[mine.sge(0, 8)]);
            pair.settle();
            left.scq.poll_statuses()[0].1
        })
        .collect();
    assert_eq!(statuses, [WcStatus::Success, WcStatus::RemoteInvalidRequest, WcStatus::Success]);
}

#[test]
fn the_same_seed_gives_the_same_outcome() {
    for (number, fault) in [
        (2, "remote-access/one-in:3"),
        (1, "response-loss/one-in:3/times:always"),
        (1, "bad-response/one-in:3"),
        (1, "delay/one-in:2/jitter:50ms"),
        (2, "peer-gone/one-in:3"),
        (1, "link-down/one-in:3"),
        (1, "gid-removed/one-in:3"),
    ] {
        let sequence = |seed: u64| {
            let (pair, outcome, _faults) = run_one_by_one(number, &format!("{fault}/seed:{seed}"), Kind::Write);
            (outcome, pair.world.clock.now())
        };
        let first: Vec<_> = (0..16).map(sequence).collect();
        let second: Vec<_> = (0..16).map(sequence).collect();
        assert_eq!(first, second, "{fault}");
        assert!(first.iter().any(|outcome| *outcome != first[0]), "{fault}");
    }
}

/// Makes tests of this module run over a cable and on slow memory as well.
macro_rules! on_all_paths {
    ($($case:ident)*) => {
        over_a_cable! { $($case)* }
        on_slow_memory! { $($case)* }
    };
}

on_all_paths! {
    errors_of_the_requester
    errors_of_the_responder
    losses_are_retried_until_the_retries_are_used_up
    withheld_receives_make_the_peer_wait_and_then_fail
    a_full_completion_queue_ends_its_queue_pair
    a_shared_receive_queue_reports_that_it_is_broken
    a_revoked_key_is_refused_to_other_connections_too
    a_rule_for_one_queue_pair_leaves_the_others_alone
    lost_responses_are_retried_and_execute_nothing_twice
    an_atomic_whose_response_is_lost_is_executed_once
    a_response_that_contradicts_the_protocol_ends_the_requester
    delayed_requests_begin_late_and_in_order
    a_delay_ends_with_its_rules
    later_rules_count_from_their_first_request
    a_delayed_request_can_be_flushed
    a_device_that_is_gone_answers_nothing_until_it_returns
    a_link_that_flaps_costs_retries
    a_removed_gid_loses_its_connections_and_can_return
    a_rule_for_the_nth_connection_hits_that_one
    the_same_seed_gives_the_same_outcome
}
