//! Each `Rxe` is a network. Traffic of one network reaches nothing in another one, whatever addresses and tags it has.

use std::sync::Arc;

use pvrdma_link::memory;
use pvrdma_rxe::{ForgedTransmits, PortConfig, PortRules, VlanMode};
use pvrdma_verbs::{Hca, QueuePair, VerbsError};
use pvrdma_verbs_types::{GidType, QpType, SendData, SendOp, UdDestination, WcStatus};

use crate::world::*;

const QKEY: u32 = 0x1234;

/// The VLAN of a tenant.
const VLAN: u16 = 99;
/// Tags of VLAN 99: 802.1Q, 802.1ad, an older ethertype of bridges, and one that is hidden behind a priority tag.
const TAGS: [&[u8]; 4] =
    [&[0x81, 0, 0, 99], &[0x88, 0xa8, 0, 99], &[0x91, 0, 0, 99], &[0x81, 0, 0x60, 0, 0x81, 0, 0, 99]];
/// A tag for the priority alone.
const PRIORITY: &[u8] = &[0x81, 0, 0x60, 0];

/// A broadcast of some other protocol.
fn arp(source: u8, tag: &[u8]) -> Vec<u8> {
    [&[0xff; 6], &mac(source).0[..], tag, &[0x88, 0xb5], &[7; 46]].concat()
}

#[test]
fn a_guest_without_a_vlan_binds_no_address_in_one() {
    for plugged in [false, true] {
        let world = World::new();
        let (uplink, _network) = memory::pair(9).unwrap();
        let _station = plugged.then(|| plug(&world.rxe, 1, uplink, PortRules::default()));
        let node = world.node(1);
        for vlan in [1, VLAN, 4094] {
            let bound = node.hca.bind_gid_in_vlan(3, gid(9), GidType::RoceV2, Some(vlan));
            assert!(matches!(bound, Err(VerbsError::Unsupported(_))), "{bound:?}");
        }
        let gids = node.hca.inspect()["gids"].clone();
        assert!(gids.as_array().unwrap().iter().all(|bound| bound["vlan"].is_null() && bound["index"] != 3), "{gids}");
        node.hca.bind_gid(3, gid(9), GidType::RoceV2).unwrap();
    }
}

#[test]
fn frames_of_a_guest_without_a_vlan_are_in_none() {
    let world = World::new();
    let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
    let rules = PortRules::default().with_forged(ForgedTransmits::Mac);
    let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
    let _station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    let passes = [arp(1, &[]), arp(1, PRIORITY), arp(7, &[])];
    for tag in TAGS {
        for (from, to) in [(&guest, &network), (&network, &guest)] {
            let before = node.counter("passed_dropped_vlan");
            // Alone, and among others.
            give(from, &arp(1, tag));
            world.rxe.run_ready();
            passes.iter().for_each(|frame| give(from, frame));
            give(from, &arp(1, tag));
            world.rxe.run_ready();
            assert_eq!(taken(to), passes, "{tag:x?}");
            assert_eq!(node.counter("passed_dropped_vlan"), before + 2);
        }
    }
    assert_eq!((node.counter("passed_dropped_forged"), node.counter("passed_dropped")), (0, 0));
}

#[test]
fn packets_in_a_vlan_find_no_address_without_one() {
    let frame = request();
    let tagged = |tag: &[u8]| [&frame[..12], tag, &frame[12..]].concat();
    let (world, node, cable, _station) = exposed(10);
    let end = node.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    for (count, tag) in (1..).zip([&[0x81, 0, 0, 99][..], &[0x81, 0, 0xe0, 1]]) {
        give(&cable, &tagged(tag));
        world.rxe.run_ready();
        assert_eq!((end.rcq.poll().len(), node.counter("wire_dropped_vlan")), (0, count));
        assert!(taken(&cable).is_empty());
    }
    give(&cable, &tagged(PRIORITY));
    world.rxe.run_ready();
    assert_eq!(end.rcq.one().status, WcStatus::Success);
    assert_eq!(taken(&cable).len(), 1);
}

/// An access port removes one tag. A second tag could bring frames of the guest into other VLANs, and frames of the
/// network to the guest, so such frames are dropped.
#[test]
fn access_ports_pass_one_tag() {
    let world = World::with(|config| config.vlan = VlanMode::Access(42));
    let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
    let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic)));
    let _station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    for (count, tag) in (1..).zip(TAGS) {
        give(&guest, &arp(1, tag));
        give(&network, &arp(2, &[&[0x81, 0, 0, 42], tag].concat()));
        world.rxe.run_ready();
        assert!(taken(&network).is_empty() && taken(&guest).is_empty(), "{tag:x?}");
        assert_eq!(node.counter("passed_dropped_vlan"), 2 * count);
    }
    give(&guest, &arp(1, PRIORITY));
    give(&network, &arp(2, &[0x81, 0, 0x60, 42]));
    world.rxe.run_ready();
    assert_eq!(taken(&network), [arp(1, &[0x81, 0, 0x60, 42])]);
    assert_eq!(taken(&guest), [arp(2, &[])]);
}

/// Sends requests of all kinds from one device to another and compares each byte. `seed` selects the bytes.
fn exchange(pair: &Pair, seed: u64) {
    const LEN: u64 = 5000;
    let (mine, theirs) = (pair.a.buffer(3 * LEN), pair.b.buffer(3 * LEN));
    let data = pattern(seed, LEN);
    mine.write(0, &data);
    theirs.write(2 * LEN, &pattern(!seed, LEN));
    pair.right.recv(1, &[theirs.sge(0, LEN)]);
    pair.left.submit(1, SEND, &[mine.sge(0, LEN)]);
    pair.left.submit(2, write(theirs.remote(LEN)), &[mine.sge(0, LEN)]);
    pair.left.submit(3, SendOp::Read { remote: theirs.remote(2 * LEN) }, &[mine.sge(LEN, LEN)]);
    pair.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!(u64::from(pair.right.rcq.one().byte_len), LEN);
    assert!(theirs.read(0, LEN) == data && theirs.read(LEN, LEN) == data);
    assert!(mine.read(LEN, LEN) == pattern(!seed, LEN));
    let datagram = pattern(seed ^ 7, 512);
    mine.write(0, &datagram);
    let (from, to) = (pair.a.qp(QpType::Ud), pair.b.qp(QpType::Ud));
    from.start_datagrams(QKEY);
    to.start_datagrams(QKEY);
    to.recv(1, &[theirs.sge(0, 1000)]);
    let destination =
        UdDestination { qpn: to.qp.qpn(), qkey: QKEY, dgid: gid(2), dmac: mac(2), ..UdDestination::default() };
    from.submit(1, SendOp::Send { data: SendData::None, to: Some(destination) }, &[mine.sge(0, 512)]);
    pair.settle();
    assert_eq!((from.scq.one().status, to.rcq.one().byte_len), (WcStatus::Success, 552));
    assert!(theirs.read(40, 512) == datagram);
}

fn equal_addresses() {
    let [red, blue] = [Pair::new(), Pair::new()];
    assert_eq!(red.left.qp.qpn(), blue.left.qp.qpn());
    assert_eq!(red.right.qp.qpn(), blue.right.qp.qpn());
    for seed in 0..4 {
        exchange(&red, seed);
        exchange(&blue, !seed);
    }
}

/// Two networks with equal addresses: both work, and no write reaches the wrong network.
#[test]
fn networks_with_equal_addresses_exchange_their_own_data() {
    equal_addresses();
}

over_a_cable! { equal_addresses }

/// Returns `true` if a node of `from` reaches memory and queues of a node of `to`, which is connected to the same
/// address.
fn reaches(from: &World, to: &World) -> bool {
    let (victim, attacker) = (to.node(2), from.node(1));
    let secret = victim.buffer(64);
    secret.write(0, &[0x5e; 64]);
    let mine = attacker.buffer(64);
    let mut reached = Vec::new();
    for op in [SendOp::Read { remote: secret.remote(0) }, write(secret.remote(0)), SEND] {
        let (shot, end) = (attacker.qp(QpType::Rc), victim.qp(QpType::Rc));
        assert_eq!(shot.qp.qpn(), end.qp.qpn());
        end.recv(1, &[secret.sge(0, 64)]);
        end.connect(&shot, |_| {});
        shot.connect(&end, |a| (a.retry_cnt, a.timeout) = (1, 1));
        shot.submit(1, op, &[mine.all()]);
        from.settle();
        to.settle();
        reached.push(shot.scq.one().status == WcStatus::Success);
    }
    let datagrams = attacker.qp(QpType::Ud);
    let open = victim.qp(QpType::Ud);
    for end in [&datagrams, &open] {
        end.start_datagrams(QKEY);
    }
    open.recv(1, &[secret.all()]);
    let dgid = gid(2);
    let to_open = UdDestination { qpn: open.qp.qpn(), qkey: QKEY, dgid, dmac: mac(2), ..UdDestination::default() };
    datagrams.submit(1, SendOp::Send { data: SendData::None, to: Some(to_open) }, &[mine.sge(0, 8)]);
    from.settle();
    to.settle();
    reached.push(!open.rcq.poll().is_empty());
    reached.push(mine.read(0, 64) != [0; 64] || secret.read(0, 64) != [0x5e; 64]);
    assert!(reached.iter().all(|one| *one == reached[0]), "{reached:?}");
    reached[0]
}

/// An address of another network is unknown in this one.
#[test]
fn an_address_of_another_network_is_not_found() {
    let [red, blue] = [World::new(), World::new()];
    assert!(reaches(&red, &red) && !reaches(&blue, &red));
}

/// A connection stays with its remote host while a guest of another network takes that host's address.
#[test]
fn an_address_taken_in_another_network_stays_where_it_was() {
    on_the_wire(Default::default(), 1, || {
        let red = Pair::new();
        let blue = World::new();
        // The attacker is node 1 of the other network. Nodes with even numbers are behind the cable.
        let attacker = blue.node(1);
        let thief = attacker.qp(QpType::Gsi);
        thief.start_datagrams(QKEY);
        let loot = attacker.buffer(1000);
        thief.recv(1, &[loot.all()]);
        exchange(&red, 1);
        for (index, taken) in (1..).zip([2, 1, 3]) {
            let bound = attacker.hca.bind_gid(index, gid(taken), GidType::RoceV2);
            assert!(bound.is_ok(), "no device of this network has the address: {bound:?}");
        }
        exchange(&red, 2);
        blue.settle();
        let counts = ["wire_dropped_address", "wire_dropped_no_qp"].map(|name| red.a.counter(name));
        assert_eq!((thief.rcq.poll().len(), counts), (0, [0, 0]));
    });
}
