//! Tests of frames of the network function as they leave the uplink, with all offloads applied. The oracle checks them.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;

use proptest::prelude::*;
use pvrdma_link::{
    Frames, GsoLink, Link, Offload, memory,
    testing::{Attack, Broken, Rules, Tags, attacks, forge, store_anywhere},
};
use pvrdma_packet::MacAddr;

use super::policy::Policy;
use super::rules::{PortRules, VlanMode};
use super::stations::AddressUse;

const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// VLAN modes of ports, and the tags that the network must see.
const MODES: [(VlanMode, Tags); 3] =
    [(VlanMode::Untagged, Tags::Untagged), (VlanMode::Access(42), Tags::Access(42)), (VlanMode::Trunk, Tags::Trunk)];

/// Asserts that a frame with this offload obeys the rules of each network when it leaves. Returns the number of
/// networks in which it leaves.
fn leaves_well(frame: &[u8], offload: Offload) -> usize {
    let may = |used, _: Option<u16>, _: MacAddr| match used {
        AddressUse::Claim(gid) => gid == IpAddr::V4(OWN).into(),
        AddressUse::Probe(_) => true,
    };
    let mut count = 0;
    for (vlan, tags) in MODES {
        let policy = Policy { mac: MAC, vlan, rules: PortRules::default() };
        let (mut passed, mut left) = (Frames::default(), Frames::default());
        let judged = policy.outgoing((frame, offload), &mut passed, may);
        if policy.passes_as_it_is((frame, offload)) {
            assert_eq!((judged, passed.get(0), passed.offload(0)), (Ok(()), Some(frame), offload), "{vlan:?}");
        }
        let (near, far) = memory::pair(100).unwrap();
        assert_eq!(GsoLink::new(Arc::new(near)).send(&passed, 0), passed.len());
        far.receive(&mut left, 100);
        // A link loses no frame that the port passed.
        assert_eq!(passed.is_empty(), left.is_empty(), "{vlan:?}");
        let rules = Rules { sources: &[MAC.0], tags, roce: false, may_have: &|address, _| address == OWN };
        for part in left.iter() {
            assert_eq!(rules.check(part), Ok(()), "{vlan:?}: {frame:x?} left as {part:x?}");
        }
        count += usize::from(!passed.is_empty());
    }
    count
}

/// A guest cannot choose the place of a checksum, so frames leave with the bytes that were inspected.
#[test]
fn no_attack_leaves() {
    for Attack { name, frame, start, at, .. } in attacks(PEER, MAC.0, b"mark", [OWN, OTHER]) {
        assert_eq!(leaves_well(&frame, Offload::NONE), 3, "{name}: as it is");
        if let Some(offload) = Offload::checksum(&frame, start, at) {
            leaves_well(&frame, offload);
        }
    }
}

/// The oracle and the port agree about frames without offloads, which shows that neither lacks a whole rule.
#[test]
fn frames_that_the_oracle_refuses_do_not_leave() {
    for Attack { name, breaks, frame, start, at } in attacks(PEER, MAC.0, b"mark", [OWN, OTHER]) {
        let changed = store_anywhere(&frame, start.into(), at.into());
        // A trunk carries all VLANs.
        assert_eq!(leaves_well(&changed, Offload::NONE), usize::from(breaks == Broken::Vlan), "{name}");
    }
    assert_eq!(
        leaves_well(&[&PEER[..], &PEER, &[0x88, 0xb5], &[0; 46]].concat(), Offload::NONE),
        0,
        "of another station"
    );
}

fn tcp(tag: &[u8], data: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(40 + data.len()).unwrap().to_be_bytes();
    let ip = [0x45, 0, high, low, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 5, 10, 0, 0, 9];
    let header = [0x12, 0xb7, 0x12, 0xb7, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    [&PEER[..], &MAC.0, tag, &[8, 0], &ip, &header, data].concat()
}

#[test]
fn tcp_leaves_in_segments() {
    let mss = NonZeroU16::new(100).unwrap();
    for tag in [&[][..], &[0x81, 0, 0x60, 0]] {
        let frame = tcp(tag, &[7; 1000]);
        let shift = u16::try_from(tag.len()).unwrap();
        for offload in [Offload::segmentation(&frame, mss), Offload::checksum(&frame, 34 + shift, 50 + shift)] {
            assert_eq!(leaves_well(&frame, offload.unwrap()), 3);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Sends arbitrary frames with arbitrary offloads.
    #[test]
    fn every_frame_leaves_as_the_rules_say(
        kind in 0_usize..12, changes in prop::collection::vec((12_usize..80, any::<u8>()), 0..4), rule in 0_usize..8,
        data in prop::collection::vec(any::<u8>(), 1..80), places in any::<[u8; 2]>(), cuts in any::<bool>(),
    ) {
        let attacks = attacks(PEER, MAC.0, b"mark", [OWN, OTHER]);
        let [mut start, mut at] = places.map(|place| u16::from(place) % 80);
        let mut frame = match attacks.get(kind) {
            Some(attack) => {
                (start, at) = (attack.start, attack.at);
                attack.frame.clone()
            }
            None if kind % 2 == 0 => tcp(&[], &data),
            None => tcp(&[0x81, 0, 0, 0], &data),
        };
        for (place, value) in changes {
            if let Some(byte) = frame.get_mut(place) {
                *byte = value;
            }
        }
        if let Some(&value) = [666, 0x8100, 0x8915, 0x0806, 4791, 1].get(rule) {
            forge(&mut frame, start.into(), at.into(), value);
        }
        leaves_well(&frame, Offload::NONE);
        let header = if frame.get(12..14) == Some(&[0x81, 0]) { 38 } else { 34 };
        for (start, at) in [(start, at), (header, header + 6), (header, header + 16)] {
            if let Some(offload) = Offload::checksum(&frame, start, at) {
                leaves_well(&frame, offload);
            }
        }
        let mss = NonZeroU16::new(u16::from(places[0]) + 1).filter(|_| cuts);
        if let Some(offload) = mss.and_then(|mss| Offload::segmentation(&frame, mss)) {
            leaves_well(&frame, offload);
        }
    }
}
