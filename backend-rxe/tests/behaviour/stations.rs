//! ARP, RARP and neighbour discovery that a network function sends.

use std::sync::Arc;

use pvrdma_link::memory::{self, MemoryLink};
use pvrdma_rxe::{ForgedTransmits, PortConfig, PortRules, RxeStation, VlanMode};
use pvrdma_verbs::{Hca, link_local};
use pvrdma_verbs_types::GidType;

use crate::world::*;

/// A device with a network function on its port, and the far ends of both links.
struct Card {
    world: World,
    network: MemoryLink,
    guest: MemoryLink,
    node: Node,
    _station: RxeStation,
}

impl Card {
    fn new(vlan: VlanMode, forged: ForgedTransmits) -> Self {
        let world = World::with(|config| config.vlan = vlan);
        let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
        let rules = PortRules::default().with_forged(forged);
        let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
        let station = plug_in(&world.rxe, 1, config);
        let node = world.node(1);
        Self { world, network, guest, node, _station: station }
    }

    /// Returns `true` if a frame of the network function leaves.
    fn sends(&self, frame: &[u8]) -> bool {
        let dropped = self.node.counter("passed_dropped_address") + self.node.counter("passed_dropped_roce");
        give(&self.guest, frame);
        self.world.rxe.run_ready();
        let sent = taken(&self.network).len() == 1;
        let now = self.node.counter("passed_dropped_address") + self.node.counter("passed_dropped_roce");
        assert_eq!(now - dropped, u64::from(!sent), "each dropped frame is counted");
        sent
    }
}

/// A frame of the device.
fn frame(tags: &[u8], kind: u16, body: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &mac(1).0, tags, &kind.to_be_bytes(), body].concat()
}

/// An ARP body: hardware type, protocol, operation, sender.
fn arp(hardware: u16, protocol: u16, operation: u16, sender: (u8, [u8; 4]), target: (u8, [u8; 4])) -> Vec<u8> {
    let head = [hardware.to_be_bytes(), protocol.to_be_bytes(), [6, 4], operation.to_be_bytes()].concat();
    [&head, &mac(sender.0).0[..], &sender.1, &mac(target.0).0, &target.1, &[0; 18]].concat()
}

/// An IPv6 packet with these headers, each given with its own number.
fn v6(source: [u8; 16], headers: &[(u8, &[u8])]) -> Vec<u8> {
    let mut body = vec![0; 40];
    (body[0], body[6], body[7]) = (0x60, headers[0].0, 255);
    body[8..24].copy_from_slice(&source);
    body[24..40].copy_from_slice(&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    for (at, (_, bytes)) in headers.iter().enumerate() {
        let mut bytes = bytes.to_vec();
        if let Some((next, _)) = headers.get(at + 1) {
            bytes[0] = *next;
        }
        body.extend(bytes);
    }
    let length = u16::try_from(body.len() - 40).unwrap();
    body[4..6].copy_from_slice(&length.to_be_bytes());
    body
}

/// A neighbour discovery message with this many bytes before its options.
fn message(kind: u8, target: Option<[u8; 16]>, fixed: usize, options: &[&[u8]]) -> Vec<u8> {
    let mut message = vec![0; fixed];
    message[0] = kind;
    if let Some(target) = target {
        message[8..24].copy_from_slice(&target);
    }
    [&message[..], &options.concat()].concat()
}

/// The option with a link-layer address.
fn layer2(kind: u8, number: u8) -> Vec<u8> {
    [&[kind, 1][..], &mac(number).0].concat()
}

const OWN: [u8; 4] = [10, 0, 0, 1];
const NONE: [u8; 4] = [0; 4];

#[test]
fn arp_that_cannot_be_parsed_is_dropped() {
    let card = Card::new(VlanMode::Untagged, ForgedTransmits::Off);
    let own = |hardware, protocol, operation| arp(hardware, protocol, operation, (1, OWN), (0, [10, 0, 0, 9]));
    // Requests, replies, announcements, probes.
    for body in [
        own(1, 0x800, 1),
        own(1, 0x800, 2),
        arp(1, 0x800, 1, (1, OWN), (0, OWN)),
        arp(1, 0x800, 2, (1, OWN), (1, OWN)),
        arp(1, 0x800, 1, (1, NONE), (0, OWN)),
    ] {
        assert!(card.sends(&frame(&[], 0x806, &body)), "{body:?}");
        assert!(card.sends(&frame(&[0x81, 0, 0x60, 0], 0x806, &body)), "with a priority");
    }
    // Linux accepts hardware type 6 (IEEE 802) as Ethernet. Receivers may differ on other types, protocols, lengths and
    // operations, so these are dropped.
    let (mut long, mut short) = (own(1, 0x800, 2), own(1, 0x800, 2));
    (long[4], short[5]) = (8, 3);
    for body in [
        own(6, 0x800, 2),
        own(6, 0x800, 1),
        own(24, 0x800, 2),
        own(1, 0x806, 2),
        own(1, 0x800, 0),
        own(1, 0x800, 3),
        own(1, 0x800, 8),
        own(1, 0x800, 9),
        own(0x100, 0x800, 2),
        long,
        short,
    ] {
        assert!(!card.sends(&frame(&[], 0x806, &body)), "{body:?}");
        assert!(!card.sends(&frame(&[0x81, 0, 0x60, 0], 0x806, &body)), "with a priority");
    }
    let whole = frame(&[], 0x806, &own(1, 0x800, 2));
    assert!((14..42).all(|length| !card.sends(&whole[..length])), "too short for a packet");
    // The same packet in a frame of IEEE 802.3 with a SNAP header (RFC 1042).
    let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 6][..], &own(1, 0x800, 2)].concat();
    assert!(!card.sends(&frame(&[], u16::try_from(snap.len()).unwrap(), &snap)));
}

#[test]
fn rarp_announces_the_own_station_alone() {
    let card = Card::new(VlanMode::Untagged, ForgedTransmits::Off);
    // The announcement that VMMs send when a machine has moved.
    assert!(card.sends(&frame(&[], 0x8035, &arp(1, 0x800, 3, (1, NONE), (1, NONE)))));
    for body in [
        arp(1, 0x800, 3, (9, NONE), (9, NONE)),
        arp(1, 0x800, 3, (1, NONE), (9, NONE)),
        arp(1, 0x800, 4, (1, NONE), (1, OWN)),
        arp(1, 0x800, 3, (1, OWN), (1, NONE)),
        arp(6, 0x800, 3, (1, NONE), (1, NONE)),
    ] {
        assert!(!card.sends(&frame(&[], 0x8035, &body)), "{body:?}");
    }
}

#[test]
fn a_hardware_address_in_the_body_is_that_of_the_device() {
    for (forged, passes) in [(ForgedTransmits::Off, false), (ForgedTransmits::Mac, true)] {
        let card = Card::new(VlanMode::Untagged, forged);
        let own = link_local(mac(1)).0;
        for (operation, sender, passes) in [(1, OWN, passes), (2, OWN, passes), (1, NONE, passes), (2, NONE, passes)] {
            let body = |number| arp(1, 0x800, operation, (number, sender), (0, OWN));
            assert!(card.sends(&frame(&[], 0x806, &body(1))));
            assert_eq!(card.sends(&frame(&[], 0x806, &body(9))), passes, "{forged:?} {operation} {sender:?}");
        }
        let bodies = |number| {
            [
                message(133, None, 8, &[&layer2(1, number)]),
                message(134, None, 16, &[&layer2(1, number)]),
                message(135, Some(own), 24, &[&layer2(1, number)]),
                message(136, Some(own), 24, &[&layer2(2, number)]),
                message(137, Some(own), 40, &[&layer2(2, number)]),
                // Behind another option.
                message(135, Some(own), 24, &[&[14, 1, 1, 2, 3, 4, 5, 6], &layer2(1, number)]),
            ]
        };
        for (mine, other) in bodies(1).iter().zip(bodies(9)) {
            assert!(card.sends(&frame(&[], 0x86dd, &v6(own, &[(58, mine)]))), "{mine:?}");
            assert_eq!(card.sends(&frame(&[], 0x86dd, &v6(own, &[(58, &other)]))), passes, "{other:?}");
        }
    }
}

const OPTIONS: &[u8] = &[0; 8];
const ATOMIC_FRAGMENT: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 7];
const FIRST_FRAGMENT: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 7];

#[test]
fn neighbour_discovery_that_cannot_be_parsed_is_dropped() {
    for forged in [ForgedTransmits::Off, ForgedTransmits::Roce] {
        let card = Card::new(VlanMode::Untagged, forged);
        let own = link_local(mac(1)).0;
        let good = message(136, Some(own), 24, &[&layer2(2, 1)]);
        let sends = |headers: &[(u8, &[u8])]| card.sends(&frame(&[], 0x86dd, &v6(own, headers)));
        assert!(sends(&[(58, &good)]));
        assert!(sends(&[(0, OPTIONS), (60, OPTIONS), (58, &good)]), "behind other headers");
        // Duplicate address detection uses the unspecified source address.
        let probe = message(135, Some(own), 24, &[]);
        assert!(card.sends(&frame(&[], 0x86dd, &v6([0; 16], &[(58, &probe)]))));
        for fragment in [ATOMIC_FRAGMENT, FIRST_FRAGMENT] {
            assert!(!sends(&[(44, fragment), (58, &good)]), "in fragments (RFC 6980)");
            assert!(!sends(&[(44, fragment), (60, OPTIONS), (58, &good)]));
        }
        assert!(!sends(&[(44, FIRST_FRAGMENT), (60, OPTIONS)]), "the rest may be in the next fragment (RFC 7112)");
        assert!(!sends(&[(60, OPTIONS); 9]), "too many headers to look behind");
        assert!(!sends(&[(58, &message(136, Some(own), 24, &[&layer2(2, 1), &layer2(2, 9)]))]), "two addresses");
        assert!(!sends(&[(58, &message(136, Some(own), 24, &[&[2, 0, 0, 0, 0, 0, 0, 0]]))]), "an option of no length");
        assert!(!sends(&[(58, &message(136, Some(own), 24, &[&[14, 2, 0, 0, 0, 0, 0, 0]]))]), "a truncated message");
        assert!(!sends(&[(58, &message(136, Some(own), 24, &[&[2, 2], &[0; 14]]))]), "an address of 14 bytes");
        for (kind, fixed) in [(133, 8), (134, 16), (135, 24), (136, 24), (137, 40)] {
            let whole = message(kind, None, fixed, &[]);
            assert!((1..fixed).all(|length| !sends(&[(58, &whole[..length])])), "too short");
            let mut code = whole.clone();
            code[1] = 1;
            assert!(!sends(&[(58, &code)]), "no such code");
        }
        let mut routed = frame(&[], 0x86dd, &v6(own, &[(58, &good)]));
        routed[14 + 7] = 64;
        assert!(!card.sends(&routed), "from beyond a router");
        let whole = frame(&[], 0x86dd, &v6(own, &[(58, &good)]));
        assert!(!card.sends(&whole[..whole.len() - 8]), "shorter than it says");
        // Bytes behind the packet do not matter, unless the receiver takes them for a part of it.
        let mut longer = whole.clone();
        longer.extend(layer2(2, 9));
        assert!(card.sends(&longer), "padding");
        let echo = message(128, None, 8, &[]);
        assert!(sends(&[(58, &echo)]), "no neighbour discovery");
    }
}

#[test]
fn a_redirect_announces_its_target() {
    let card = Card::new(VlanMode::Untagged, ForgedTransmits::Off);
    let (own, other) = (link_local(mac(1)).0, link_local(mac(3)).0);
    let _other = card.world.ruled(3, pvrdma_verbs::Rules::default());
    let redirect = |target, options: &[&[u8]]| {
        let message = message(137, Some(target), 40, options);
        card.sends(&frame(&[], 0x86dd, &v6(own, &[(58, &message)])))
    };
    assert!(redirect(own, &[&layer2(2, 1)]) && redirect(other, &[]));
    assert!(!redirect(other, &[&layer2(2, 1)]), "a receiver would store the target's address");
}

#[test]
fn tags_hide_no_station() {
    let card = Card::new(VlanMode::Trunk, ForgedTransmits::Off);
    let forged = arp(6, 0x800, 2, (9, OWN), (0, NONE));
    for tags in [&[0x81, 0, 0, 5][..], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6], &[0x81, 0, 0, 5].repeat(9)] {
        assert!(!card.sends(&frame(tags, 0x806, &forged)));
    }
    let card = Card::new(VlanMode::Access(7), ForgedTransmits::Off);
    assert!(!card.sends(&frame(&[], 0x806, &forged)));
    assert!(card.sends(&frame(&[], 0x806, &arp(1, 0x800, 2, (1, OWN), (0, NONE)))));
}

/// Hosts take a tag behind that of a priority for the VLAN of a frame. Switches remove the outer one of two tags.
#[test]
fn an_address_is_checked_in_each_vlan_that_a_frame_may_reach() {
    let card = Card::new(VlanMode::Trunk, ForgedTransmits::Off);
    let other = card.world.node(3);
    other.hca.bind_gid_in_vlan(1, gid(9), GidType::RoceV2, Some(5)).unwrap();
    let claim = arp(1, 0x800, 2, (1, gid(9).ipv4().unwrap()), (0, NONE));
    let (priority, five, seven) = ([0x81, 0, 0xe0, 0], [0x81, 0, 0, 5], [0x81, 0, 0, 7]);
    let (service_five, old_five) = ([0x88, 0xa8, 0, 5], [0x91, 0, 0, 5]);
    for tags in [&[][..], &[priority], &[seven], &[priority, seven], &[priority, priority]] {
        assert!(card.sends(&frame(&tags.concat(), 0x806, &claim)), "{tags:x?}");
    }
    for tags in [
        &[five][..],
        &[service_five],
        &[old_five],
        &[priority, five],
        &[priority, priority, five],
        &[priority, service_five],
        &[seven, five],
        &[five, seven],
    ] {
        assert!(!card.sends(&frame(&tags.concat(), 0x806, &claim)), "{tags:x?}");
    }
}
