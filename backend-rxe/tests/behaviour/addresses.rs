//! Rules for addresses: which ones a guest may bind, which frames its network function may send, and which peers a
//! device may connect to.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_link::memory::{self, MemoryLink};
use pvrdma_roce::wire::{Network, Packet, build};
use pvrdma_rxe::{ForgedTransmits, PortConfig, PortRules, Rxe, RxeHca, RxeStation, VlanMode};
use pvrdma_verbs::{AddressRule, Hca, OtherAddresses, Peers, QueuePair, Rules, VerbsError, link_local};
use pvrdma_verbs_types::{Gid, GidType, QpType, SendData, SendOp, UdDestination, WcStatus};

use crate::claims::{has, waits};
use crate::world::*;

const QKEY: u32 = 0x1234;
/// Time for which an address stays reserved after its owner has gone.
const HOLD: Duration = Duration::from_secs(60);

fn own() -> Rules {
    Rules::default()
}

fn listed(addresses: &[Gid]) -> Rules {
    let listed = addresses.iter().map(|gid| IpAddr::from(gid.0)).map(|address| address.to_canonical()).collect();
    Rules::default().with_addresses(AddressRule { others: OtherAddresses::Refuse, listed })
}

fn peers(prefixes: &str) -> Rules {
    let peers = Peers(prefixes.split_whitespace().map(|prefix| prefix.parse().unwrap()).collect());
    Rules::default().with_peers(peers)
}

fn bind(hca: &RxeHca, index: u8, address: Gid) -> Result<(), VerbsError> {
    hca.bind_gid(index, address, GidType::RoceV2)
}

/// Creates a device with a network function on its port. Returns the far ends of both links, too.
fn with_nic(world: &World, number: u8, rules: PortRules) -> (MemoryLink, MemoryLink, RxeStation) {
    let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
    let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
    (network, guest, plug_in(&world.rxe, number, config))
}

/// An ARP packet in which the host of this number announces an address.
fn arp(source: u8, address: Gid) -> Vec<u8> {
    let head = [&[0xff; 6][..], &mac(source).0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac(source).0].concat();
    [&head[..], &address.ipv4().unwrap(), &[0; 10], &[0; 18]].concat()
}

/// An ARP probe (RFC 5227) of the host of this number.
fn arp_probe(source: u8, address: Gid) -> Vec<u8> {
    let head = [&[0xff; 6][..], &mac(source).0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac(source).0].concat();
    [&head[..], &[0; 10], &address.ipv4().unwrap(), &[0; 18]].concat()
}

/// A neighbour solicitation by which the host of this number detects duplicates of an address (RFC 4862).
fn detection(source: u8, address: Gid) -> Vec<u8> {
    let ethernet = [&[0x33, 0x33, 0, 0, 0, 1][..], &mac(source).0, &[0x86, 0xdd]].concat();
    let header = [&[0x60, 0, 0, 0, 0, 24, 58, 255][..], &[0; 16], &[0xff; 16]].concat();
    [&ethernet[..], &header, &[135, 0, 0, 0, 0, 0, 0, 0], &address.0].concat()
}

/// A neighbour advertisement for an address.
fn advertisement(source: u8, address: Gid) -> Vec<u8> {
    let ethernet = [&[0x33, 0x33, 0, 0, 0, 1][..], &mac(source).0, &[0x86, 0xdd]].concat();
    let header = [&[0x60, 0, 0, 0, 0, 24, 58, 255][..], &link_local(mac(source)).0, &[0xff; 16]].concat();
    [&ethernet[..], &header, &[136, 0, 0, 0, 0, 0, 0, 0], &address.0].concat()
}

/// The hijacker binds the victim's listed addresses first and does not get them; the victim does.
#[test]
fn a_device_that_claims_first_gets_no_reserved_address() {
    let world = World::new();
    let (hijacker, reckless) = (world.ruled(1, own()), world.ruled(3, own().with_addresses(AddressRule::ANY)));
    let victim = world.ruled(2, listed(&[gid(2)]));
    for thief in [&hijacker, &reckless] {
        for address in [gid(2), link_local(mac(2))] {
            let refused = bind(&thief.hca, 1, address).unwrap_err();
            assert!(matches!(refused, VerbsError::NotAllowed(_)), "{address}: {refused}");
        }
        assert_eq!(thief.counter("gids_refused"), 2);
    }
    for (index, address) in (0..).zip([gid(2), link_local(mac(2))]) {
        bind(&victim.hca, index, address).unwrap();
    }
    assert!(bind(&victim.hca, 2, gid(9)).is_err(), "it is not listed");
    assert_eq!(victim.counter("gids_refused"), 1);
}

/// A guest that restarts gets its addresses back, even if another guest has bound them meanwhile.
#[test]
fn a_guest_that_restarts_keeps_its_addresses() {
    let world = World::new();
    let (hijacker, victim) = (world.ruled(1, own()), world.ruled(2, own()));
    bind(&victim.hca, 0, gid(2)).unwrap();
    // The driver unbinds its addresses, or the device is created anew.
    victim.hca.unbind_gid(0);
    bind(&hijacker.hca, 0, gid(2)).unwrap();
    assert_eq!((has(&hijacker, gid(2)), waits(&hijacker)), (false, vec!["taken".to_owned()]));
    bind(&victim.hca, 0, gid(2)).unwrap();
    drop(victim);
    let pass = |time| {
        world.clock.advance(time);
        world.rxe.run_ready();
    };
    pass(HOLD - Duration::from_millis(1));
    assert!(!has(&hijacker, gid(2)));
    let victim = world.ruled(2, own());
    bind(&victim.hca, 0, gid(2)).unwrap();
    pass(HOLD * 100);
    assert!(has(&victim, gid(2)) && !has(&hijacker, gid(2)), "it is bound");
    drop(victim);
    pass(HOLD);
    assert!(has(&hijacker, gid(2)));
}

/// A device does not get the address of a remote host. Otherwise the host's packets would be dropped as forged, and
/// connection requests for the host would reach the device.
#[test]
fn the_address_of_a_remote_host_is_not_granted() {
    let world = World::new();
    let (ours, cable) = memory::pair(99).unwrap();
    let _station = plug(&world.rxe, 1, ours, PortRules::default());
    let victim = world.ruled(1, own());
    bind(&victim.hca, 0, gid(1)).unwrap();
    world.settle();
    taken(&cable);
    let neighbour = world.ruled(3, own());
    let end = victim.qp(QpType::Rc);
    connect_to_test(&end);
    end.recv(1, &[]);
    give(&cable, &request());
    world.rxe.run_ready();
    assert_eq!(end.rcq.one().status, WcStatus::Success);
    bind(&neighbour.hca, 1, gid(2)).unwrap();
    assert_eq!((waits(&neighbour), neighbour.counter("gids_waited")), (vec!["remote".to_owned()], 1));
    // The victim still receives packets from the host, and its connection requests reach the host.
    give(&cable, &request());
    world.rxe.run_ready();
    assert_eq!((victim.counter("wire_dropped_address"), victim.counter("wire_duplicates")), (0, 1));
    taken(&cable);
    let manager = victim.qp(QpType::Gsi);
    manager.start_datagrams(QKEY);
    let buffer = victim.buffer(64);
    manager.submit(1, to(2, manager.qp.qpn()), &[buffer.all()]);
    assert_eq!((manager.scq.one().status, taken(&cable).len()), (WcStatus::Success, 1));
    // Packets of the host continue to arrive.
    world.clock.advance(HOLD - Duration::from_millis(1));
    give(&cable, &request());
    world.rxe.run_ready();
    world.clock.advance(HOLD - Duration::from_millis(1));
    world.rxe.run_ready();
    assert!(!has(&neighbour, gid(2)));
    // The host is gone, and a device without a port cannot probe for it, so the address may move to the device.
    world.clock.advance(Duration::from_millis(1));
    world.rxe.run_ready();
    assert!(has(&neighbour, gid(2)));
}

fn to(number: u8, qpn: pvrdma_verbs_types::Qpn) -> SendOp {
    let to = UdDestination { qpn, qkey: QKEY, dgid: gid(number), dmac: mac(number), ..UdDestination::default() };
    SendOp::Send { data: SendData::None, to: Some(to) }
}

/// Addresses that a network function announces and addresses that guests bind share one table: each kind is checked
/// against the other.
#[test]
fn arp_and_neighbour_discovery_follow_the_address_rules() {
    let world = World::new();
    let (network, guest, _station) = with_nic(&world, 1, PortRules::default());
    let (_other_network, other_guest, _other_uplink) = with_nic(&world, 3, PortRules::default());
    let (device, other) = (world.ruled(1, own()), world.ruled(3, own()));
    let v6 = |last| {
        let mut address = [0xfd; 16];
        address[15] = last;
        Gid(address)
    };
    bind(&other.hca, 0, gid(3)).unwrap();
    bind(&other.hca, 1, v6(3)).unwrap();
    let refused = [arp(1, gid(3)), advertisement(1, v6(3)), advertisement(1, link_local(mac(3)))];
    let passed = [arp(1, gid(7)), advertisement(1, v6(7)), advertisement(1, link_local(mac(1)))];
    for (count, frame) in (1..).zip(&refused) {
        give(&guest, frame);
        world.rxe.run_ready();
        assert_eq!((taken(&network).len(), device.counter("passed_dropped_address")), (0, count));
    }
    passed.iter().for_each(|frame| give(&guest, frame));
    world.settle();
    taken(&network);
    for frame in &passed {
        give(&guest, frame);
        world.rxe.run_ready();
        assert_eq!(taken(&network), std::slice::from_ref(frame));
    }
    // It has said so first.
    for (index, address) in [(2, gid(7)), (3, v6(7))] {
        bind(&other.hca, index, address).unwrap();
        assert!(!has(&other, address));
    }
    bind(&device.hca, 2, gid(7)).unwrap();
    // An address that was not announced for a minute is free.
    world.settle();
    assert!(has(&other, v6(7)) && has(&device, gid(7)) && !has(&other, gid(7)));
    give(&other_guest, &arp(3, gid(3)));
    world.rxe.run_ready();
    assert_eq!((other.counter("passed_out"), other.counter("passed_dropped_address")), (1, 0));
}

/// A device that could bind the address of a group would get all datagrams that other devices send to the group.
#[test]
fn a_device_gets_addresses_of_single_hosts_only() {
    let world = World::new();
    let (network, guest, _uplink) = with_nic(&world, 1, PortRules::default());
    let any = || Rules::default().with_addresses(AddressRule::ANY);
    let (device, other) = (world.ruled(1, own()), world.ruled(3, any()));
    let none = [
        "ff02::1",
        "ff12::9",
        "::ffff:224.0.0.9",
        "::ffff:239.1.2.3",
        "::ffff:255.255.255.255",
        "::ffff:0.0.0.0",
        "::1",
        "::ffff:127.0.0.1",
    ];
    for (index, address) in (0..).zip(none) {
        let address = Gid(address.parse::<std::net::Ipv6Addr>().unwrap().octets());
        for node in [&device, &other] {
            bind(&node.hca, index, address).unwrap();
            assert!(!has(node, address), "{address}");
        }
        if address.ipv4().is_some_and(|address| address != [0; 4]) {
            give(&guest, &arp(1, address));
        }
    }
    world.settle();
    assert_eq!((taken(&network).len(), device.counter("passed_dropped_address")), (0, 4));
}

/// A host gives an address up if another one probes for it at the same time (RFC 5227, 2.1.1; RFC 4862, 5.4.3).
#[test]
fn only_its_owner_probes_for_a_reserved_address() {
    let world = World::new();
    let (network, guest, _uplink) = with_nic(&world, 1, PortRules::default());
    let (other_network, other_guest, _other_uplink) = with_nic(&world, 3, PortRules::default());
    let v6 = |last| Gid([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    let (device, owner) = (world.ruled(1, own()), world.ruled(3, listed(&[gid(9), v6(9)])));
    let frames = |source, address: u8| {
        [arp_probe(source, gid(address)), detection(source, v6(address)), detection(source, link_local(mac(address)))]
    };
    let sends = |guest: &MemoryLink, network: &MemoryLink, frame: &[u8]| {
        give(guest, frame);
        world.rxe.run_ready();
        taken(network).len() == 1
    };
    for (guest, network, source, address, passes) in [
        (&guest, &network, 1, 7, [true; 3]),
        (&guest, &network, 1, 9, [false, false, true]),
        (&guest, &network, 1, 3, [true, true, false]),
        (&guest, &network, 1, 1, [true; 3]),
        (&other_guest, &other_network, 3, 9, [true; 3]),
        (&other_guest, &other_network, 3, 3, [true; 3]),
        (&other_guest, &other_network, 3, 1, [true, true, false]),
    ] {
        let sent = frames(source, address).map(|frame| sends(guest, network, &frame));
        assert_eq!(sent, passes, "{source} {address}");
    }
    let drops = [&device, &owner].map(|node| node.counter("passed_dropped_address"));
    assert_eq!(drops, [3, 1]);
    // A probe is no claim.
    bind(&owner.hca, 0, gid(9)).unwrap();
    assert!(has(&owner, gid(9)));
}

/// Hosts take a tag behind that of a priority for the VLAN of a frame.
#[test]
fn announcements_of_remote_hosts_count_in_their_vlan() {
    let world = World::with(|config| config.vlan = VlanMode::Trunk);
    let (network, _guest, _uplink) = with_nic(&world, 1, PortRules::default());
    let device = world.ruled(1, own());
    let mut announcement = arp(200, gid(8));
    announcement.splice(12..12, [0x81, 0, 0xe0, 0, 0x81, 0, 0, 5]);
    give(&network, &announcement);
    world.rxe.run_ready();
    for (index, vlan) in [(0, Some(5)), (1, Some(7)), (2, None)] {
        device.hca.bind_gid_in_vlan(index, gid(8), GidType::RoceV2, vlan).unwrap();
    }
    assert_eq!(waits(&device), ["remote", "probing", "probing"]);
}

/// Addresses that a host beyond the uplink announces by ARP count as that host's.
#[test]
fn announcements_of_remote_hosts_count() {
    let world = World::new();
    let (network, _guest, _station) = with_nic(&world, 1, PortRules::default());
    let (device, listing) = (world.ruled(1, own()), world.ruled(3, listed(&[gid(9)])));
    for address in [gid(8), gid(9)] {
        give(&network, &arp(200, address));
    }
    // A device of this network that announces an address over the uplink is not taken for a remote host.
    give(&network, &arp(3, gid(7)));
    world.rxe.run_ready();
    bind(&device.hca, 0, gid(8)).unwrap();
    bind(&device.hca, 1, gid(7)).unwrap();
    assert_eq!(waits(&device), ["remote", "probing"]);
    // A device that lists the address gets it at once.
    bind(&listing.hca, 0, gid(9)).unwrap();
    assert!(has(&listing, gid(9)));
    world.settle();
    assert!(has(&device, gid(8)) && has(&device, gid(7)));
}

/// A RoCE v2 packet over IPv4 from this source, with a VLAN tag.
fn forged_roce(source: u8, tag: &[u8]) -> Vec<u8> {
    let frame = request();
    [&frame[..6], &mac(source).0, tag, &frame[12..]].concat()
}

/// The network function must not send RoCE: a process of the guest could forge packets of the guest's queue pairs as
/// ordinary UDP.
#[test]
fn the_network_function_sends_no_roce() {
    use ForgedTransmits as F;
    for (forged, roce, foreign) in [(F::Off, 0, 0), (F::Mac, 0, 1), (F::Roce, 1, 0), (F::All, 1, 1)] {
        let world = World::new();
        let (network, guest, _station) = with_nic(&world, 1, PortRules::default().with_forged(forged));
        let node = world.node(1);
        let plain = [&[9; 6][..], &mac(1).0, &[8, 0], &[0; 40]].concat();
        let foreign_plain = [&[9; 6][..], &mac(7).0, &[8, 0], &[0; 40]].concat();
        let v1 = [&[9; 6][..], &mac(1).0, &[0x89, 0x15], &[0; 60]].concat();
        for frame in [&forged_roce(1, &[]), &v1, &forged_roce(1, &[0x81, 0, 0x60, 0])] {
            give(&guest, frame);
        }
        give(&guest, &plain);
        give(&guest, &foreign_plain);
        world.rxe.run_ready();
        let sent = taken(&network);
        assert_eq!(sent.len(), 3 * roce + 1 + foreign, "{forged:?}");
        assert!(sent.contains(&plain));
        let count = |name: &str| usize::try_from(node.counter(name)).unwrap();
        assert_eq!(count("passed_dropped_roce"), 3 - 3 * roce, "{forged:?}");
        assert_eq!(count("passed_dropped_forged"), 1 - foreign, "{forged:?}");
    }
}

/// Returns whether two devices of one process reach each other by connections and datagrams, and their counts of
/// refusals.
fn meet(left: Rules, right: Rules) -> (bool, [u64; 2]) {
    let world = World::new();
    let nodes = [(1, left), (2, right)].map(|(number, rules)| {
        let node = world.ruled(number, rules);
        bind(&node.hca, 0, gid(number)).unwrap();
        node
    });
    let [a, b] = &nodes;
    let (from, open) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    from.connect(&open, |a| (a.timeout, a.retry_cnt) = (1, 1));
    open.connect(&from, |_| {});
    open.recv(1, &[]);
    from.send(1, &[]);
    world.settle();
    let connected = from.scq.one().status == WcStatus::Success;
    // Connection requests are datagrams to QP 1.
    let (manager, receiver) = (a.qp(QpType::Gsi), b.qp(QpType::Gsi));
    for end in [&manager, &receiver] {
        end.start_datagrams(QKEY);
    }
    let (mine, theirs) = (a.buffer(64), b.buffer(200));
    receiver.recv(1, &[theirs.all()]);
    manager.submit(1, to(2, receiver.qp.qpn()), &[mine.all()]);
    world.settle();
    assert_eq!(manager.scq.one().status, WcStatus::Success);
    let told = receiver.rcq.poll().len() == 1;
    assert_eq!(connected, told);
    assert_eq!(open.rcq.poll().len() == 1, connected);
    (connected, nodes.each_ref().map(|node| node.counter("peers_refused")))
}

/// The peer rules of both devices apply to local delivery.
#[test]
fn peers_apply_to_local_delivery_both_ways() {
    assert_eq!(meet(own(), own()), (true, [0, 0]));
    assert_eq!(meet(peers("10.0.0.2"), peers("10.0.0.0/24 fd00::/8")), (true, [0, 0]));
    for (left, right) in [(peers("10.0.0.3"), own()), (own(), peers("10.0.1.0/24")), (own(), peers("fe80::/10"))] {
        let (met, [ours, theirs]) = meet(left, right);
        assert!(!met && ours == 3 && theirs == 0, "{ours} {theirs}");
    }
    let network = peers("10.0.0.0/8").with_network_peers(peers("10.1.0.0/16").peers);
    assert!(!meet(network, own()).0);
}

#[test]
fn peers_apply_to_the_wire_both_ways() {
    for (allowed, rules) in [(true, peers("10.0.0.0/24")), (false, peers("10.0.0.3"))] {
        let world = World::new();
        let (ours, cable) = memory::pair(99).unwrap();
        let _station = plug(&world.rxe, 1, ours, PortRules::default());
        let node = world.ruled(1, rules);
        bind(&node.hca, 0, gid(1)).unwrap();
        world.settle();
        taken(&cable);
        let end = node.qp(QpType::Rc);
        end.connect(&end, |a| {
            (a.av.dgid, a.av.dmac) = (gid(2), mac(2));
            (a.timeout, a.retry_cnt) = (1, 1);
        });
        end.recv(1, &[]);
        give(&cable, &request());
        world.rxe.run_ready();
        assert_eq!((end.rcq.poll().len() == 1, node.counter("wire_dropped_peer")), (allowed, u64::from(!allowed)));
        assert_eq!(taken(&cable).len(), usize::from(allowed));
        end.send(1, &[]);
        let manager = node.qp(QpType::Gsi);
        manager.start_datagrams(QKEY);
        manager.submit(1, to(2, manager.qp.qpn()), &[]);
        world.rxe.run_ready();
        assert_eq!(taken(&cable).len(), if allowed { 2 } else { 0 });
        assert_eq!(manager.scq.one().status, WcStatus::Success, "a datagram that no device receives");
        world.settle();
        assert_eq!(end.scq.one().status, WcStatus::RetryExceeded);
        // The datagram, and the connection's request with one retry.
        assert_eq!(node.counter("peers_refused"), if allowed { 0 } else { 3 });
    }
}

/// Loopback is allowed whatever the peer rules of the device are.
#[test]
fn peers_do_not_keep_a_device_from_itself() {
    let world = World::new();
    let node = world.ruled(1, peers("10.9.9.9"));
    bind(&node.hca, 0, gid(1)).unwrap();
    let end = node.qp(QpType::Rc);
    end.connect(&end, |_| {});
    end.recv(1, &[]);
    end.send(1, &[]);
    assert_eq!((end.scq.one().status, end.rcq.poll().len()), (WcStatus::Success, 1));
}

/// Two devices of one process on a switch whose uplink is a cable that reflects all frames.
fn reflected(local: bool) -> (World, [Node; 2], MemoryLink, Vec<RxeStation>) {
    use pvrdma_link::switch::{Switch, UnknownUnicast};
    let world = World::with(|config| config.local = local);
    let (uplink, cable) = memory::pair(1000).unwrap();
    let switch = Switch::hairpin_without_thread(Arc::new(uplink), 4500, Arc::clone(&world.clock) as _).unwrap();
    let ports = [1, 3].map(|number| switch.port(mac(number), UnknownUnicast::Drop).unwrap());
    let config = |port| PortConfig::new(port, 4500);
    let [first, second] = ports;
    let uplinks = vec![plug_in(&world.rxe, 1, config(first)), plug_in(&world.rxe, 3, config(second))];
    let nodes = [1, 3].map(|number| {
        let node = world.ruled(number, own());
        bind(&node.hca, 0, gid(number)).unwrap();
        node
    });
    SWITCH.set(Some(switch));
    (world, nodes, cable, uplinks)
}

thread_local! {
    static SWITCH: std::cell::RefCell<Option<pvrdma_link::switch::Switch>> = const { std::cell::RefCell::new(None) };
}

/// Reflects the frames on the cable, unless `passes` is unset. Returns their number.
fn reflect(rxe: &Rxe, cable: &MemoryLink, passes: bool) -> usize {
    let mut count = 0;
    loop {
        rxe.run_ready();
        let frames = taken(cable);
        if frames.is_empty() {
            return count;
        }
        count += frames.len();
        if passes {
            frames.iter().for_each(|frame| give(cable, frame));
        }
        SWITCH.with_borrow(|switch| while switch.as_ref().unwrap().service() {});
    }
}

/// With `local=off`, traffic between devices crosses the uplink, where a filter can stop it.
#[test]
fn without_local_delivery_everything_crosses_the_uplink() {
    for (local, passes) in [(true, true), (false, true), (false, false)] {
        let (world, [a, b], cable, _uplinks) = reflected(local);
        let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        left.connect(&right, |a| (a.timeout, a.retry_cnt) = (1, 1));
        right.connect(&left, |_| {});
        let (mine, theirs) = (a.buffer(20_000), b.buffer(20_000));
        mine.write(0, &pattern(1, 20_000));
        left.submit(1, write(theirs.remote(0)), &[mine.all()]);
        let (manager, receiver) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
        for end in [&manager, &receiver] {
            end.start_datagrams(QKEY);
        }
        let inbox = b.buffer(200);
        receiver.recv(1, &[inbox.all()]);
        manager.submit(1, to(3, receiver.qp.qpn()), &[mine.sge(0, 64)]);
        let mut frames = reflect(&world.rxe, &cable, passes);
        while world.step() {
            frames += reflect(&world.rxe, &cable, passes);
        }
        assert_eq!(frames >= 21, !local, "{frames}");
        let status = if passes { WcStatus::Success } else { WcStatus::RetryExceeded };
        assert_eq!(left.scq.poll_statuses(), [(1, status)], "local {local}");
        assert_eq!(theirs.read(0, 20_000) == pattern(1, 20_000), passes);
        assert_eq!(receiver.rcq.poll().len(), usize::from(passes));
        // Traffic from a device to itself stays local.
        let alone = a.qp(QpType::Rc);
        alone.connect(&alone, |_| {});
        alone.submit(1, write(mine.remote(0)), &[mine.sge(0, 64)]);
        assert_eq!((alone.scq.one().status, reflect(&world.rxe, &cable, passes)), (WcStatus::Success, 0));
        // A host beyond the uplink cannot send in the device's name.
        let mut forged = Packet::parse(&request()).unwrap().header;
        let Network::V2Ipv4(ip, _) = &mut forged.network else { unreachable!() };
        ip.source = [10, 0, 0, 1];
        let forged = build(&forged, &[]).unwrap();
        let before = a.counter("wire_dropped_address");
        give(&cable, &forged);
        SWITCH.with_borrow(|switch| while switch.as_ref().unwrap().service() {});
        world.rxe.run_ready();
        assert_eq!(a.counter("wire_dropped_address"), before + 1);
    }
}
