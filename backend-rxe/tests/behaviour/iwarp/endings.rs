//! Ends of connections in order.

use pvrdma_ib_cm::Message;
use pvrdma_verbs::{Hca, PauseHca, QueuePair, SaveHca};
use pvrdma_verbs_types::{QpState, WcStatus};

use super::*;
use crate::world::{SEND, pattern};

/// Both directions: the end that began the connection, and the one that accepted it.
#[test]
fn a_guest_disconnects() {
    for by in [0, 1] {
        let net = Net::new();
        let Ends { left, right, rep, req } = net.connect();
        let [ending, other] = if by == 0 { [&left, &right] } else { [&right, &left] };
        other.recv(1, &[]);
        // As the kernel does: the QP first, then the message.
        ending.to(QpState::Error);
        let dreq = if by == 0 {
            CmGuest::dreq(rep.remote_id, rep.local_id, rep.qpn)
        } else {
            CmGuest::dreq(0x6001, req.local_id, req.qpn)
        };
        net.guests[by].send(gid(if by == 0 { 2 } else { 1 }), dreq);
        // The manager may have noticed the end of the QP before.
        loop {
            match net.next(by) {
                Message::Drep(_) => break,
                Message::Dreq(_) => {}
                message => panic!("{message:?}"),
            }
        }
        net.expect_disconnect(1 - by);
        assert_eq!(other.state(), QpState::Rts);
        other.to(QpState::Error);
        assert_eq!(other.rcq.poll_statuses(), [(1, WcStatus::Flushed)]);
        // Both QPs can be used for another connection.
        [&left, &right].into_iter().for_each(|end| end.to(QpState::Reset));
        net.connect();
    }
}

/// Messages that a guest has sent before it disconnects arrive, although they complete when the socket has taken them.
#[test]
fn the_last_messages_arrive() {
    const MESSAGES: u64 = 30;
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let (mine, theirs) = (net.guests[0].node.buffer(10_000), net.guests[1].node.buffer(10_000 * MESSAGES));
    mine.write(0, &pattern(1, 10_000));
    for id in 0..MESSAGES {
        right.recv(id, &[theirs.sge(id * 10_000, 10_000)]);
        left.post(id, SEND, &[mine.all()]);
    }
    left.qp.notify_send();
    net.wait(&left.scq, MESSAGES);
    left.qp.destroy();
    net.wait(&right.rcq, MESSAGES);
    assert!(right.rcq.poll().iter().all(|received| received.status == WcStatus::Success));
    net.expect_disconnect(1);
}

#[test]
fn queue_pairs_that_end_disconnect_their_peers() {
    for how in 0..3 {
        let net = Net::new();
        let Ends { left, right, .. } = net.connect();
        match how {
            0 => left.qp.destroy(),
            1 => left.to(QpState::Reset),
            _ => left.to(QpState::Error),
        }
        net.expect_disconnect(1);
        net.expect_disconnect(0);
        right.qp.destroy();
        net.run();
    }
}

/// A program may keep its queue pair for longer than its connection.
#[test]
fn a_disconnection_without_an_end_of_the_queue_pair_reaches_the_peer() {
    let net = Net::new();
    let Ends { left, right: _right, rep, .. } = net.connect();
    net.guests[0].send(gid(2), CmGuest::dreq(rep.remote_id, rep.local_id, rep.qpn));
    assert!(matches!(net.next(0), Message::Drep(_)));
    net.expect_disconnect(1);
    assert_eq!(left.state(), QpState::Rts);
}

#[test]
fn a_device_that_ends_disconnects_its_peers() {
    let Net { guests: [first, second], engines, clock, sockets, _stations } = Net::new();
    let net = Net { guests: [first, second], engines, clock, sockets, _stations };
    let Ends { left, right, .. } = net.connect();
    let Net { guests: [first, second], engines, .. } = net;
    drop((left, first));
    let start = Instant::now();
    while !second.has_message() {
        engines[1].run_ready();
        assert!(start.elapsed() < STUCK, "no DREQ");
        std::thread::yield_now();
    }
    assert!(matches!(second.take_message(), Message::Dreq(_)));
    drop((right, second));
}

/// A socket cannot be saved.
#[test]
fn a_device_with_connections_cannot_move() {
    let net = Net::new();
    let Ends { left, right: _right, .. } = net.connect();
    let hca = &net.guests[0].node.hca;
    let blockers = hca.blockers();
    assert!(blockers.len() == 1 && blockers[0].contains("iWARP"), "{blockers:?}");
    hca.pause();
    assert!(hca.save_qp(&left.qp).is_err());
    hca.resume();
    left.to(QpState::Error);
    assert_eq!(hca.blockers(), Vec::<String>::new());
}

/// While the link is down, nothing is read from the socket or written to it.
#[test]
fn a_link_that_is_down_delays_messages() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    let hca = &net.guests[1].node.hca;
    hca.set_link(false).unwrap();
    right.recv(1, &[]);
    left.send(1, &[]);
    right.send(2, &[]);
    net.wait(&left.scq, 1);
    net.run();
    assert_eq!((right.rcq.total(), right.scq.total()), (0, 0));
    hca.set_link(true).unwrap();
    net.wait(&right.rcq, 1);
    net.wait(&right.scq, 1);
}

/// A device that is paused does nothing; then it continues.
#[test]
fn a_pause_delays_messages() {
    let net = Net::new();
    let Ends { left, right, .. } = net.connect();
    net.guests[1].node.hca.pause();
    right.recv(1, &[]);
    left.send(1, &[]);
    net.wait(&left.scq, 1);
    net.run();
    assert_eq!(right.rcq.total(), 0);
    net.guests[1].node.hca.resume();
    net.wait(&right.rcq, 1);
}
