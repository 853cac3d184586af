//! Frames that a network function may send when the addresses of its device are listed, and RoCE to the guest's other
//! Ethernet addresses.

use std::net::IpAddr;
use std::sync::Arc;

use pvrdma_link::memory::{self, MemoryLink};
use pvrdma_rxe::{ForgedTransmits, PortConfig, PortRules, RxeStation, VlanMode};
use pvrdma_verbs::{AddressRule, Hca, OtherAddresses, link_local};
use pvrdma_verbs_types::QpType;

use crate::world::*;

struct Card {
    world: World,
    network: MemoryLink,
    guest: MemoryLink,
    node: Node,
    _station: RxeStation,
}

fn card(vlan: VlanMode, rules: PortRules) -> Card {
    let world = World::with(|config| config.vlan = vlan);
    let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
    let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
    let station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    Card { world, network, guest, node, _station: station }
}

/// The rules that the daemon derives from `address=10.0.0.5,address=fd00::5`.
fn listed() -> PortRules {
    let listed = ["10.0.0.5", "fd00::5"].map(|address| address.parse().unwrap()).to_vec();
    let addresses = Some(AddressRule { others: OtherAddresses::Refuse, listed });
    PortRules::default().with_addresses(addresses).with_source_guard(true).with_ra_guard(true).with_dhcp_guard(true)
}

impl Card {
    /// Returns `true` if the frame leaves. Otherwise the counter `dropped` must have increased.
    fn sends(&self, frame: &[u8], dropped: &str) -> bool {
        let before = self.node.counter(dropped);
        give(&self.guest, frame);
        self.world.rxe.run_ready();
        let sent = taken(&self.network).len() == 1;
        assert_eq!(self.node.counter(dropped) - before, u64::from(!sent), "{dropped}");
        sent
    }
}

fn frame(tag: &[u8], kind: u16, body: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &mac(1).0, tag, &kind.to_be_bytes(), body].concat()
}

/// A UDP packet from this source and port, with these flags and fragment offset of IPv4.
fn v4(source: &str, fragment: [u8; 2], port: u16) -> Vec<u8> {
    let IpAddr::V4(source) = source.parse().unwrap() else { unreachable!() };
    let header = [&[0x45, 0, 0, 28, 0, 0], &fragment[..], &[64, 17, 0, 0], &source.octets(), &[10, 0, 0, 9]].concat();
    [&header[..], &port.to_be_bytes(), &[0, 99, 0, 8, 0, 0]].concat()
}

fn v6(source: [u8; 16], headers: &[u8], first: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(headers.len() + payload.len()).unwrap().to_be_bytes();
    let head = [&[0x60, 0, 0, 0], &length[..], &[first, 255], &source, &[0xff; 16]].concat();
    [&head[..], headers, payload].concat()
}

fn address(text: &str) -> [u8; 16] {
    let IpAddr::V6(address) = text.parse().unwrap() else { unreachable!() };
    address.octets()
}

fn udp(port: u16) -> Vec<u8> {
    [&port.to_be_bytes()[..], &[0, 99, 0, 8, 0, 0]].concat()
}

#[test]
fn a_list_of_addresses_holds_for_the_source_of_ip_packets() {
    for (vlan, tags) in [(VlanMode::Untagged, &[][..]), (VlanMode::Access(7), &[]), (VlanMode::Trunk, &[0x81, 0, 0, 5])]
    {
        let card = card(vlan, listed());
        let sends = |kind, body: &[u8]| card.sends(&frame(tags, kind, body), "passed_dropped_source");
        for source in ["10.0.0.5", "0.0.0.0"] {
            assert!(sends(0x800, &v4(source, [0, 0], 1000)), "{source}");
        }
        for source in ["10.0.0.6", "127.0.0.1", "255.255.255.255"] {
            assert!(!sends(0x800, &v4(source, [0, 0], 1000)), "{source}");
            assert!(!sends(0x800, &v4(source, [0x20, 1], 1000)), "later fragments");
        }
        assert!(!sends(0x800, &v4("10.0.0.5", [0, 0], 1000)[..19]), "too short for its source");
        for source in [address("fd00::5"), address("::"), link_local(mac(1)).0] {
            assert!(sends(0x86dd, &v6(source, &[], 17, &udp(1000))), "{source:?}");
        }
        for source in [address("fd00::6"), link_local(mac(2)).0, address("::ffff:10.0.0.5")] {
            assert!(!sends(0x86dd, &v6(source, &[], 17, &udp(1000))), "{source:?}");
            assert!(!sends(0x86dd, &v6(source, &[], 59, &[])), "{source:?}");
        }
        assert!(!sends(0x86dd, &v6(address("fd00::5"), &[], 59, &[])[..23]));
        assert!(sends(0x88b5, &[7; 40]), "no IP");
    }
}

#[test]
fn servers_do_not_answer_where_addresses_are_listed() {
    let own = link_local(mac(1)).0;
    let advertisement = [&[134, 0, 0, 0][..], &[0; 12]].concat();
    let options: &[u8] = &[17, 0, 0, 0, 0, 0, 0, 0];
    let offers = [
        frame(&[], 0x800, &v4("10.0.0.5", [0, 0], 67)),
        frame(&[], 0x800, &v4("10.0.0.5", [0x20, 0], 67)),
        frame(&[0x81, 0, 0x60, 0], 0x800, &v4("10.0.0.5", [0, 0], 67)),
        frame(&[], 0x86dd, &v6(own, &[], 17, &udp(547))),
        frame(&[], 0x86dd, &v6(own, options, 60, &udp(547))),
        frame(&[], 0x86dd, &v6(own, &[], 58, &advertisement)),
    ];
    let clients = [
        frame(&[], 0x800, &v4("0.0.0.0", [0, 0], 68)),
        frame(&[], 0x86dd, &v6(own, &[], 17, &udp(546))),
        frame(&[], 0x86dd, &v6(own, &[], 58, &[133, 0, 0, 0, 0, 0, 0, 0])),
    ];
    let guarded = card(VlanMode::Untagged, listed());
    assert!(offers.iter().all(|frame| !guarded.sends(frame, "passed_dropped_server")));
    assert!(clients.iter().all(|frame| guarded.sends(frame, "passed_dropped_server")));
    // Rules for a guest that is a router, for one that is a DHCP server, and for one without listed addresses.
    let count = |rules| {
        let card = card(VlanMode::Untagged, rules);
        offers.each_ref().map(|frame| card.sends(frame, "passed_dropped_server"))
    };
    let not = false;
    assert_eq!(count(listed().with_ra_guard(false)), [not, not, not, not, not, true]);
    assert_eq!(count(listed().with_dhcp_guard(false)), [true, true, true, true, true, not]);
    assert_eq!(count(PortRules::default()), [true; 6]);
}

/// DHCP clients accept what arrives at their port, whatever its source port (those that read raw packets do).
#[test]
fn packets_to_dhcp_clients_come_from_servers() {
    let own = link_local(mac(1)).0;
    let to = |port: u16| [&[0x13, 0x88][..], &port.to_be_bytes(), &[0, 8, 0, 0]].concat();
    let v4_to = |port: u16| {
        let mut body = v4("10.0.0.5", [0, 0], 5000);
        body[22..24].copy_from_slice(&port.to_be_bytes());
        frame(&[], 0x800, &body)
    };
    let v6_to = |port| frame(&[], 0x86dd, &v6(own, &[], 17, &to(port)));
    let guarded = card(VlanMode::Untagged, listed());
    let trusted = card(VlanMode::Untagged, listed().with_dhcp_guard(false));
    for offer in [v4_to(68), v6_to(546)] {
        assert!(!guarded.sends(&offer, "passed_dropped_server"));
        assert!(trusted.sends(&offer, "passed_dropped_server"));
    }
    for request in [v4_to(67), v6_to(547), v4_to(546), v6_to(68)] {
        assert!(guarded.sends(&request, "passed_dropped_server"));
    }
}

/// A switch takes such frames for those of its neighbour, which is the host: they stop or block the port of all guests.
#[test]
fn control_frames_of_the_link_do_not_leave() {
    let to = |destination: [u8; 6], kind: u16, body: &[u8]| {
        [&destination[..], &mac(1).0, &kind.to_be_bytes(), body, &[0; 44]].concat()
    };
    let reserved = |last| [1, 0x80, 0xc2, 0, 0, last];
    let pauses: [Vec<u8>; 3] = [
        to(reserved(1), 0x8808, &[0, 1, 0xff, 0xff]),
        // Priority flow control for all priorities, to the switch and to its own address.
        to(reserved(1), 0x8808, &[1, 1, 0, 0xff, 0xff, 0xff]),
        to([2, 9, 9, 9, 9, 9], 0x8808, &[1, 1, 0, 0xff, 0xff, 0xff]),
    ];
    let bridges = [
        to(reserved(0), 38, &[0x42, 0x42, 3, 0, 0, 0]),
        to(reserved(2), 0x8809, &[1]),
        to(reserved(3), 0x888e, &[1]),
        to(reserved(14), 0x88cc, &[2]),
        to(reserved(15), 0x88b5, &[]),
        to([1, 0, 12, 0xcc, 0xcc, 0xcc], 40, &[0xaa, 0xaa, 3, 0, 0, 12, 0x20, 0]),
        to([1, 0, 12, 0xcc, 0xcc, 0xcd], 50, &[0xaa, 0xaa, 3, 0, 0, 12, 1, 11]),
    ];
    let others = [
        to(reserved(16), 0x88b5, &[]),
        to([1, 0x80, 0xc2, 0, 1, 0], 0x88b5, &[]),
        to([1, 0, 0x5e, 0, 0, 1], 0x88b5, &[]),
        to([1, 0, 12, 0xcc, 0xcc, 0xce], 0x88b5, &[]),
    ];
    for vlan in [VlanMode::Untagged, VlanMode::Access(7), VlanMode::Trunk] {
        for (forged, bridge) in [(ForgedTransmits::Off, false), (ForgedTransmits::Mac, true)] {
            let card = card(vlan, PortRules::default().with_forged(forged));
            let sends = |frame: &Vec<u8>| card.sends(frame, "passed_dropped_control");
            assert_eq!(pauses.each_ref().map(sends), [false; 3]);
            assert_eq!(bridges.each_ref().map(sends), [bridge; 7]);
            assert_eq!(others.each_ref().map(sends), [true; 4]);
        }
    }
    let card = card(VlanMode::Trunk, PortRules::default());
    let mut tagged = pauses[2].clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    assert!(!card.sends(&tagged, "passed_dropped_control"));
}

/// A guest that changes the MAC address of its interface, or uses a macvlan or a bond, has its IP addresses at another
/// MAC address. RoCE to that address is delivered to the device, or counted if the rules forbid the address.
#[test]
fn roce_to_another_ethernet_address_of_the_guest() {
    let other = [2, 7, 7, 7, 7, 7];
    for (forged, taken_by_device) in [
        (ForgedTransmits::Off, false),
        (ForgedTransmits::Roce, false),
        (ForgedTransmits::Mac, true),
        (ForgedTransmits::All, true),
    ] {
        let card = card(VlanMode::Untagged, PortRules::default().with_forged(forged));
        let end = card.node.qp(QpType::Rc);
        connect_to_test(&end);
        end.recv(1, &[]);
        let mut frame = request();
        frame[..6].copy_from_slice(&other);
        give(&card.network, &frame);
        card.world.rxe.run_ready();
        assert_eq!(end.rcq.poll().len(), usize::from(taken_by_device), "{forged:?}");
        assert_eq!(
            card.node.counter("wire_foreign_mac"),
            u64::from(!taken_by_device),
            "the frame is counted as one for a foreign MAC address"
        );
        assert_eq!(taken(&card.guest).len(), usize::from(!taken_by_device));
        // A packet to an address that the device has not bound is not for the device, but for a machine behind the
        // guest's bridge.
        card.node.hca.unbind_gid(0);
        give(&card.network, &frame);
        card.world.rxe.run_ready();
        assert_eq!(taken(&card.guest), [frame.as_slice()]);
        assert_eq!(card.node.counter("wire_foreign_mac"), u64::from(!taken_by_device));
    }
}
