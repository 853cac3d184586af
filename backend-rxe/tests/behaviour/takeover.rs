//! A connection belongs to the two queue pairs that established it. A later owner of their addresses gets no answer.

use pvrdma_roce::wire::{Extension, Header, Opcode, Packet, Reth, build};
use pvrdma_verbs::{Hca, QueuePair};
use pvrdma_verbs_types::{GidType, Psn, QpAttrMask, QpAttrs, QpState, QpType, SendOp, WcStatus};

use crate::world::*;

/// Node 3 takes the address of a former peer of `right`, and creates a queue pair with the same number.
fn take_over(world: &World, victim: &End, former: &End, psns: (u32, u32)) -> (Node, End) {
    let attacker = world.node(3);
    // Before that, the address is reserved for its former owner.
    world.clock.advance(std::time::Duration::from_secs(60));
    attacker.hca.bind_gid(1, gid(former.node), GidType::RoceV2).unwrap();
    let thief = attacker.qp(QpType::Rc);
    assert_eq!(thief.qp.qpn(), former.qp.qpn());
    thief.connect(victim, |a| {
        (a.av.sgid_index, a.timeout, a.retry_cnt) = (1, 1, 1);
        (a.sq_psn, a.rq_psn) = (Psn::new(psns.0), Psn::new(psns.1));
    });
    (attacker, thief)
}

/// The attacker's requests get no answer, whatever PSNs it uses, and the victim's next message does not reach it.
#[test]
fn a_taken_over_connection_gets_no_answer() {
    // Arbitrary PSNs, those at the start of the connection, and the current ones.
    for psns in [(0x77_7777, 0x12_3456), (5, 5), (6, 6)] {
        let pair = Pair::new();
        let secret = pair.b.buffer(64);
        secret.write(0, b"secret of the victim");
        pair.right.recv(7, &[]);
        pair.left.send(1, &[]);
        pair.right.send(2, &[]);
        pair.left.recv(2, &[]);
        pair.settle();
        assert_eq!((pair.left.scq.one().status, pair.right.scq.one().status), (WcStatus::Success, WcStatus::Success));
        assert_eq!((pair.left.rcq.poll().len(), pair.right.rcq.poll().len()), (1, 1));
        let Pair { world, a, b: _b, left, right } = pair;
        pair_gone(a, &left);
        let (attacker, thief) = take_over(&world, &right, &left, psns);
        let loot = attacker.buffer(64);
        thief.recv(1, &[loot.all()]);
        right.recv(8, &[secret.all()]);
        for op in [SEND, write(secret.remote(0)), SendOp::Read { remote: secret.remote(0) }] {
            thief.submit(3, op, &[loot.sge(0, 20)]);
            world.settle();
            let statuses = thief.scq.poll_statuses();
            assert!(!statuses.contains(&(3, WcStatus::Success)), "{statuses:?}");
        }
        assert_eq!((right.rcq.poll().len(), right.state()), (0, QpState::Rts));
        assert_eq!((secret.read(0, 20), loot.read(0, 20)), (b"secret of the victim".to_vec(), vec![0; 20]));
    }
}

/// The victim's own requests do not reach the attacker.
#[test]
fn a_taken_over_connection_receives_nothing() {
    let pair = Pair::new();
    let secret = pair.b.buffer(64);
    secret.write(0, b"secret of the victim");
    pair.right.send(2, &[]);
    pair.left.recv(2, &[]);
    pair.settle();
    assert_eq!(pair.right.scq.one().status, WcStatus::Success);
    let Pair { world, a, b: _b, left, right } = pair;
    pair_gone(a, &left);
    // It has sent one message.
    let (attacker, thief) = take_over(&world, &right, &left, (5, 6));
    let loot = attacker.buffer(64);
    thief.recv(1, &[loot.all()]);
    right.submit(4, SEND, &[secret.sge(0, 20)]);
    world.settle();
    assert_eq!(right.scq.poll_statuses(), [(4, WcStatus::RetryExceeded)]);
    assert_eq!((thief.rcq.poll().len(), loot.read(0, 20)), (0, vec![0; 20]));
}

/// The guest of a node goes away.
fn pair_gone(node: Node, end: &End) {
    end.qp.destroy();
    drop(node);
}

/// Two queue pairs that have not exchanged a packet: a wrong first PSN means another connection.
#[test]
fn the_first_request_has_the_agreed_psn() {
    for (offset, status) in [(0, WcStatus::Success), (1, WcStatus::RetryExceeded)] {
        let pair = Pair::with(World::new(), |a| (a.sq_psn, a.retry_cnt) = (a.sq_psn.plus(offset), 1), |_| {});
        pair.right.recv(1, &[]);
        pair.left.send(1, &[]);
        pair.settle();
        assert_eq!(pair.left.scq.poll_statuses(), [(1, status)]);
        assert_eq!(pair.right.rcq.poll().len(), usize::from(status == WcStatus::Success));
    }
}

/// RESET ends a connection. After a RESET of both ends they can connect again, also with each other; a RESET of one end
/// does not suffice.
#[test]
fn a_reset_draws_new_numbers() {
    let Pair { world, a: _a, b: _b, left, right } = Pair::new();
    let send = |expected| {
        right.recv(1, &[]);
        left.send(1, &[]);
        world.settle();
        assert_eq!(left.scq.poll_statuses(), [(1, expected)]);
    };
    send(WcStatus::Success);
    right.to(QpState::Reset);
    right.connect(&left, |_| {});
    left.qp.modify(&QpAttrs::default(), QpAttrMask::empty()).unwrap();
    send(WcStatus::RetryExceeded);
    for (end, peer) in [(&left, &right), (&right, &left)] {
        end.to(QpState::Reset);
        end.connect(peer, |_| {});
    }
    send(WcStatus::Success);
}

/// Reads `length` bytes from `remote`, as the peer that the test simulates.
fn read_request(remote: pvrdma_verbs_types::RemoteAddress, length: u32) -> Vec<u8> {
    let template: Header = Packet::parse(&request()).unwrap().header;
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length };
    let mut header = Header { extension: Extension::Reth(reth), ..template };
    header.bth.opcode = Opcode::READ_REQUEST;
    build(&header, &[]).unwrap()
}

/// Responses to a READ, which may have up to 2 GiB, stop when the device loses its address; the address may belong to
/// another host by then.
#[test]
fn responses_end_with_their_address() {
    let (world, node, cable, _station) = exposed(32);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let memory = node.buffer(1 << 20);
    give(&cable, &read_request(memory.remote(0), 1 << 20));
    world.rxe.run_ready();
    assert!(!taken(&cable).is_empty(), "the first responses are sent");
    node.hca.unbind_gid(0);
    let other = world.node(3);
    other.hca.bind_gid(1, gid(1), GidType::RoceV2).ok();
    // Packets that were built before may still leave. The cable has room for far less than the whole response.
    let mut later = 0;
    for _ in 0..100 {
        world.rxe.run_ready();
        later += taken(&cable).len();
    }
    assert!(later <= 32, "{later} more");
    assert_eq!(end.state(), QpState::Rts);
}

/// When the address is back, a repeated request of the peer is answered.
#[test]
fn an_address_that_comes_back_answers_again() {
    let (world, node, cable, _station) = exposed(32);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    let memory = node.buffer(1 << 16);
    give(&cable, &read_request(memory.remote(0), 1 << 16));
    world.rxe.run_ready();
    node.hca.unbind_gid(0);
    taken(&cable);
    world.rxe.run_ready();
    taken(&cable);
    world.rxe.run_ready();
    assert!(taken(&cable).is_empty());
    node.hca.bind_gid(0, gid(1), GidType::RoceV2).unwrap();
    give(&cable, &read_request(memory.remote(0), 1 << 16));
    let mut answers = 0;
    for _ in 0..10 {
        world.rxe.run_ready();
        answers += taken(&cable).len();
    }
    assert_eq!(answers, 64);
}

/// After the address vector was changed to a local peer, no requests go to the old peer over the wire.
#[test]
fn an_address_vector_that_turns_local_leaves_the_old_peer() {
    use QpAttrMask as M;
    let (world, node, cable, _station) = exposed(100);
    let local = world.node(3);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.change(QpState::Sqd, QpAttrs::default(), M::empty());
    end.change(QpState::Rts, QpAttrs::default(), M::empty());
    end.send(1, &[]);
    world.rxe.run_ready();
    assert_eq!(taken(&cable).len(), 1);
    give(&cable, &ack_of_first(&end));
    world.rxe.run_ready();
    assert_eq!(end.scq.poll_statuses(), [(1, WcStatus::Success)]);
    end.to(QpState::Sqd);
    let mut attrs = QpAttrs { timeout: 1, retry_cnt: 1, ..end.qp.query() };
    (attrs.av.dgid, attrs.av.dmac) = (gid(local.number), mac(local.number));
    end.change(QpState::Sqd, attrs, M::AV | M::TIMEOUT | M::RETRY_CNT);
    end.to(QpState::Rts);
    end.send(2, &[]);
    world.settle();
    assert_eq!(taken(&cable).len(), 0, "packets for the old peer");
    assert_eq!(end.scq.poll_statuses(), [(2, WcStatus::RetryExceeded)]);
}

/// Returns the peer's acknowledgement of the first message.
fn ack_of_first(end: &End) -> Vec<u8> {
    use pvrdma_roce::wire::{Aeth, Syndrome};
    let mut header = Packet::parse(&request()).unwrap().header;
    header.bth.opcode = Opcode::ACKNOWLEDGE;
    header.bth.destination = end.qp.qpn();
    header.bth.psn = Psn::new(5);
    header.extension = Extension::Aeth(Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 1 });
    build(&header, &[]).unwrap()
}
