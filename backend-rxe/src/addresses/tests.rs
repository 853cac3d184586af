//! Tests of the address rules, named after the rows of `docs/dev/addresses.md`.

use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_verbs::{
    AddressRule, OtherAddresses, link_local,
    testing::{gid, mac},
};
use pvrdma_verbs_types::Gid;

use super::remote::{MAX_REMOTE, REMEMBERED};
use super::table::{
    Claim, Claimed, Conflict, HOLD, LONG_PROBE, MAX_PROBING, MAX_UNBOUND, PROBE, Refused, Table, Wait, Why,
};

const OWN: AddressRule = AddressRule { others: OtherAddresses::Own, listed: Vec::new() };
/// A host beyond the uplink.
const HOST: MacAddr = MacAddr([2, 9, 9, 9, 9, 9]);
const NANOSECOND: Duration = Duration::from_nanos(1);

fn listed(number: u8) -> AddressRule {
    let listed = vec![std::net::Ipv4Addr::new(10, 0, 0, number).into()];
    AddressRule { others: OtherAddresses::Refuse, listed }
}

/// The table and the time.
struct World {
    table: Table,
    now: Duration,
}

impl World {
    /// Creates devices with these rules. `probes`: they can probe hosts beyond an uplink.
    fn new(probes: bool, rules: &[(u8, AddressRule)]) -> Self {
        let mut table = Table::default();
        for (number, rule) in rules {
            table.join(mac(*number), rule);
            table.set_probes(mac(*number), probes);
        }
        Self { table, now: Duration::from_secs(1000) }
    }

    fn bind(&mut self, number: u8, last: u8) -> Result<Claimed, Refused> {
        self.table.claim(mac(number), (gid(last), None), Claim::Bind, self.now)
    }

    fn announce(&mut self, number: u8, last: u8) -> Result<Claimed, Refused> {
        self.table.claim(mac(number), (gid(last), None), Claim::Announce(mac(number)), self.now)
    }

    fn unbind(&mut self, number: u8, last: u8) {
        self.table.unbind(mac(number), (gid(last), None), self.now);
    }

    /// Handles a packet of a host beyond the uplink.
    fn seen(&mut self, last: u8) -> (Option<MacAddr>, Option<Conflict>) {
        self.table.seen((gid(last), None), HOST, self.now)
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    /// Returns the result that a waiting claim has.
    fn waits(&self, why: Why, until: Option<Duration>) -> Result<Claimed, Refused> {
        Ok(Claimed::Waiting(Wait { why, until: until.map(|until| self.now + until) }))
    }

    /// Returns the times at which a device sends probes, from now on.
    fn probes(&mut self, number: u8) -> Vec<Duration> {
        let (start, mut at) = (self.now, Vec::new());
        loop {
            let (due, next) = self.table.due_probes(mac(number), self.now);
            at.extend(due.iter().map(|_| self.now - start));
            let Some(next) = next else { break };
            self.now = next;
        }
        self.now = start;
        at
    }
}

const HELD: Result<Claimed, Refused> = Ok(Claimed::Granted);

#[test]
fn listed_addresses_go_to_no_other_device() {
    let mut world = World::new(true, &[(1, OWN), (3, listed(7)), (4, AddressRule::ANY), (5, listed(7))]);
    assert_eq!((world.bind(1, 7), world.announce(4, 7)), (Err(Refused::Reserved), Err(Refused::Reserved)));
    assert_eq!(world.bind(3, 8), Err(Refused::NotListed));
    // The result does not depend on remote hosts that were seen, and there is no probe.
    world.seen(7);
    assert_eq!((world.bind(3, 7), world.bind(5, 7)), (HELD, world.waits(Why::Taken, None)));
    world.unbind(3, 7);
    assert_eq!(world.bind(5, 7), HELD, "an address that both list is free once it is unbound");
}

#[test]
fn the_link_local_address_of_a_mac_is_listed() {
    let mut world = World::new(true, &[(1, OWN), (3, listed(7))]);
    let mut bind = |number, of| world.table.claim(mac(number), (link_local(mac(of)), None), Claim::Bind, world.now);
    assert_eq!((bind(1, 3), bind(3, 3), bind(1, 1)), (Err(Refused::Reserved), HELD, HELD));
}

#[test]
fn an_address_of_no_host_waits() {
    let mut world = World::new(false, &[(1, OWN), (2, AddressRule::ANY)]);
    let waits = world.waits(Why::NoHost, None);
    let mut claim = |number, address: &str, claim| {
        let gid = Gid(address.parse::<std::net::Ipv6Addr>().unwrap().octets());
        world.table.claim(mac(number), (gid, None), claim, world.now)
    };
    for address in ["ff02::1", "ff3e::9", "::ffff:224.0.0.1", "::ffff:239.9.9.9", "::ffff:255.255.255.255", "::1"] {
        for kind in [Claim::Bind, Claim::Restore, Claim::Announce(mac(1))] {
            assert_eq!([1, 2].map(|number| claim(number, address, kind)), [waits; 2], "{address}");
        }
    }
    for address in ["::ffff:127.0.0.1", "::ffff:0.0.0.0", "::"] {
        assert_eq!(claim(1, address, Claim::Bind), waits, "{address}");
    }
    for address in ["fe80::1", "fd00::1", "::ffff:223.255.255.254", "::ffff:240.0.0.1", "::2"] {
        assert_eq!(claim(1, address, Claim::Bind), HELD, "{address}");
    }
}

#[test]
fn only_devices_that_list_an_address_probe_for_it() {
    let world = World::new(true, &[(1, OWN), (3, listed(7)), (5, listed(7))]);
    let may = |number, address| world.table.may_probe(mac(number), address);
    assert_eq!([1, 3, 5].map(|number| may(number, gid(7))), [false, true, true]);
    assert_eq!([1, 3, 5].map(|number| may(number, link_local(mac(1)))), [true, false, false]);
    assert_eq!([1, 3].map(|number| may(number, gid(8))), [true; 2]);
}

#[test]
fn a_bound_address_has_one_holder() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN), (4, AddressRule::ANY)]);
    assert_eq!((world.bind(1, 9), world.bind(1, 9)), (HELD, HELD));
    assert_eq!((world.bind(2, 9), world.bind(4, 9)), (world.waits(Why::Taken, None), world.waits(Why::Taken, None)));
    let elsewhere = world.table.claim(mac(2), (gid(9), Some(5)), Claim::Bind, world.now);
    assert_eq!(elsewhere, HELD, "in another VLAN");
    world.advance(HOLD * 10);
    world.unbind(1, 9);
    world.advance(HOLD * 10);
    assert_eq!(world.bind(2, 9), world.waits(Why::Taken, None), "it is bound once more");
}

#[test]
fn an_unbound_address_stays_for_a_minute() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    world.bind(1, 9).unwrap();
    world.unbind(1, 9);
    assert_eq!(world.bind(2, 9), world.waits(Why::Taken, Some(HOLD)));
    // The device has left meanwhile.
    world.table.leave(mac(1));
    world.advance(HOLD - NANOSECOND);
    assert_eq!(world.bind(2, 9), world.waits(Why::Taken, Some(NANOSECOND)));
    world.table.join(mac(1), &OWN);
    assert_eq!(world.bind(1, 9), HELD, "a guest that restarts finds its address again");
    world.unbind(1, 9);
    world.advance(HOLD);
    assert_eq!((world.bind(2, 9), world.bind(1, 9)), (HELD, world.waits(Why::Taken, None)));
}

#[test]
fn an_announced_address_stays_for_a_minute() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    assert_eq!(world.announce(1, 9), HELD);
    world.advance(HOLD / 2);
    assert_eq!(world.announce(1, 9), HELD);
    world.advance(HOLD / 2);
    assert_eq!(world.announce(2, 9), world.waits(Why::Taken, Some(HOLD / 2)));
    assert_eq!(world.bind(1, 9), HELD, "both functions are one device");
    world.advance(HOLD);
    assert_eq!(world.bind(2, 9), world.waits(Why::Taken, None));
}

#[test]
fn an_address_that_is_not_listed_is_probed_first() {
    let (wait, _) = PROBE;
    for announced in [false, true] {
        let mut world = World::new(true, &[(1, OWN), (2, OWN)]);
        let claim = |world: &mut World| if announced { world.announce(1, 9) } else { world.bind(1, 9) };
        assert_eq!(claim(&mut world), world.waits(Why::Probing, Some(wait)));
        assert_eq!(world.probes(1), [0, 300, 600].map(Duration::from_millis));
        assert_eq!(world.bind(2, 9), world.waits(Why::Taken, Some(HOLD)), "the first device that binds it gets it");
        world.advance(wait - NANOSECOND);
        assert_eq!(claim(&mut world), world.waits(Why::Probing, Some(NANOSECOND)), "claiming again changes nothing");
        world.advance(NANOSECOND);
        assert_eq!((claim(&mut world), claim(&mut world)), (HELD, HELD));
        // From now on the device owns the address, and sends no more probes.
        world.advance(REMEMBERED * 2);
        assert_eq!((claim(&mut world), world.probes(1).len()), (HELD, 0));
    }
}

#[test]
fn a_restored_device_sends_no_probe() {
    let mut world = World::new(true, &[(1, OWN), (2, OWN), (3, listed(7))]);
    // The host that was seen is the device itself, before it moved here.
    world.seen(9);
    let restore =
        |world: &mut World, number, last| world.table.claim(mac(number), (gid(last), None), Claim::Restore, world.now);
    assert_eq!((restore(&mut world, 1, 9), world.probes(1).len()), (HELD, 0));
    assert!(world.table.has_bound(mac(1), (gid(9), None)));
    assert_eq!(world.seen(9).1.map(|conflict| conflict.kept), Some(false), "another host has the address");
    // The rules hold as ever.
    world.bind(1, 6).unwrap();
    world.advance(PROBE.0);
    assert_eq!((world.bind(1, 6), restore(&mut world, 2, 6)), (HELD, world.waits(Why::Taken, None)));
    assert_eq!(restore(&mut world, 3, 8), Err(Refused::NotListed));
}

#[test]
fn an_answer_ends_the_probe() {
    let mut world = World::new(true, &[(1, OWN), (2, OWN)]);
    world.bind(1, 9).unwrap();
    world.advance(PROBE.0 - NANOSECOND);
    assert_eq!(world.seen(9), (Some(mac(1)), None), "no conflict: the device did not have it");
    assert_eq!(world.table.conflicts(mac(1)), 0);
    world.advance(NANOSECOND);
    let refused = world.waits(Why::Remote, Some(HOLD - NANOSECOND));
    assert_eq!((world.bind(1, 9), world.bind(2, 9), world.probes(1).len()), (refused, refused, 0));
}

#[test]
fn a_remote_host_that_was_seen_is_remembered_for_hours() {
    let mut world = World::new(true, &[(1, OWN)]);
    world.seen(9);
    assert_eq!(world.bind(1, 9), world.waits(Why::Remote, Some(HOLD)));
    // The host was silent for a long time: the probe takes longer, and an answer counts until its end.
    world.advance(REMEMBERED - NANOSECOND);
    assert_eq!(world.bind(1, 9), world.waits(Why::Probing, Some(LONG_PROBE.0)));
    assert_eq!(world.probes(1).len(), 12);
    world.advance(LONG_PROBE.0 - NANOSECOND);
    world.seen(9);
    assert_eq!(world.bind(1, 9), world.waits(Why::Remote, Some(HOLD)));
    world.advance(HOLD);
    assert_eq!(world.bind(1, 9), world.waits(Why::Probing, Some(LONG_PROBE.0)));
    world.advance(LONG_PROBE.0);
    assert_eq!(world.bind(1, 9), HELD, "the host was silent for two minutes, and probed in the second");
    // Once the host is forgotten, the address is like any other.
    let mut world = World::new(true, &[(1, OWN)]);
    world.seen(9);
    world.advance(REMEMBERED);
    assert_eq!(world.bind(1, 9), world.waits(Why::Probing, Some(PROBE.0)));
}

#[test]
fn a_conflict_ends_a_claim_that_is_not_listed() {
    for announced in [false, true] {
        let mut world = World::new(true, &[(1, OWN), (2, OWN)]);
        let claim = |world: &mut World| if announced { world.announce(1, 9) } else { world.bind(1, 9) };
        claim(&mut world).unwrap();
        world.advance(PROBE.0);
        assert_eq!(claim(&mut world), HELD);
        let conflict = Conflict { mac: mac(1), address: (gid(9), None), kept: false };
        assert_eq!(world.seen(9), (Some(mac(1)), Some(conflict)));
        assert!(!world.table.has_bound(mac(1), (gid(9), None)));
        assert_eq!(claim(&mut world), world.waits(Why::Remote, Some(HOLD)));
        assert_eq!((world.seen(9), world.table.conflicts(mac(1))), ((None, None), 1), "once");
    }
}

#[test]
fn a_conflict_about_a_listed_address_is_reported_once_a_minute() {
    let mut world = World::new(true, &[(1, listed(9)), (2, AddressRule::ANY)]);
    for (number, last) in [(1, 9), (2, 8)] {
        assert_eq!(world.bind(number, last), HELD);
        let conflict = Conflict { mac: mac(number), address: (gid(last), None), kept: true };
        assert_eq!(world.seen(last), (None, Some(conflict)));
        assert_eq!(world.seen(last), (None, None));
        assert!(world.table.has_bound(mac(number), (gid(last), None)));
        world.advance(HOLD);
        assert_eq!(world.seen(last), (None, Some(conflict)));
        assert_eq!(world.table.conflicts(mac(number)), 2);
    }
}

#[test]
fn a_twin_is_reported_once_a_minute() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    assert_eq!((world.bind(1, 9), world.announce(2, 8)), (HELD, HELD));
    let conflict = Conflict { mac: mac(1), address: (gid(9), None), kept: true };
    let mut twin = |last, at| world.table.twin(mac(1), (gid(last), None), at);
    let [begin, soon] = [HOLD, HOLD + Duration::from_secs(1)];
    assert_eq!([twin(9, begin), twin(9, soon), twin(9, 2 * HOLD)], [Some(conflict), None, Some(conflict)]);
    assert_eq!([twin(8, soon), twin(7, soon)], [None; 2], "a twin is reported for bound addresses only");
    assert_eq!((world.table.twins(mac(1)), world.table.conflicts(mac(1)), world.table.twins(mac(2))), (3, 2, 0));
    assert!(world.table.has_bound(mac(1), (gid(9), None)));
}

#[test]
fn an_address_that_was_released_may_turn_up_elsewhere() {
    let mut world = World::new(true, &[(1, OWN)]);
    world.bind(1, 9).unwrap();
    world.advance(PROBE.0);
    world.bind(1, 9).unwrap();
    world.unbind(1, 9);
    assert_eq!(world.seen(9), (Some(mac(1)), None), "the virtual machine has moved");
    assert_eq!(world.bind(1, 9), world.waits(Why::Remote, Some(HOLD)));
}

#[test]
fn frames_of_the_own_network_are_no_conflict() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    let bridged = MacAddr([2, 7, 7, 7, 7, 7]);
    world.table.claim(mac(1), (gid(9), None), Claim::Announce(bridged), world.now).unwrap();
    for source in [mac(1), mac(2), bridged] {
        assert_eq!(world.table.seen((gid(9), None), source, world.now), (None, None), "{source}");
    }
    assert_eq!(world.announce(1, 9), HELD);
}

#[test]
fn a_device_that_sends_during_a_probe_keeps_its_address() {
    let mut world = World::new(true, &[(1, OWN), (2, OWN)]);
    world.announce(1, 9).unwrap();
    world.advance(PROBE.0);
    assert_eq!(world.announce(1, 9), HELD);
    world.advance(HOLD);
    // The silent former owner gets a chance to announce the address, and does.
    assert_eq!(world.announce(2, 9), world.waits(Why::Probing, Some(PROBE.0)));
    assert_eq!(world.announce(1, 9), HELD);
    assert_eq!(world.announce(2, 9), world.waits(Why::Taken, Some(HOLD)));
    // This time it does not, and loses the address.
    world.advance(HOLD);
    world.announce(2, 9).unwrap();
    world.advance(PROBE.0);
    assert_eq!(world.announce(2, 9), HELD);
    assert_eq!(world.announce(1, 9), world.waits(Why::Taken, Some(HOLD)));
}

#[test]
fn a_device_whose_link_is_down_sends_no_probe() {
    let mut world = World::new(true, &[(1, OWN), (2, listed(7))]);
    world.bind(1, 9).unwrap();
    world.table.set_link(mac(1), false);
    world.advance(PROBE.0);
    assert_eq!(world.bind(1, 9), world.waits(Why::LinkDown, None));
    assert_eq!(world.probes(1).len(), 0);
    world.table.set_link(mac(1), true);
    assert_eq!(world.bind(1, 9), world.waits(Why::Probing, Some(PROBE.0)));
    world.table.set_link(mac(2), false);
    assert_eq!(world.bind(2, 7), HELD, "it is listed");
}

#[test]
fn an_address_that_was_given_back_is_free_at_once() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    world.bind(1, 9).unwrap();
    world.table.give_back(mac(2), (gid(9), None));
    assert_eq!(world.bind(2, 9), world.waits(Why::Taken, None), "only the holder can give the address back");
    world.table.give_back(mac(1), (gid(9), None));
    assert_eq!(world.bind(2, 9), HELD);
}

fn number(number: usize) -> (Gid, Option<u16>) {
    let [.., a, b, c] = number.to_be_bytes();
    (Gid::from(std::net::IpAddr::from([10, a, b, c])), None)
}

#[test]
fn remembered_addresses_are_bounded() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    for last in 0..10_000 {
        world.table.claim(mac(1), number(last), Claim::Announce(mac(1)), world.now).unwrap();
        world.table.seen(number(last + (1 << 16)), HOST, world.now);
    }
    assert_eq!(world.table.sizes(), (MAX_UNBOUND, MAX_REMOTE));
    let mut bind = |last| world.table.claim(mac(2), number(last), Claim::Bind, world.now);
    assert_eq!(bind(0), HELD, "the oldest entry was dropped");
    assert!(matches!(bind(9_999), Ok(Claimed::Waiting(_))), "the newest entry stays");
}

#[test]
fn hosts_that_are_known_stay_when_no_more_fit() {
    let mut world = World::new(true, &[(1, OWN)]);
    for last in 0..=MAX_REMOTE {
        world.table.seen(number(last), HOST, world.now);
    }
    world.advance(HOLD);
    world.table.seen(number(0), HOST, world.now);
    let mut why = |last| match world.table.claim(mac(1), number(last), Claim::Bind, world.now) {
        Ok(Claimed::Waiting(wait)) => (wait.why, wait.until.map(|until| until - world.now)),
        other => unreachable!("{other:?}"),
    };
    assert_eq!(why(0), (Why::Remote, Some(HOLD)));
    assert_eq!(why(1), (Why::Probing, Some(LONG_PROBE.0)));
    assert_eq!(why(MAX_REMOTE), (Why::Probing, Some(PROBE.0)), "one too many");
}

#[test]
fn a_device_probes_for_a_bounded_number_at_a_time() {
    let mut world = World::new(true, &[(1, OWN)]);
    let claim = |world: &mut World, last| world.table.claim(mac(1), number(last), Claim::Bind, world.now);
    for last in 0..MAX_PROBING {
        assert_eq!(claim(&mut world, last), world.waits(Why::Probing, Some(PROBE.0)));
    }
    assert_eq!(claim(&mut world, MAX_PROBING), world.waits(Why::Busy, Some(PROBE.0)));
    assert_eq!(world.probes(1).len(), 3 * MAX_PROBING);
    world.advance(PROBE.0);
    assert_eq!(claim(&mut world, MAX_PROBING), world.waits(Why::Probing, Some(PROBE.0)));
}

#[test]
fn released_addresses_are_remembered_while_there_is_room() {
    let mut world = World::new(false, &[(1, OWN), (2, OWN)]);
    for last in 0..=MAX_UNBOUND {
        world.table.claim(mac(1), number(last), Claim::Bind, world.now).unwrap();
        world.table.unbind(mac(1), number(last), world.now);
    }
    let mut bind = |device, last| world.table.claim(mac(device), number(last), Claim::Bind, world.now);
    assert_eq!(bind(2, 0), HELD, "the oldest entry was dropped");
    assert!(matches!(bind(2, 1), Ok(Claimed::Waiting(_))));
    // An address that is bound again stays, no matter how many others follow.
    bind(1, 1).unwrap();
    for last in 0..=MAX_UNBOUND {
        world.table.claim(mac(1), number(1000 + last), Claim::Announce(mac(1)), world.now).unwrap();
    }
    assert!(world.table.has_bound(mac(1), number(1)) && world.table.has_bound(mac(2), number(0)));
}

/// Checks every sequence of four steps of three devices (one with a list, one with addresses of its own, one with any),
/// a host beyond the uplink and the clock, for one address that is not listed.
#[test]
fn every_sequence_of_four_steps() {
    const STEPS: u32 = 4;
    // Binding, announcing and unbinding by each device; the host; the duration of a probe and of a hold.
    const KINDS: usize = 9 + 3;
    for story in 0..KINDS.pow(STEPS) {
        let mut world = World::new(true, &[(1, listed(7)), (2, OWN), (3, AddressRule::ANY)]);
        let (mut bound, mut since, mut heard) = ([0; 4], [None; 4], None);
        for step in 0..STEPS {
            let choice = story / KINDS.pow(step) % KINDS;
            let device = u8::try_from(choice % 3 + 1).unwrap();
            let index = usize::from(device);
            match choice / 3 {
                0 | 1 => {
                    let bind = choice / 3 == 0;
                    let claimed = if bind { world.bind(device, 9) } else { world.announce(device, 9) };
                    let others = (1..4).filter(|other| *other != index).any(|other| bound[other] > 0);
                    let first = *since[index].get_or_insert(world.now);
                    match claimed {
                        Err(refused) => assert_eq!((device, refused), (1, Refused::NotListed), "{story}"),
                        Ok(Claimed::Granted) => {
                            assert!(!others && device != 1, "{story}: one holder, and none that may not");
                            let asked = world.now - first >= PROBE.0;
                            let silent = heard.is_none_or(|heard| world.now - heard >= HOLD);
                            assert!(device == 3 || asked && silent, "{story}: not before the probe is over");
                            bound[index] += usize::from(bind);
                        }
                        Ok(Claimed::Waiting(wait)) => {
                            assert!(wait.until.is_none_or(|until| until > world.now), "{story}")
                        }
                    }
                }
                2 => {
                    world.unbind(device, 9);
                    bound[index] = bound[index].saturating_sub(1);
                }
                _ => match choice % 3 {
                    0 => {
                        world.seen(9);
                        (bound[2], since[2], heard) = (0, None, Some(world.now));
                    }
                    1 => world.advance(PROBE.0),
                    _ => world.advance(HOLD),
                },
            }
            for number in 1..4 {
                let has = world.table.has_bound(mac(number), (gid(9), None));
                assert_eq!(has, bound[usize::from(number)] > 0, "{story}");
            }
        }
    }
}
