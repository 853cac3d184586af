//! Queue pairs and regions that are saved and restored: every byte is right, and everything happens once and in order.

use pvrdma_link::fault::Faults;
use pvrdma_saved_state::pages::PageList;
use pvrdma_saved_state::{Message, roce, rxe as saved, work};
use pvrdma_verbs::{Hca, MemoryRegion, MrShape, PauseHca, QueuePair, SaveHca, VerbsError};
use pvrdma_verbs_types::{QpAttrs, QpState, QpType, SendData, SendOp, UdDestination, WcStatus};

use crate::world::*;

/// A small random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

fn decoded(bytes: &[u8]) -> saved::QueuePair {
    saved::QueuePair::decode(bytes).unwrap()
}

/// Destroys a queue pair and restores it from its saved state.
fn replaced(node: &Node, end: End) -> End {
    assert!(node.hca.pause());
    let state = node.hca.save_qp(&end.qp).unwrap();
    let end = node.restore(end, &state.adapter).unwrap();
    let again = node.hca.save_qp(&end.qp).unwrap();
    assert_eq!(comparable(&again.adapter), comparable(&state.adapter));
    assert_eq!((again.send, again.recv, again.signal_all), (state.send, state.recv, state.signal_all));
    assert!(node.hca.resume());
    end
}

/// The state without the NAK by which a restored responder tells an agreed peer that it keeps no packets.
fn comparable(bytes: &[u8]) -> saved::QueuePair {
    let mut state = decoded(bytes);
    let wire = state.responder.as_mut().and_then(|responder| responder.wire.as_mut());
    if let Some(transport) = wire.and_then(|wire| wire.transport.as_mut()) {
        (transport.nak_sent, transport.has_sent_nak, transport.ack_psn, transport.ack_msn) = (0, false, 0, 0);
        transport.responses.clear();
    }
    state
}

/// Posts requests of all kinds and replaces both queue pairs in between. Returns how often.
fn traffic(seed: u64) -> u32 {
    const REQUESTS: u64 = 40;
    let mut random = Random(seed);
    let Pair { world, a, b, mut left, mut right } = Pair::new();
    let (mine, theirs, landing) = (a.buffer(0x1_0000), b.buffer(0x1_0000), a.buffer(0x2_0000));
    mine.write(0, &pattern(seed, 0x1_0000));
    theirs.write(0x8000, &pattern(seed + 1, 0x4000));
    let (mut adds, mut receives, mut posted, mut times) = (0_u64, Vec::new(), 0, 0);
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for id in 0..REQUESTS {
        let from = random.below(0x8000);
        match random.below(4) {
            0 => {
                written.push(id);
                left.post(id, write(theirs.remote(0x1000 + 0x100 * id)), &[mine.sge(0x100 * id, 0x100)]);
            }
            1 => {
                receives.push((id, from));
                left.post(id, SendOp::Send { data: SendData::Immediate([7; 4]), to: None }, &[mine.sge(from, 0x1234)]);
            }
            2 => {
                read.push(id);
                left.post(id, SendOp::Read { remote: theirs.remote(0x8000) }, &[landing.sge(0x800 * id, 0x800)]);
            }
            _ => {
                left.post(
                    id,
                    SendOp::FetchAdd { remote: theirs.remote(0), add: 1 },
                    &[landing.sge(0x1_8000 + 8 * adds, 8)],
                );
                adds += 1;
            }
        }
        left.qp.notify_send();
        // Some messages find no receive at first.
        while posted < receives.len() && random.below(2) == 0 {
            right.recv(posted as u64, &[theirs.sge(0xc000, 0x2000)]);
            posted += 1;
        }
        (0..random.below(8)).for_each(|_| {
            world.run_one();
        });
        if random.below(3) == 0 {
            left = replaced(&a, left);
            times += 1;
        }
        if random.below(3) == 0 {
            right = replaced(&b, right);
            times += 1;
        }
    }
    for id in posted..receives.len() {
        right.recv(id as u64, &[theirs.sge(0xc000, 0x2000)]);
    }
    world.settle();
    let all: Vec<_> = (0..REQUESTS).map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(left.scq.poll_statuses(), all, "seed {seed}");
    let all: Vec<_> = (0..receives.len() as u64).map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(right.rcq.poll_statuses(), all, "seed {seed}");
    assert_eq!(theirs.read(0, 8), adds.to_le_bytes(), "seed {seed}: each atomic once");
    for add in 0..adds {
        assert_eq!(landing.read(0x1_8000 + 8 * add, 8), add.to_le_bytes(), "seed {seed}");
    }
    for id in written {
        assert!(theirs.read(0x1000 + 0x100 * id, 0x100) == mine.read(0x100 * id, 0x100), "seed {seed}: WRITE {id}");
    }
    for id in read {
        assert!(landing.read(0x800 * id, 0x800) == theirs.read(0x8000, 0x800), "seed {seed}: READ {id}");
    }
    if let Some(&(_, from)) = receives.last() {
        assert!(theirs.read(0xc000, 0x1234) == mine.read(from, 0x1234), "seed {seed}");
    }
    times
}

#[test]
fn connections_of_one_process_go_on() {
    assert!((0..60).map(traffic).sum::<u32>() > 1000);
}

#[test]
fn connections_on_the_wire_go_on() {
    let mut times = 0;
    for seed in 0..60 {
        let loss = [0, 0, 20, 50][usize::try_from(seed % 4).unwrap()];
        on_the_wire(Faults { loss, ..Faults::default() }, seed, || times += traffic(seed));
    }
    assert!(times > 1000, "{times}");
}

#[test]
fn a_datagram_queue_pair_keeps_its_psn_and_its_key() {
    on_the_wire(Faults::default(), 0, || {
        let world = World::new();
        let (a, b) = (world.node(1), world.node(2));
        let (mut left, right) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
        [&left, &right].into_iter().for_each(|end| end.start_datagrams(0x77));
        let (mine, theirs) = (a.buffer(8), b.buffer(64));
        let to =
            Some(UdDestination { qpn: right.qp.qpn(), qkey: 0x77, dgid: gid(2), dmac: mac(2), ..Default::default() });
        for id in 0..4 {
            right.recv(id, &[theirs.all()]);
            left.submit(id, SendOp::Send { data: SendData::None, to }, &[mine.all()]);
            left = replaced(&a, left);
        }
        assert_eq!(left.scq.poll_statuses().len(), 4);
        assert_eq!(right.rcq.poll_statuses().len(), 4);
        let state = decoded(&a.hca.save_qp(&left.qp).unwrap().adapter);
        let route = state.requester.unwrap().route;
        assert_eq!(route, Some(saved::Route::Datagram(saved::Datagrams { psn: Some(4) })));
    });
}

#[test]
fn every_state_comes_back() {
    let Pair { a, mut left, right, .. } = Pair::new();
    let attrs = |end: &End| QpAttrs { sq_draining: false, ..end.qp.query() };
    let before = attrs(&left);
    for state in [QpState::Sqd, QpState::Error, QpState::Reset] {
        left = replaced(&a, left);
        assert_eq!(attrs(&left).av, before.av);
        left.to(state);
        assert_eq!(left.state(), state);
    }
    left = replaced(&a, left);
    left.connect(&right, |_| {});
    assert_eq!(attrs(&replaced(&a, left)), before);
}

#[test]
fn regions_keep_their_keys() {
    let world = World::new();
    let (a, b) = (world.node(1), world.node(2));
    let buffer = a.buffer(0x3000);
    assert!(a.hca.pause() && b.hca.pause());
    let (tables, mr) = (a.hca.save_tables().unwrap(), a.hca.save_mr(&buffer.mr).unwrap());
    let pd = b.hca.create_pd().unwrap();
    b.hca.restore_tables(&tables).unwrap();
    let restored = b.hca.restore_mr(&pd, mr).unwrap();
    b.hca.map_mr(&restored).unwrap();
    assert_eq!((restored.lkey(), restored.shape()), (buffer.mr.lkey(), buffer.mr.shape()));
    assert!(matches!(restored.shape(), Some(MrShape::User { .. })));
    let again = a.hca.save_mr(&buffer.mr).unwrap();
    assert!(b.hca.restore_mr(&pd, again).is_err(), "the slot is taken");
    assert!(b.hca.restore_tables(&tables).is_err(), "there are regions");
    drop(restored);
    b.hca.restore_tables(&tables).unwrap();
}

/// An empty element of a list is two bytes long, and takes a hundred when it is decoded. A state whose decoded form
/// does not fit into the budget is refused before it is decoded.
#[test]
fn parts_are_charged_before_they_are_decoded() {
    let Pair { a, left, .. } = Pair::new();
    assert!(a.hca.pause());
    let mut state = decoded(&a.hca.save_qp(&left.qp).unwrap().adapter);
    let requests = vec![roce::Request::default(); 50_000];
    let transport = Some(roce::Requester { requests, ..Default::default() });
    let wire = saved::WireRequester { source: None, transport };
    state.requester.as_mut().unwrap().route = Some(saved::Route::Wire(Box::new(wire)));
    let (used, part) = (a.budget.used(), state.encode_to_vec());
    a.budget.set_limit(used + 10 * part.len() as u64);
    let refused = a.restore(left, &part).err();
    assert!(matches!(refused, Some(VerbsError::Budget(_))), "{refused:?}");
    let table = saved::AdapterTables { base: 1, free: vec![0; 200_000], ..Default::default() }.encode_to_vec();
    a.budget.set_limit(a.budget.used() + 2 * table.len() as u64);
    let refused = a.hca.restore_tables(&table).err();
    assert!(matches!(refused, Some(VerbsError::Budget(_))), "{refused:?}");
}

/// Each change of a valid state is refused, and leaves the number free for another queue pair.
#[test]
fn forged_queue_pairs_are_refused() {
    type Change<'a> = &'a dyn Fn(&mut saved::QueuePair);
    let refused = |change: Change<'_>| {
        let Pair { world, a, b, left, right } = Pair::new();
        let (mine, theirs) = (a.buffer(0x2000), b.buffer(0x2000));
        left.submit(0, write(theirs.remote(0)), &[mine.all()]);
        right.submit(0, write(mine.remote(0)), &[theirs.all()]);
        left.submit(1, SEND, &[mine.all()]);
        let _ = world;
        assert!(a.hca.pause());
        let mut state = decoded(&a.hca.save_qp(&left.qp).unwrap().adapter);
        change(&mut state);
        let error = a.restore(left, &state.encode_to_vec()).err();
        assert!(a.hca.resume());
        a.qp(QpType::Rc);
        error.map(|error| match error {
            VerbsError::Invalid(what) => what,
            other => panic!("{other:?}"),
        })
    };
    fn own(state: &mut saved::QueuePair) -> &mut saved::Requester {
        state.requester.as_mut().unwrap()
    }
    fn peers(state: &mut saved::QueuePair) -> &mut saved::Responder {
        state.responder.as_mut().unwrap()
    }
    fn attrs(state: &mut saved::QueuePair) -> &mut saved::QpAttributes {
        state.attrs.as_mut().unwrap()
    }
    let part = Some("saved queue pair without a part");
    let count = Some("number of send requests");
    for wire in [false, true] {
        let both: [(Change<'_>, _); 15] = [
            (&|_| {}, None),
            (&|state| state.state = 7, Some("QP state")),
            (&|state| state.state = QpState::Sqe as u32, Some("QP state")),
            (&|state| state.attrs = None, part),
            (&|state| state.responder = None, part),
            (&|state| state.requester = None, count),
            (&|state| attrs(state).path_mtu = 6, Some("path MTU")),
            (&|state| attrs(state).retry_cnt = 8, Some("retry count")),
            (&|state| attrs(state).access = 16, Some("access rights")),
            (&|state| attrs(state).sq_psn = 1 << 24, Some("PSN, QPN or port number")),
            (&|state| attrs(state).av.as_mut().unwrap().dgid.clear(), Some("GID")),
            (&|state| state.source.as_mut().unwrap().vlan = Some(0), Some("VLAN")),
            (&|state| own(state).retries = 8, Some("number of retries")),
            (&|state| own(state).route = None, if wire { count } else { Some("path of requests") }),
            (&|state| own(state).route = Some(saved::Route::Datagram(saved::Datagrams { psn: None })), None),
        ];
        let body = || {
            for (index, (change, reason)) in both.into_iter().enumerate() {
                let reason = if index == 14 { if wire { count } else { Some("path of requests") } } else { reason };
                assert_eq!(refused(change), reason, "{index}, wire {wire}");
            }
        };
        if wire { on_the_wire(Faults::default(), 0, body) } else { body() }
    }
    // In local delivery, the message without a receive is the request in flight.
    let local = |change: Change<'_>| refused(change);
    assert_eq!(local(&|state| own(state).current = None), count);
    assert_eq!(local(&|state| own(state).current.as_mut().unwrap().flags = 8), Some("send request"));
    let many = |state: &mut saved::QueuePair| {
        let work = own(state).current.as_mut().unwrap();
        work.sges = vec![work.sges[0]; 5];
    };
    assert_eq!(local(&many), Some("send request"));
    let register = |count| {
        let pages = Some(PageList { first: vec![1], count: vec![count] });
        work::Operation::FastRegister(work::FastRegister { pages, ..Default::default() })
    };
    let pages = |count| {
        move |state: &mut saved::QueuePair| {
            own(state).current.as_mut().unwrap().operation = Some(register(count));
        }
    };
    assert_eq!(local(&pages(128)), None);
    assert_eq!(local(&pages(129)), Some("send request"));
    let responder = |state: &mut saved::QueuePair| peers(state).wire = Some(saved::WireResponder::default());
    assert_eq!(local(&responder), Some("connection of a responder on the wire"));
    let wire = |state: &mut saved::QueuePair| {
        own(state).current = None;
        let requests = vec![Default::default()];
        let transport = Some(roce::Requester { requests, ..Default::default() });
        own(state).route = Some(saved::Route::Wire(Box::new(saved::WireRequester { source: None, transport })));
    };
    assert_eq!(local(&wire), Some("a peer on the network without an uplink"));
    on_the_wire(Faults::default(), 0, || {
        let transport = |state: &mut saved::QueuePair| {
            let Some(saved::Route::Wire(wire)) = &mut own(state).route else { unreachable!() };
            wire.transport.as_mut().unwrap().una = 1 << 24;
        };
        assert_eq!(refused(&transport), Some("state of a connection"));
        let message = |state: &mut saved::QueuePair| {
            let wire = peers(state).wire.as_mut().unwrap();
            wire.transport.as_mut().unwrap().message = Some(roce::Message::Send(1));
        };
        assert_eq!(refused(&message), Some("message in progress"));
        let connection = |state: &mut saved::QueuePair| peers(state).connection = 2;
        assert_eq!(refused(&connection), Some("connection of a responder on the wire"));
    });
}
