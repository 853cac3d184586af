//! Addresses that a guest binds or announces and that may belong to another host: `docs/dev/addresses.md`.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::memory::{self, MemoryLink};
use pvrdma_rxe::faults::{DeviceEffect, DeviceFaults};
use pvrdma_rxe::{AddressConflict, PortConfig, PortRules, RxeHca, RxeStation};
use pvrdma_verbs::{AddressRule, Hca, OtherAddresses, PauseHca, Rules, SaveHca, VerbsError, link_local};
use pvrdma_verbs_types::{Gid, GidType, QpType, Qpn, SendData, SendOp, UdDestination, WcStatus};

use crate::world::*;

const QKEY: u32 = 0x1234;
const HOLD: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(1);

/// Creates a device with a network function on its port. Returns the far ends of both links, too.
fn with_card(world: &World, number: u8) -> (MemoryLink, MemoryLink, RxeStation) {
    let ((uplink, network), (nic, guest)) = (memory::pair(99).unwrap(), memory::pair(99).unwrap());
    let rules = PortRules::default();
    let config = PortConfig::new(Arc::new(uplink), 1500).with_nic(Some(Arc::new(nic))).with_rules(rules);
    (network, guest, plug_in(&world.rxe, number, config))
}

fn bind(hca: &RxeHca, index: u8, address: Gid) {
    hca.bind_gid(index, address, GidType::RoceV2).unwrap();
}

/// An ARP packet in which the host of this number announces an address.
fn arp(source: u8, address: Gid) -> Vec<u8> {
    let head = [&[0xff; 6][..], &mac(source).0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac(source).0].concat();
    [&head[..], &address.ipv4().unwrap(), &[0; 10], &[0; 18]].concat()
}

/// Returns the addresses that the frames probe, by ARP or neighbour solicitation.
fn asked(frames: &[Vec<u8>]) -> Vec<Gid> {
    let target = |frame: &Vec<u8>| match frame[12..14] {
        [8, 6] if frame[20..22] == [0, 1] && frame[28..32] == [0; 4] => {
            Some(std::net::IpAddr::from(<[u8; 4]>::try_from(&frame[38..42]).unwrap()).into())
        }
        [0x86, 0xdd] if frame[54] == 135 => Some(Gid(frame[62..78].try_into().unwrap())),
        _ => None,
    };
    frames.iter().filter_map(target).collect()
}

/// Returns `true` if the device may use an address.
pub(crate) fn has(node: &Node, address: Gid) -> bool {
    let gids = node.hca.inspect();
    gids["gids"].as_array().unwrap().iter().any(|bound| bound["gid"] == serde_json::json!(address))
}

/// Returns the reasons why bound addresses are not usable yet.
pub(crate) fn waits(node: &Node) -> Vec<String> {
    let waiting = node.hca.inspect();
    let waiting = waiting["waiting_gids"].as_array().unwrap();
    waiting.iter().map(|waiting| waiting["why"].as_str().unwrap().to_owned()).collect()
}

fn advance(world: &World, time: Duration) {
    let end = world.clock.now() + time;
    world.rxe.run_ready();
    while let Some(next) = world.next_deadline().filter(|next| *next <= end) {
        world.clock.advance(next.saturating_sub(world.clock.now()));
        world.rxe.run_ready();
    }
    world.clock.advance(end - world.clock.now());
    world.rxe.run_ready();
}

use pvrdma_link::Clock as _;

/// Saves the bound GIDs of a device and restores them in another one.
fn hand_over(from: &Node, to: &Node, gids: &[(u8, Gid)]) {
    assert!(from.hca.pause() && to.hca.pause());
    to.hca.restore_tables(&from.hca.save_tables().unwrap()).unwrap();
    for &(index, address) in gids {
        to.hca.restore_gid(index, address, GidType::RoceV2, None).unwrap();
    }
    assert!(to.hca.resume());
}

/// Attack: a guest binds the address of another device, which it does not get, and waits for a hand-over, after which
/// its device may be restored first.
#[test]
fn a_hand_over_gives_no_address_to_a_device_that_waits_for_it() {
    let (old, new) = (World::new(), World::new());
    for world in [&old, &new] {
        world.clock.advance(HOLD * 10);
    }
    let [[owner, thief], [next_owner, next_thief]] =
        [&old, &new].map(|world| [1, 3].map(|number| world.ruled(number, Rules::default())));
    bind(&owner.hca, 0, gid(9));
    bind(&thief.hca, 0, gid(3));
    bind(&thief.hca, 7, gid(9));
    assert_eq!((has(&owner, gid(9)), waits(&thief)), (true, vec!["taken".to_owned()]));
    hand_over(&thief, &next_thief, &[(0, gid(3)), (7, gid(9))]);
    assert!(has(&next_thief, gid(3)) && !has(&next_thief, gid(9)));
    // Another device that leaves wakes all that wait.
    drop(new.ruled(5, Rules::default()));
    new.rxe.run_ready();
    hand_over(&owner, &next_owner, &[(0, gid(9))]);
    advance(&new, HOLD * 2);
    assert_eq!((has(&next_owner, gid(9)), waits(&next_thief)), (true, vec!["taken".to_owned()]));
    // The guest gets the address when its owner has released it for a minute.
    next_owner.hca.unbind_gid(0);
    advance(&new, HOLD - PROBE);
    assert!(!has(&next_thief, gid(9)));
    advance(&new, PROBE);
    assert!(has(&next_thief, gid(9)));
    assert!(next_owner.hca.restore_tables(&[0x22, 2, 0x80, 2]).is_err(), "no such index");
}

/// Attack: a guest binds the address of a host beyond the uplink shortly before a hand-over.
#[test]
fn an_address_is_probed_for_after_a_hand_over_if_it_was_not_held_before() {
    for announced in [false, true] {
        let (old, new) = (World::new(), World::new());
        let [(network, _guest, _uplink), (_network, _other, _next)] = [&old, &new].map(|world| with_card(world, 1));
        let [device, next] = [&old, &new].map(|world| world.ruled(1, Rules::default()));
        if announced {
            give(&network, &arp(200, gid(9)));
            old.rxe.run_ready();
        }
        bind(&device.hca, 0, gid(9));
        assert_eq!(waits(&device), [if announced { "remote" } else { "probing" }]);
        hand_over(&device, &next, &[(0, gid(9))]);
        assert_eq!(waits(&next), [if announced { "taken" } else { "probing" }]);
        advance(&new, if announced { HOLD } else { Duration::ZERO });
        assert_eq!(waits(&next), ["probing"]);
        advance(&new, PROBE);
        assert!(has(&next, gid(9)));
    }
}

/// Attack: the gateway sends nothing for a minute, which happens when its neighbours refresh their entries by unicast.
/// A guest must not get its address in that time.
#[test]
fn a_host_that_is_silent_keeps_its_address() {
    let world = World::new();
    let (network, guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    let says = || {
        give(&guest, &arp(1, gid(9)));
        world.rxe.run_ready();
        taken(&network).contains(&arp(1, gid(9)))
    };
    give(&network, &arp(200, gid(9)));
    world.rxe.run_ready();
    assert!(!says(), "the host has just sent a packet");
    for _ in 0..5 {
        advance(&world, HOLD);
        assert!(!says(), "the host is probed first");
        bind(&device.hca, 0, gid(9));
        give(&network, &arp(200, gid(9)));
        world.rxe.run_ready();
        assert!(!says() && !has(&device, gid(9)), "the host has answered");
    }
    assert_eq!(waits(&device), ["remote"]);
    // Then the host is gone for good.
    advance(&world, HOLD);
    assert_eq!((has(&device, gid(9)), waits(&device)), (false, vec!["probing".to_owned()]));
    taken(&network);
    advance(&world, HOLD);
    let questions = asked(&taken(&network));
    assert!(questions.len() >= 10 && questions.iter().all(|asked| *asked == gid(9)), "{questions:?}");
    assert!(says() && has(&device, gid(9)));
    assert_eq!((device.counter("gids_granted"), device.counter("address_conflicts")), (1, 0));
}

#[test]
fn an_address_without_a_known_owner_is_probed_and_then_bound() {
    let world = World::new();
    let (network, guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    let mut v6 = [0xfd; 16];
    v6[15] = 7;
    for (index, address) in (0..).zip([gid(1), Gid(v6), link_local(mac(1))]) {
        bind(&device.hca, index, address);
    }
    assert!(has(&device, link_local(mac(1))), "no other device has it");
    assert_eq!(waits(&device), ["probing", "probing"]);
    advance(&world, PROBE - Duration::from_millis(1));
    let mut questions = asked(&taken(&network));
    questions.sort();
    assert_eq!(questions, [[gid(1); 3], [Gid(v6); 3]].concat());
    give(&guest, &arp(1, gid(1)));
    world.rxe.run_ready();
    assert!(taken(&network).is_empty() && !has(&device, gid(1)) && !has(&device, Gid(v6)));
    advance(&world, Duration::from_millis(1));
    assert!(has(&device, gid(1)) && has(&device, Gid(v6)) && waits(&device).is_empty());
    give(&guest, &arp(1, gid(1)));
    world.rxe.run_ready();
    assert_eq!(taken(&network).len(), 1);
    assert_eq!((device.counter("gids_refused"), device.counter("gids_waited")), (0, 0), "this is how a claim begins");
}

/// A VMM that asks for a device twice must not end the probes of the first one, whose addresses would wait forever.
#[test]
fn a_refused_port_leaves_the_probes_of_the_device_alone() {
    let world = World::new();
    let (network, _guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    let (again, _far) = memory::pair(9).unwrap();
    let config = PortConfig::new(Arc::new(again), 1500);
    assert!(matches!(world.rxe.station(mac(1)).plug(config), Err(VerbsError::InUse(_))));
    bind(&device.hca, 0, gid(1));
    assert_eq!(waits(&device), ["probing"]);
    advance(&world, PROBE);
    assert_eq!(asked(&taken(&network)), [gid(1); 3]);
    assert!(has(&device, gid(1)));
}

/// Requests during the probe wait for it, so that a program that connects at once does not use up its retries.
#[test]
fn requests_during_a_probe_wait_for_it() {
    let world = World::new();
    let (network, _guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    bind(&device.hca, 0, gid(1));
    let end = device.qp(QpType::Rc);
    end.connect(&end, |a| {
        (a.av.dgid, a.av.dmac) = (gid(2), mac(2));
        (a.timeout, a.retry_cnt) = (1, 1);
    });
    end.send(1, &[]);
    let manager = device.qp(QpType::Gsi);
    manager.start_datagrams(QKEY);
    let to = UdDestination { qpn: Qpn::new(1), qkey: QKEY, dgid: gid(2), dmac: mac(2), ..UdDestination::default() };
    manager.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[]);
    advance(&world, PROBE - Duration::from_millis(1));
    assert_eq!(asked(&taken(&network)).len(), 3);
    assert!(end.scq.poll().is_empty() && manager.scq.poll().is_empty());
    world.clock.advance(Duration::from_millis(1));
    world.rxe.run_ready();
    assert_eq!((taken(&network).len(), manager.scq.one().status), (2, WcStatus::Success));
    world.settle();
    assert_eq!(end.scq.one().status, WcStatus::RetryExceeded, "from now on the clock of the request runs");
}

#[test]
fn an_answer_keeps_the_address_from_the_guest() {
    let world = World::new();
    let (network, _guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    bind(&device.hca, 0, gid(1));
    let manager = device.qp(QpType::Gsi);
    manager.start_datagrams(QKEY);
    let to = UdDestination { qpn: Qpn::new(1), qkey: QKEY, dgid: gid(2), dmac: mac(2), ..UdDestination::default() };
    let send = || manager.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[]);
    send();
    let end = device.qp(QpType::Rc);
    end.connect(&end, |a| (a.timeout, a.retry_cnt) = (1, 1));
    end.send(1, &[]);
    give(&network, &arp(200, gid(1)));
    world.rxe.run_ready();
    assert_eq!((waits(&device), device.counter("gids_waited")), (vec!["remote".to_owned()], 1));
    taken(&network);
    // For the guest, held and later packets have been sent, but no peer answers.
    send();
    advance(&world, PROBE);
    assert_eq!(end.scq.one().status, WcStatus::RetryExceeded);
    assert_eq!(manager.scq.poll_statuses(), [(1, WcStatus::Success), (1, WcStatus::Success)]);
    assert!(taken(&network).is_empty());
    // Unbinding the address ends the probes.
    device.hca.unbind_gid(0);
    world.settle();
    assert!(asked(&taken(&network)).is_empty());
}

#[test]
fn a_conflict_is_reported_and_ends_the_claim() {
    let world = World::new();
    let told = Arc::<Mutex<Vec<AddressConflict>>>::default();
    let list = Arc::clone(&told);
    let former = world.station(1).observe_conflicts(|_| panic!("the observer was replaced"));
    let _observed = world.station(1).observe_conflicts(move |conflict| list.lock().push(*conflict));
    drop(former);
    let (network, guest, _station) = with_card(&world, 1);
    let listed = AddressRule { others: OtherAddresses::Own, listed: vec!["10.0.0.8".parse().unwrap()] };
    let device = world.ruled(1, Rules::default().with_addresses(listed));
    for (index, last) in [(0, 9), (1, 8)] {
        bind(&device.hca, index, gid(last));
    }
    advance(&world, PROBE);
    assert!(has(&device, gid(9)) && has(&device, gid(8)));
    taken(&network);
    for last in [9, 8] {
        give(&network, &arp(200, gid(last)));
    }
    world.rxe.run_ready();
    let conflict = |last, kept| AddressConflict { address: gid(last), vlan: None, kept };
    assert_eq!(*told.lock(), [conflict(9, false), conflict(8, true)]);
    assert_eq!(device.counter("address_conflicts"), 2);
    assert!(!has(&device, gid(9)) && has(&device, gid(8)), "a listed address stays bound");
    give(&guest, &arp(1, gid(9)));
    world.rxe.run_ready();
    assert!(taken(&network).is_empty());
    // RoCE packets reveal the owner of an address, too: this one is from 10.0.0.2.
    bind(&device.hca, 2, gid(1));
    bind(&device.hca, 3, gid(2));
    advance(&world, PROBE);
    assert!(has(&device, gid(2)));
    give(&network, &request());
    world.rxe.run_ready();
    assert!(!has(&device, gid(2)));
    assert_eq!(told.lock().last(), Some(&conflict(2, false)));
}

/// A guest's driver does not repeat a refused bind. So the bind of another guest's former address succeeds, and the
/// guest gets the address later.
#[test]
fn an_address_that_moves_to_another_guest_is_bound_there() {
    let world = World::new();
    let (former, next) = (world.ruled(1, Rules::default()), world.ruled(3, Rules::default()));
    bind(&former.hca, 0, gid(9));
    bind(&next.hca, 0, gid(9));
    assert_eq!((has(&next, gid(9)), waits(&next)), (false, vec!["taken".to_owned()]));
    assert_eq!((next.counter("gids_waited"), next.counter("gids_refused")), (1, 0));
    advance(&world, HOLD * 10);
    assert!(has(&former, gid(9)) && !has(&next, gid(9)));
    former.hca.unbind_gid(0);
    advance(&world, HOLD - Duration::from_millis(1));
    assert!(!has(&next, gid(9)), "a guest that restarts finds it again");
    advance(&world, Duration::from_millis(1));
    assert!(has(&next, gid(9)) && waits(&next).is_empty());
    assert_eq!(next.counter("gids_granted"), 1);
    let (a, b) = (former.qp(QpType::Rc), next.qp(QpType::Rc));
    bind(&former.hca, 0, gid(1));
    a.connect(&b, |attrs| attrs.av.dgid = gid(9));
    b.connect(&a, |attrs| attrs.av.dgid = gid(1));
    b.recv(1, &[]);
    a.send(1, &[]);
    assert_eq!(a.scq.one().status, WcStatus::Success);
}

#[test]
fn an_address_of_a_guest_that_is_gone_is_bound_by_the_next() {
    let world = World::new();
    let (former, next) = (world.ruled(1, Rules::default()), world.ruled(3, Rules::default()));
    bind(&former.hca, 0, gid(9));
    bind(&next.hca, 0, gid(9));
    drop(former);
    advance(&world, HOLD);
    assert!(has(&next, gid(9)));
}

#[test]
fn the_address_of_a_device_whose_link_is_down_is_free_after_a_minute() {
    let world = World::new();
    let (holder, next) = (world.ruled(1, Rules::default()), world.ruled(3, Rules::default()));
    bind(&holder.hca, 0, gid(9));
    bind(&next.hca, 0, gid(9));
    holder.hca.set_link(false).unwrap();
    advance(&world, HOLD - Duration::from_millis(1));
    holder.hca.set_link(true).unwrap();
    advance(&world, HOLD);
    assert!(has(&holder, gid(9)), "the link was not down for long enough");
    holder.hca.set_link(false).unwrap();
    advance(&world, HOLD);
    assert!(!has(&holder, gid(9)) && has(&next, gid(9)));
    assert_eq!(waits(&holder), ["link_down"]);
    // The former owner still has the address bound, and gets it back after the other guest.
    holder.hca.set_link(true).unwrap();
    advance(&world, HOLD);
    assert_eq!(waits(&holder), ["taken"]);
    next.hca.unbind_gid(0);
    advance(&world, HOLD);
    assert!(has(&holder, gid(9)));
}

#[test]
fn a_link_that_comes_back_brings_its_addresses_back() {
    let world = World::new();
    let (network, _guest, _station) = with_card(&world, 1);
    let device = world.ruled(1, Rules::default());
    bind(&device.hca, 0, gid(9));
    bind(&device.hca, 1, link_local(mac(1)));
    advance(&world, PROBE);
    device.hca.set_link(false).unwrap();
    advance(&world, HOLD * 2);
    taken(&network);
    assert!(!has(&device, gid(9)) && !has(&device, link_local(mac(1))));
    device.hca.set_link(true).unwrap();
    world.rxe.run_ready();
    assert!(!has(&device, gid(9)) && has(&device, link_local(mac(1))));
    advance(&world, PROBE);
    assert!(has(&device, gid(9)) && asked(&taken(&network)).len() == 3, "another host may have it by now");
}

/// Two guests list the same address, as in a cluster.
#[test]
fn an_address_that_both_list_moves_at_once() {
    let world = World::new();
    let listed = AddressRule { others: OtherAddresses::Own, listed: vec!["10.0.0.9".parse().unwrap()] };
    let rules = || Rules::default().with_addresses(listed.clone());
    let (former, next) = (world.ruled(1, rules()), world.ruled(3, rules()));
    bind(&former.hca, 0, gid(9));
    bind(&next.hca, 0, gid(9));
    assert!(!has(&next, gid(9)));
    former.hca.unbind_gid(0);
    world.rxe.run_ready();
    assert!(has(&next, gid(9)));
}

/// A guest's kernel adds an address at another index while a connection uses the old one. The connection continues with
/// the new index.
#[test]
fn a_connection_has_its_address_again_at_another_index() {
    let pair = Pair::new();
    let move_to = |node: &Node, from, to| {
        node.hca.unbind_gid(from);
        bind(&node.hca, to, gid(node.number));
    };
    for (round, (from, to)) in [(0, 4), (4, 7), (7, 0)].into_iter().enumerate() {
        for node in [&pair.a, &pair.b] {
            move_to(node, from, to);
            for (sender, receiver) in [(&pair.left, &pair.right), (&pair.right, &pair.left)] {
                receiver.recv(1, &[]);
                sender.send(1, &[]);
                pair.world.settle();
                let got = (sender.scq.poll_statuses(), receiver.rcq.poll_statuses());
                let expected = vec![(1, WcStatus::Success)];
                assert_eq!(got, (expected.clone(), expected), "round {round}, node {}", node.number);
            }
        }
    }
    // Another address at the old index does not affect the connection.
    move_to(&pair.a, 0, 3);
    bind(&pair.a.hca, 0, gid(9));
    pair.right.recv(2, &[]);
    pair.left.send(2, &[]);
    pair.world.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(2, WcStatus::Success)]);
    pair.a.hca.unbind_gid(3);
    pair.left.send(3, &[]);
    pair.world.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(3, WcStatus::RetryExceeded)]);
}

/// A request that was sent before the address went is answered when the address is back.
#[test]
fn a_request_that_waits_for_its_answer_survives_the_move_of_its_address() {
    let pair = Pair::with(World::new(), |a| (a.timeout, a.retry_cnt) = (14, 7), |_| {});
    pair.right.recv(1, &[]);
    pair.a.hca.unbind_gid(0);
    pair.left.send(1, &[]);
    pair.world.run();
    assert!(pair.left.scq.poll().is_empty());
    bind(&pair.a.hca, 5, gid(1));
    pair.world.settle();
    assert_eq!(pair.left.scq.poll_statuses(), [(1, WcStatus::Success)]);
}

over_a_cable! {
    a_connection_has_its_address_again_at_another_index
    a_request_that_waits_for_its_answer_survives_the_move_of_its_address
}

/// A device with address 9 that a request can lose, and a device that wants this address.
struct Removable {
    world: World,
    holder: Node,
    next: Node,
    end: End,
    faults: DeviceFaults,
    effects: Arc<Mutex<Vec<DeviceEffect>>>,
}

/// Returns an end that sends from the address at index 0.
fn connected(node: &Node) -> End {
    let end = node.qp(QpType::Rc);
    end.connect(&end, |attrs| attrs.av.dgid = gid(8));
    end
}

impl Removable {
    fn new() -> Self {
        let world = World::new();
        let (holder, next) = (world.ruled(1, Rules::default()), world.ruled(3, Rules::default()));
        bind(&holder.hca, 0, gid(9));
        bind(&next.hca, 0, gid(8));
        let end = connected(&holder);
        let (faults, effects) = (world.station(1).faults(), Arc::<Mutex<Vec<_>>>::default());
        let told = Arc::clone(&effects);
        faults.apply_by(move |effect| told.lock().push(effect));
        Self { world, holder, next, end, faults, effects }
    }

    /// Sends a request, whose address a fault then removes until the rules change.
    fn remove(&self, end: &End) {
        self.faults.set(&["gid-removed".parse().unwrap()]).unwrap();
        end.submit(1, SendOp::Send { data: SendData::None, to: None }, &[]);
        self.world.rxe.run_ready();
    }

    /// Ends the fault.
    fn restore(&self) {
        self.faults.set(&[]).unwrap();
        self.world.rxe.run_ready();
    }

    /// Returns the number of times that the driver was told since the last call.
    fn told(&self) -> usize {
        let effects = std::mem::take(&mut *self.effects.lock());
        assert!(effects.iter().all(|effect| *effect == DeviceEffect::GidTable), "{effects:?}");
        effects.len()
    }
}

#[test]
fn the_return_of_a_removed_address_is_told_when_the_guest_has_it() {
    let test = Removable::new();
    test.remove(&test.end);
    assert_eq!((waits(&test.holder), test.told()), (vec!["removed".to_owned()], 1));
    bind(&test.next.hca, 1, gid(9));
    assert!(has(&test.next, gid(9)), "it was given back");
    test.restore();
    assert_eq!((waits(&test.holder), test.told()), (vec!["taken".to_owned()], 0));
    test.next.hca.unbind_gid(1);
    advance(&test.world, HOLD);
    assert_eq!((has(&test.holder, gid(9)), test.told()), (true, 1));
    assert_eq!(test.holder.counter("gids_granted"), 1);
}

/// The guest binds the address again, as its kernel does when its interface goes down and up.
#[test]
fn a_removed_address_that_is_bound_again_stays_removed() {
    let test = Removable::new();
    test.remove(&test.end);
    test.holder.hca.unbind_gid(0);
    for index in [0, 7] {
        bind(&test.holder.hca, index, gid(9));
        test.world.rxe.run_ready();
    }
    assert_eq!(
        (has(&test.holder, gid(9)), waits(&test.holder), test.told()),
        (false, vec!["removed".to_owned(); 2], 1)
    );
    test.restore();
    assert_eq!((has(&test.holder, gid(9)), waits(&test.holder), test.told()), (true, vec![], 1));
}

/// A request from the address begins while the claim waits, and causes the fault.
#[test]
fn an_address_that_is_removed_while_it_waits_is_not_claimed() {
    let test = Removable::new();
    test.holder.hca.set_link(false).unwrap();
    advance(&test.world, HOLD);
    assert_eq!(waits(&test.holder), ["link_down"]);
    test.remove(&test.end);
    test.holder.hca.set_link(true).unwrap();
    test.world.rxe.run_ready();
    assert_eq!((has(&test.holder, gid(9)), waits(&test.holder)), (false, vec!["removed".to_owned()]));
    test.restore();
    assert!(has(&test.holder, gid(9)));
    // The same with an address of another device.
    let test = Removable::new();
    bind(&test.next.hca, 1, gid(7));
    bind(&test.holder.hca, 0, gid(7));
    assert_eq!(waits(&test.holder), ["taken"]);
    test.remove(&connected(&test.holder));
    test.next.hca.unbind_gid(1);
    advance(&test.world, HOLD);
    assert_eq!((has(&test.holder, gid(7)), waits(&test.holder)), (false, vec!["removed".to_owned()]));
    test.restore();
    assert!(has(&test.holder, gid(7)));
}
