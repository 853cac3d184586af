//! Behaviour over a cable that differs from local delivery.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_ether_link::unix;
use pvrdma_link::{Link, fault::Faults};
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig};
use pvrdma_verbs::{AsyncEvent, Hca, QpEvent, QueuePair};
use pvrdma_verbs_types::{
    Mtu, NetworkType, QpAttrMask, QpAttrs, QpState, QpType, Qpn, SendData, SendOp, UdDestination, WcFlags, WcStatus,
};

use crate::world::*;

const GOOD: Faults = Faults { loss: 0, duplicate: 0, reorder: 0, corrupt: 0, delay: 0 };
const QKEY: u32 = 0x1234;

#[test]
fn sqd_finishes_what_was_started() {
    on_the_wire(GOOD, 1, || {
        let pair = Pair::new();
        let (mine, theirs) = (pair.a.buffer(1 << 20), pair.b.buffer(1 << 20));
        pair.left.post(1, write(theirs.remote(0)), &[mine.all()]);
        pair.left.qp.notify_send();
        let notify = QpAttrMask::EN_SQD_ASYNC_NOTIFY;
        pair.left.change(QpState::Sqd, QpAttrs { en_sqd_async_notify: true, ..QpAttrs::default() }, notify);
        assert!(pair.left.qp.query().sq_draining);
        pair.left.submit(2, write(theirs.remote(0)), &[mine.sge(0, 8)]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
        assert_eq!(pair.a.events.poll(), [AsyncEvent::Qp(QpEvent::SendQueueDrained, pair.left.cookie)]);
        assert!(!pair.left.qp.query().sq_draining);
        pair.left.to(QpState::Rts);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
    });
}

#[test]
fn waits_end_with_their_status() {
    on_the_wire(GOOD, 1, || {
        // The peer's QP is destroyed, so there is no answer.
        let mut pair = Pair::with(World::new(), |a| a.retry_cnt = 2, |_| {});
        pair.right.qp.destroy();
        pair.left.post(1, SEND, &[]);
        pair.left.submit(2, SEND, &[]);
        assert!(pair.settle() > Duration::ZERO);
        let statuses = [(1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)];
        assert_eq!(pair.left.scq.poll_statuses(), statuses);
        assert!(pair.b.counter("wire_dropped_no_qp") >= 3);
        // The peer's QP is in a state in which it does not receive.
        pair = Pair::with(World::new(), |a| a.retry_cnt = 2, |_| {});
        pair.right.to(QpState::Reset);
        pair.left.submit(1, SEND, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
        let [unready, refused] = ["state", "refused"].map(|why| pair.b.counter(&format!("wire_dropped_{why}")));
        assert!(unready >= 3 && refused == 0, "{unready} {refused}");
        // The peer posts no receive.
        pair = Pair::with(World::new(), |a| a.rnr_retry = 1, |_| {});
        pair.left.submit(1, SEND, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::RnrRetryExceeded)]);
        assert_eq!(pair.a.counter("wire_rnr_naks"), 2);
        // The local address is unbound, so requests are lost.
        pair = Pair::with(World::new(), |a| a.retry_cnt = 1, |_| {});
        pair.left.submit(1, write(Default::default()), &[]);
        pair.a.hca.unbind_gid(0);
        let sent = pair.a.counter("wire_frames_sent");
        pair.left.submit(2, write(Default::default()), &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::RetryExceeded)]);
        assert_eq!(pair.a.counter("wire_frames_sent"), sent);
    });
}

/// A consumer that posts its receive slightly late causes neither an RNR NAK nor the loss of later packets.
#[test]
fn a_request_waits_a_little_for_its_receive() {
    on_the_wire(GOOD, 1, || {
        // After an RNR NAK the peer would retry after 0.16 ms, so the responder keeps the request for that long.
        let pair = Pair::with(World::new(), |_| {}, |b| b.min_rnr_timer = 8);
        let later = |us| pair.world.clock.advance(Duration::from_micros(us));
        let settled = || pair.world.run();
        for wr_id in 1..=3 {
            pair.left.submit(wr_id, SEND, &[]);
        }
        later(150);
        settled();
        pair.right.recv(7, &[]);
        pair.right.recv(8, &[]);
        settled();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_eq!((pair.a.counter("wire_rnr_naks"), pair.a.counter("wire_resent")), (0, 0));
        // The third request has its own wait. When it expires, the peer gets an RNR NAK, and retries by itself.
        later(159);
        settled();
        assert_eq!(pair.a.counter("wire_rnr_naks"), 0);
        later(2);
        settled();
        assert_eq!(pair.a.counter("wire_rnr_naks"), 1);
        pair.right.recv(9, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::Success)]);
        assert_eq!(pair.right.rcq.poll().len(), 3);
    });
}

/// Sends mixed requests in both directions at once, and compares every byte.
fn mixed(faults: Faults, seed: u64) {
    on_the_wire(faults, seed, || {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let pair = Pair::with(World::new(), |a| a.timeout = 10, |a| a.timeout = 10);
        let slot = 20_000;
        let count = 12;
        let (mine, theirs) = (pair.a.buffer_at(5, slot * count, ALL), pair.b.buffer_at(9, slot * count, ALL));
        let (mut left, mut right) = (pattern(seed, slot * count), pattern(seed + 1, slot * count));
        let word = pair.b.buffer(8);
        let old = pair.a.buffer(8);
        mine.write(0, &left);
        theirs.write(0, &right);
        let (mut receives, mut atomics) = (0, 0);
        for index in 0..count {
            let (at, len) = (index * slot, next(slot + 1));
            let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
            match next(4) {
                0 => {
                    pair.right.recv(index, &[theirs.sge(at, slot)]);
                    receives += 1;
                    pair.left.post(index, SEND, &[mine.sge(at, len)]);
                    right[range.clone()].copy_from_slice(&left[range]);
                }
                1 => {
                    pair.left.post(index, write(theirs.remote(at)), &[mine.sge(at, len)]);
                    right[range.clone()].copy_from_slice(&left[range]);
                }
                2 => {
                    pair.left.post(index, SendOp::Read { remote: theirs.remote(at) }, &[mine.sge(at, len)]);
                    left[range.clone()].copy_from_slice(&right[range]);
                }
                _ => {
                    atomics += 1;
                    let op = SendOp::FetchAdd { remote: word.remote(0), add: 1 };
                    pair.left.post(index, op, &[old.all()]);
                }
            }
        }
        pair.left.qp.notify_send();
        pair.settle();
        let expected: Vec<_> = (0..count).map(|index| (index, WcStatus::Success)).collect();
        assert_eq!(pair.left.scq.poll_statuses(), expected, "seed {seed}");
        assert_eq!(pair.right.rcq.poll().len(), receives, "seed {seed}");
        assert_eq!(word.read(0, 8), u64::to_le_bytes(atomics), "seed {seed}");
        assert!(mine.read(0, slot * count) == left && theirs.read(0, slot * count) == right, "seed {seed}");
    });
}

#[test]
fn a_bad_cable_costs_time_only() {
    for seed in 0..40 {
        mixed(GOOD, seed);
        mixed(Faults::ONE_PERCENT, seed);
        mixed(Faults { loss: 500, duplicate: 300, reorder: 500, corrupt: 200, delay: 300 }, seed);
    }
}

/// More connections to one peer than its window holds: all get turns, even if some of them fail or are destroyed.
#[test]
fn many_connections_share_a_window() {
    for (seed, faults) in [(1, GOOD), (2, Faults::ONE_PERCENT)] {
        on_the_wire(faults, seed, || {
            let world = World::new();
            let (a, b) = (world.node(1), world.node(2));
            let length = 400 << 10;
            let (mine, theirs) = (a.buffer(length), b.buffer(length));
            let ends: Vec<_> = (0..48).map(|_| (a.qp(QpType::Rc), b.qp(QpType::Rc))).collect();
            for (left, right) in &ends {
                left.connect(right, |a| (a.timeout, a.retry_cnt) = (10, 7));
                right.connect(left, |_| {});
            }
            // Of every eight connections, one has no peer, one is flushed, and one is destroyed while it waits.
            ends.iter().step_by(8).for_each(|(_, right)| right.qp.destroy());
            for (left, _) in &ends {
                left.post(1, write(theirs.remote(0)), &[mine.all()]);
                left.post(2, write(theirs.remote(0)), &[mine.all()]);
                left.qp.notify_send();
            }
            ends.iter().skip(1).step_by(8).for_each(|(left, _)| left.to(QpState::Error));
            ends.iter().skip(2).step_by(8).for_each(|(left, _)| left.qp.destroy());
            world.settle();
            for (index, (left, _)) in ends.iter().enumerate() {
                let expected: &[_] = match index % 8 {
                    0 => &[(1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)],
                    1 => &[(1, WcStatus::Flushed), (2, WcStatus::Flushed)],
                    2 => &[],
                    _ => &[(1, WcStatus::Success), (2, WcStatus::Success)],
                };
                assert_eq!(left.scq.poll_statuses(), expected, "{index}");
            }
        });
    }
}

fn datagram(qpn: Qpn, qkey: u32) -> SendOp {
    let to = UdDestination {
        qpn,
        qkey,
        dgid: gid(2),
        dmac: mac(2),
        hop_limit: 64,
        traffic_class: 0x20,
        ..UdDestination::default()
    };
    SendOp::Send { data: SendData::Immediate([4, 3, 2, 1]), to: Some(to) }
}

#[test]
fn datagrams_and_general_services() {
    on_the_wire(GOOD, 1, || {
        let world = World::new();
        let (a, b) = (world.node(1), world.node(2));
        for (kind, qkey) in [(QpType::Ud, QKEY), (QpType::Gsi, 0x8001_0000)] {
            let (left, right) = (a.qp(kind), b.qp(kind));
            left.start_datagrams(qkey);
            right.start_datagrams(qkey);
            let (mine, theirs) = (a.buffer(4096), b.buffer(8192));
            mine.write(0, &pattern(3, 4096));
            right.recv(1, &[theirs.all()]);
            let to = right.qp.qpn();
            left.submit(1, datagram(to, qkey), &[mine.sge(0, 1000), mine.sge(1000, 3096)]);
            // None of these is received: there is no receive, the Q_Key is wrong, the QP number is wrong.
            left.submit(2, datagram(to, qkey), &[]);
            right.recv(2, &[theirs.sge(4200, 100)]);
            left.submit(3, datagram(to, 0x77), &[]);
            left.submit(4, datagram(Qpn::new(0x9999), qkey), &[]);
            // Does not fit into the receive, and leaves it for the next datagram.
            left.submit(5, datagram(to, qkey), &[mine.sge(0, 61)]);
            left.submit(6, datagram(to, qkey), &[mine.sge(0, 60)]);
            assert!(left.scq.poll_statuses().into_iter().eq((1..7).map(|wr_id| (wr_id, WcStatus::Success))));
            let got = right.rcq.poll();
            assert_eq!((got[0].byte_len, got[0].immediate, got[0].src_qpn), (4136, [4, 3, 2, 1], left.qp.qpn()));
            assert_eq!((got[0].network, got[0].flags), (Some(NetworkType::Ipv4), WcFlags::GRH | WcFlags::IMMEDIATE));
            assert_eq!(theirs.read(40, 4096), pattern(3, 4096));
            let header = theirs.read(20, 20);
            assert_eq!((header[0], header[1], &header[12..]), (0x45, 0x20, &[10, 0, 0, 1, 10, 0, 0, 2][..]));
            assert_eq!((got.len(), got[1].wr_id, got[1].status, got[1].byte_len), (2, 2, WcStatus::Success, 100));
            // Longer than the path MTU.
            left.submit(7, datagram(to, qkey), &[mine.all(), mine.sge(0, 1)]);
            assert_eq!(left.scq.one().status, WcStatus::LocalLength);
        }
        let drops = ["ud_dropped_no_receive", "ud_dropped_qkey", "wire_dropped_no_qp", "ud_too_long"];
        assert_eq!(drops.map(|name| b.counter(name)), [2; 4]);
    });
}

/// With threads, real time and sockets.
#[test]
fn two_engines_over_a_socket() {
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let engine = |number: u8, socket| {
        let rxe = Rxe::new(RxeConfig::default().with_workers(1)).unwrap();
        let uplink: Arc<dyn Link> = Arc::new(unix::StreamLink::over(socket));
        let station = plug_in(&rxe, number, PortConfig::new(uplink, 9000));
        let world = World { rxe, clock: Default::default(), far: None, stations: Default::default() };
        let node = world.node(number);
        (world, node, station)
    };
    let (_first, a, _up) = engine(1, one);
    let (_second, b, _down) = engine(2, other);
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    let fast = |a: &mut QpAttrs| a.path_mtu = Mtu::M4096;
    left.connect(&right, fast);
    right.connect(&left, fast);
    let len = 4 << 20;
    let (mine, theirs) = (a.buffer(2 * len), b.buffer(2 * len));
    let data = pattern(8, len);
    mine.write(0, &data);
    theirs.write(len, &data);
    for round in 0..8 {
        left.submit(round, write(theirs.remote(0)), &[mine.sge(0, len)]);
        right.submit(round, write(mine.remote(len)), &[theirs.sge(len, len)]);
        left.submit(round, SendOp::Read { remote: theirs.remote(len) }, &[mine.sge(len, len)]);
    }
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    let (mut done, mut statuses) = (0, Vec::new());
    while done < 24 && std::time::Instant::now() < deadline {
        statuses.extend(left.scq.poll_statuses().into_iter().chain(right.scq.poll_statuses()));
        done = statuses.len();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(done == 24 && statuses.iter().all(|(_, status)| *status == WcStatus::Success), "{statuses:?}");
    assert!(theirs.read(0, len) == data && mine.read(len, len) == data);
}
