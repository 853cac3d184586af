//! Announcements of a device whose frames have begun to leave at another place of the network, on virtual time.

use std::sync::Arc;
use std::time::Duration;

use pvrdma_link::Clock;
use pvrdma_link::memory::{self, MemoryLink};
use pvrdma_rxe::{PortConfig, PortRules, RxeStation, VlanMode};
use pvrdma_verbs::{Hca, PauseHca, SaveHca};
use pvrdma_verbs_types::GidType;

use crate::world::*;

/// Times of the announcements after the first one.
const REPEATED: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(1200)];

/// Returns the RARP frame by which switches learn the place of a MAC address.
fn station(number: u8, tag: &[u8]) -> Vec<u8> {
    let own = mac(number).0;
    packet(number, tag, [0x80, 0x35], &[&[0, 3][..], &own, &[0; 4], &own, &[0; 4]].concat())
}

/// Returns the ARP frame by which hosts learn the MAC address of a node's GID.
fn owner(number: u8, tag: &[u8]) -> Vec<u8> {
    let address = gid(number).ipv4().unwrap();
    packet(number, tag, [8, 6], &[&[0, 1][..], &mac(number).0, &address, &[0; 6], &address].concat())
}

fn packet(number: u8, tag: &[u8], kind: [u8; 2], body: &[u8]) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &mac(number).0, tag, &kind, &[0, 1, 8, 0, 6, 4], body].concat();
    frame.resize(60, 0);
    frame
}

/// Runs to the end. Returns the frames that left, with the time since the call.
fn observed(world: &World, cable: &MemoryLink) -> Vec<(Duration, Vec<u8>)> {
    let (start, mut all) = (world.clock.now(), Vec::new());
    loop {
        let elapsed = world.clock.now() - start;
        all.extend(taken(cable).into_iter().map(|frame| (elapsed, frame)));
        if !world.step() {
            return all;
        }
    }
}

/// Returns these frames at each of the times.
fn at(times: &[Duration], frames: &[Vec<u8>]) -> Vec<(Duration, Vec<u8>)> {
    times.iter().flat_map(|&time| frames.iter().map(move |frame| (time, frame.clone()))).collect()
}

fn plugged(world: &World, number: u8) -> (MemoryLink, RxeStation) {
    let (near, far) = memory::pair(99).unwrap();
    let station = plug(&world.rxe, number, near, PortRules::default());
    (far, station)
}

#[test]
fn a_device_is_announced_three_times_with_its_mac_address() {
    let (world, node, cable, _station) = exposed(99);
    let times = [Duration::ZERO, REPEATED[0], REPEATED[1]];
    // A fail-over announces all devices, the end of a migration the restored one.
    for announce in [&|| world.rxe.announce(), &|| node.hca.announce()] as [&dyn Fn(); 2] {
        announce();
        assert_eq!(observed(&world, &cable), at(&times, &[station(1, &[]), owner(1, &[])]));
    }
}

#[test]
fn a_device_without_a_driver_is_announced() {
    let world = World::new();
    let (cable, _station) = plugged(&world, 1);
    world.rxe.announce();
    assert_eq!(observed(&world, &cable).len(), 3);
}

#[test]
fn a_repetition_has_the_addresses_of_its_time() {
    let (world, node, cable, _station) = exposed(99);
    world.rxe.announce();
    taken(&cable);
    node.hca.unbind_gid(0);
    assert_eq!(observed(&world, &cable), at(&REPEATED, &[station(1, &[])]));
}

#[test]
fn another_announcement_starts_the_repetitions_anew() {
    let (world, _node, cable, _station) = exposed(99);
    world.rxe.announce();
    world.clock.advance(REPEATED[0] / 2);
    taken(&cable);
    world.rxe.announce();
    assert_eq!(observed(&world, &cable).len(), 6);
}

/// The machine may run on another host meanwhile, which announces it.
#[test]
fn a_paused_device_is_not_announced() {
    let (world, node, cable, _station) = exposed(99);
    world.rxe.announce();
    taken(&cable);
    assert!(node.hca.pause());
    world.clock.advance(REPEATED[0]);
    world.run();
    assert_eq!(taken(&cable), Vec::<Vec<u8>>::new());
    assert!(node.hca.resume());
    let later = REPEATED[1] - REPEATED[0];
    assert_eq!(observed(&world, &cable), at(&[later], &[station(1, &[]), owner(1, &[])]));
}

#[test]
fn an_unplugged_device_is_not_announced() {
    let (world, _node, _cable, station) = exposed(99);
    world.rxe.announce();
    assert!(world.next_deadline().is_some());
    station.unplug();
    assert_eq!(world.next_deadline(), None);
}

#[test]
fn a_device_is_announced_in_each_of_its_vlans() {
    let world = World::with(|config| config.vlan = VlanMode::Trunk);
    let (near, cable) = memory::pair(99).unwrap();
    let config = PortConfig::new(Arc::new(near), 1500);
    let _station = plug_in(&world.rxe, 1, config);
    let node = world.node(1);
    node.hca.bind_gid_in_vlan(1, gid(9), GidType::RoceV2, Some(7)).unwrap();
    observed(&world, &cable);
    world.rxe.announce();
    let tagged = [0x81, 0, 0, 7];
    let frames: Vec<_> = taken(&cable);
    assert_eq!(frames[..2], [station(1, &[]), station(1, &tagged)]);
    assert_eq!(frames.len(), 4);
}
