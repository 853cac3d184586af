//! Who may have which address in a network.
//!
//! An address that is listed for a device, and the link-local one of its MAC address, are *reserved*: nobody else gets
//! them, whoever comes first. Any other address belongs to the first device that binds it, or whose network function
//! says by ARP or neighbour discovery that it has it, and stays with that device for [`HOLD`] after both have ended: a
//! guest that restarts finds its addresses again. With [`OtherAddresses::Own`] an address of a host beyond the uplink
//! is refused as long as packets from it have come in the last [`HOLD`].
//!
//! All of it is bounded: a device holds at most 256 addresses that it has bound and as many that it has not, and
//! [`MAX_REMOTE`] addresses of other hosts are remembered.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_ether_link::Clock;
use pvrdma_verbs::{AddressRule, Gid, MacAddr, OtherAddresses, VerbsError};

/// How long an address stays with who had it last.
const HOLD: Duration = Duration::from_secs(60);
/// Addresses that a device holds and has not bound.
const MAX_UNBOUND: usize = 256;
/// Addresses of hosts beyond the uplink.
const MAX_REMOTE: usize = 4096;

/// A GID and its VLAN.
pub(crate) type Address = (Gid, Option<u16>);

/// Why a device may not have an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// It is none of those that are listed for the device.
    NotListed,
    /// It is reserved for another device.
    Reserved,
    /// Another device has it, or had it less than a minute ago.
    Taken,
    /// A host beyond the uplink has it.
    Remote,
}

impl From<Refused> for VerbsError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Taken => Self::InUse("GID"),
            Refused::NotListed => Self::NotAllowed("the address is not listed for the device"),
            Refused::Reserved => Self::NotAllowed("the address is reserved for another device"),
            Refused::Remote => Self::NotAllowed("a host beyond the uplink has the address"),
        }
    }
}

/// Who has an address, or had it.
#[derive(Clone, Copy, Debug)]
struct Holder {
    mac: MacAddr,
    /// Times that it is bound now.
    bound: u32,
    /// When it was bound or announced last.
    last: Duration,
}

impl Holder {
    fn is_valid(&self, now: Duration) -> bool {
        self.bound > 0 || is_recent(self.last, now)
    }
}

fn is_recent(last: Duration, now: Duration) -> bool {
    now.saturating_sub(last) < HOLD
}

/// A device of the network, or one that was.
#[derive(Debug, Default)]
struct Member {
    rule: AddressRule,
    /// Adapters with this MAC address: none while the device is away.
    adapters: u32,
    /// Addresses that it holds and may not have bound, with the time, the oldest first.
    unbound: VecDeque<(Address, Duration)>,
}

#[derive(Debug, Default)]
struct Inner {
    members: HashMap<MacAddr, Member>,
    /// Devices that an address is reserved for.
    reserved: HashMap<Gid, Vec<MacAddr>>,
    holders: HashMap<Address, Holder>,
    /// Addresses of other hosts, and when they were seen last.
    remote: HashMap<Address, Duration>,
}

/// The addresses of a network.
#[derive(Debug)]
pub(crate) struct Addresses {
    clock: Arc<dyn Clock>,
    inner: Mutex<Inner>,
}

impl Addresses {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, inner: Mutex::default() }
    }

    /// The time, on the clock of the network.
    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// A device joins the network.
    pub(crate) fn join(&self, mac: MacAddr, rule: &AddressRule) {
        let Inner { members, reserved, .. } = &mut *self.inner.lock();
        let member = members.entry(mac).or_default();
        member.adapters = member.adapters.saturating_add(1);
        if member.adapters == 1 {
            member.rule = rule.clone();
            for gid in rule.reserved(mac) {
                reserved.entry(gid).or_default().push(mac);
            }
        }
    }

    /// A device leaves the network. What it had stays its own for a while.
    pub(crate) fn leave(&self, mac: MacAddr) {
        let Inner { members, reserved, .. } = &mut *self.inner.lock();
        let Some(member) = members.get_mut(&mac) else { return };
        member.adapters = member.adapters.saturating_sub(1);
        if member.adapters == 0 {
            reserved.retain(|_, macs| {
                macs.retain(|other| *other != mac);
                !macs.is_empty()
            });
        }
    }

    /// A device binds an address.
    ///
    /// # Errors
    /// It may not have it.
    pub(crate) fn bind(&self, mac: MacAddr, address: Address) -> Result<(), Refused> {
        self.claim(mac, address, 1)
    }

    /// The network function of a device says that it has an address.
    ///
    /// # Errors
    /// It may not have it.
    pub(crate) fn announce(&self, mac: MacAddr, address: Address) -> Result<(), Refused> {
        self.claim(mac, address, 0)
    }

    /// A device no longer binds an address.
    pub(crate) fn unbind(&self, mac: MacAddr, address: Address) {
        let now = self.clock.now();
        let inner = &mut *self.inner.lock();
        let Some(holder) = inner.holders.get_mut(&address).filter(|holder| holder.mac == mac) else { return };
        holder.bound = holder.bound.saturating_sub(1);
        holder.last = now;
        if holder.bound == 0 {
            inner.remember_unbound(mac, address, now);
        }
    }

    /// A packet came from an address of a host beyond the uplink.
    pub(crate) fn seen(&self, address: Address) {
        let now = self.clock.now();
        let inner = &mut *self.inner.lock();
        if inner.holders.get(&address).is_some_and(|holder| holder.is_valid(now)) {
            return;
        }
        if inner.remote.len() >= MAX_REMOTE && !inner.remote.contains_key(&address) {
            inner.remote.retain(|_, last| is_recent(*last, now));
            if inner.remote.len() >= MAX_REMOTE {
                return;
            }
        }
        inner.remote.insert(address, now);
    }

    /// Returns `true` if a device of the network has this MAC address.
    pub(crate) fn is_member(&self, mac: MacAddr) -> bool {
        self.inner.lock().members.get(&mac).is_some_and(|member| member.adapters > 0)
    }

    fn claim(&self, mac: MacAddr, address: Address, bound: u32) -> Result<(), Refused> {
        let now = self.clock.now();
        let inner = &mut *self.inner.lock();
        inner.check(mac, address, now)?;
        let holder = inner.holders.entry(address).or_insert(Holder { mac, bound: 0, last: now });
        if holder.mac != mac {
            *holder = Holder { mac, bound: 0, last: now };
        }
        holder.bound = holder.bound.saturating_add(bound);
        holder.last = now;
        if holder.bound == 0 {
            inner.remember_unbound(mac, address, now);
        }
        Ok(())
    }
}

impl Inner {
    fn check(&self, mac: MacAddr, address: Address, now: Duration) -> Result<(), Refused> {
        let holder = self.holders.get(&address).filter(|holder| holder.mac != mac && holder.is_valid(now));
        match self.reserved.get(&address.0) {
            // What somebody has bound stays there until it is unbound, whoever else may have it.
            Some(macs) if macs.contains(&mac) => {
                return if holder.is_some_and(|holder| holder.bound > 0) { Err(Refused::Taken) } else { Ok(()) };
            }
            Some(_) => return Err(Refused::Reserved),
            None => {}
        }
        let others = self.members.get(&mac).map_or(OtherAddresses::Own, |member| member.rule.others);
        let remote = || self.remote.get(&address).is_some_and(|last| is_recent(*last, now));
        match others {
            OtherAddresses::Refuse => Err(Refused::NotListed),
            _ if holder.is_some() => Err(Refused::Taken),
            OtherAddresses::Own if remote() => Err(Refused::Remote),
            OtherAddresses::Own | OtherAddresses::Any => Ok(()),
        }
    }

    /// Notes that a device holds an address without having it bound, and forgets the oldest of too many.
    fn remember_unbound(&mut self, mac: MacAddr, address: Address, now: Duration) {
        let member = self.members.entry(mac).or_default();
        member.unbound.retain(|(known, _)| *known != address);
        member.unbound.push_back((address, now));
        while let Some(&(oldest, last)) = member.unbound.front()
            && (member.unbound.len() > MAX_UNBOUND || !is_recent(last, now))
        {
            member.unbound.pop_front();
            if self.holders.get(&oldest).is_some_and(|holder| holder.mac == mac && holder.bound == 0) {
                self.holders.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_ether_link::ManualClock;
    use pvrdma_verbs::link_local;
    use pvrdma_verbs::testing::{gid, mac};

    use super::*;

    fn table(rules: &[(u8, AddressRule)]) -> (Addresses, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::default());
        let addresses = Addresses::new(Arc::clone(&clock) as Arc<dyn Clock>);
        rules.iter().for_each(|(number, rule)| addresses.join(mac(*number), rule));
        (addresses, clock)
    }

    fn listed(number: u8) -> AddressRule {
        let listed = vec![std::net::Ipv4Addr::new(10, 0, 0, number).into()];
        AddressRule { others: OtherAddresses::Refuse, listed }
    }

    const OWN: AddressRule = AddressRule { others: OtherAddresses::Own, listed: Vec::new() };

    #[test]
    fn an_address_is_reserved_or_has_one_holder() {
        let (table, clock) = table(&[(1, OWN), (2, OWN), (3, listed(7)), (4, AddressRule::ANY), (5, listed(7))]);
        let bind = |number, last| table.bind(mac(number), (gid(last), None));
        assert_eq!(bind(1, 7), Err(Refused::Reserved));
        assert_eq!(bind(4, 7), Err(Refused::Reserved));
        assert_eq!(bind(3, 8), Err(Refused::NotListed));
        assert_eq!((bind(3, 7), bind(5, 7)), (Ok(()), Err(Refused::Taken)));
        table.unbind(mac(3), (gid(7), None));
        assert_eq!(bind(5, 7), Ok(()), "both list it, so that neither keeps it");
        assert_eq!(
            (bind(1, 9), bind(1, 9), bind(2, 9), bind(4, 9)),
            (Ok(()), Ok(()), Err(Refused::Taken), Err(Refused::Taken))
        );
        assert_eq!(table.bind(mac(2), (gid(9), Some(5))), Ok(()), "in another VLAN");
        clock.advance(HOLD * 10);
        table.unbind(mac(1), (gid(9), None));
        clock.advance(HOLD * 10);
        assert_eq!(bind(2, 9), Err(Refused::Taken), "it is bound once more");
        table.unbind(mac(1), (gid(9), None));
        clock.advance(HOLD - Duration::from_nanos(1));
        assert_eq!(bind(2, 9), Err(Refused::Taken));
        clock.advance(Duration::from_nanos(1));
        assert_eq!((bind(2, 9), bind(1, 9)), (Ok(()), Err(Refused::Taken)));
        assert_eq!(table.bind(mac(1), (link_local(mac(2)), None)), Err(Refused::Reserved));
        assert_eq!(table.bind(mac(3), (link_local(mac(3)), None)), Ok(()));
    }

    /// What [`every_short_story`] holds the table against: two addresses, of which the second is listed for device 1.
    #[derive(Clone, Copy, Default)]
    struct Reference {
        /// The device, how often it has it bound, and when it last had to do with it.
        holders: [Option<(u8, u32, Duration)>; 2],
        seen: [Option<Duration>; 2],
    }

    impl Reference {
        fn claim(&mut self, device: u8, at: usize, bound: u32, now: Duration) -> Result<(), Refused> {
            let holder = self.holders[at].filter(|(_, bound, last)| *bound > 0 || now - *last < HOLD);
            let other = holder.filter(|(mac, ..)| *mac != device);
            let remote = self.seen[at].is_some_and(|last| now - last < HOLD);
            match (device, at) {
                (1, 1) if other.is_some_and(|(_, bound, _)| bound > 0) => return Err(Refused::Taken),
                (1, 1) => {}
                (1, _) => return Err(Refused::NotListed),
                (_, 1) => return Err(Refused::Reserved),
                _ if other.is_some() => return Err(Refused::Taken),
                (2, _) if remote => return Err(Refused::Remote),
                _ => {}
            }
            let before = self.holders[at].filter(|(mac, ..)| *mac == device).map_or(0, |(_, bound, _)| bound);
            self.holders[at] = Some((device, before + bound, now));
            Ok(())
        }
    }

    /// Every sequence of four steps of three devices (one with a list, one with addresses of its own, one with any),
    /// two addresses, a host beyond the uplink and the clock.
    #[test]
    fn every_short_story() {
        const DEVICES: usize = 3;
        const STEPS: u32 = 4;
        // Binding, announcing and unbinding by each device of each address; seeing each address; half of the hold.
        const KINDS: usize = 3 * DEVICES * 2 + 2 + 1;
        for story in 0..KINDS.pow(STEPS) {
            let (table, clock) = table(&[(1, listed(7)), (2, OWN), (3, AddressRule::ANY)]);
            let mut reference = Reference::default();
            for step in 0..STEPS {
                let (choice, now) = (story / KINDS.pow(step) % KINDS, clock.now());
                let (at, device) = (choice % 2, u8::try_from(choice / 2 % DEVICES + 1).unwrap());
                let address = (gid([6, 7][at]), None);
                match choice / (2 * DEVICES) {
                    0 => assert_eq!(table.bind(mac(device), address), reference.claim(device, at, 1, now), "{story}"),
                    1 => {
                        let announced = table.announce(mac(device), address);
                        assert_eq!(announced, reference.claim(device, at, 0, now), "{story}");
                    }
                    2 => {
                        table.unbind(mac(device), address);
                        if let Some((_, bound, last)) =
                            reference.holders[at].as_mut().filter(|holder| holder.0 == device)
                        {
                            (*bound, *last) = (bound.saturating_sub(1), now);
                        }
                    }
                    _ if choice == KINDS - 1 => clock.advance(HOLD / 2),
                    _ => {
                        table.seen(address);
                        let held = reference.holders[at].is_some_and(|(_, bound, last)| bound > 0 || now - last < HOLD);
                        reference.seen[at] = if held { reference.seen[at] } else { Some(now) };
                    }
                }
            }
        }
    }

    #[test]
    fn a_device_that_was_away_has_its_addresses() {
        let (table, clock) = table(&[(1, OWN), (2, OWN)]);
        table.bind(mac(1), (gid(1), None)).unwrap();
        table.unbind(mac(1), (gid(1), None));
        assert!(table.is_member(mac(1)));
        table.leave(mac(1));
        assert!(!table.is_member(mac(1)));
        assert_eq!(table.bind(mac(2), (gid(1), None)), Err(Refused::Taken));
        assert_eq!(table.bind(mac(2), (link_local(mac(1)), None)), Ok(()), "it is nobody's");
        clock.advance(HOLD / 2);
        table.join(mac(1), &OWN);
        assert_eq!(table.bind(mac(1), (gid(1), None)), Ok(()));
        table.unbind(mac(1), (gid(1), None));
        clock.advance(HOLD);
        assert_eq!(table.bind(mac(2), (gid(1), None)), Ok(()));
    }

    #[test]
    fn hosts_beyond_the_uplink() {
        let (table, clock) = table(&[(1, OWN), (2, AddressRule::ANY), (3, listed(9))]);
        for last in [8, 9] {
            table.seen((gid(last), None));
        }
        let bind = |number, last| table.bind(mac(number), (gid(last), None));
        assert_eq!((bind(1, 8), bind(3, 9)), (Err(Refused::Remote), Ok(())));
        clock.advance(HOLD - Duration::from_nanos(1));
        assert_eq!(table.now(), clock.now());
        table.seen((gid(8), None));
        clock.advance(HOLD / 2);
        assert_eq!(bind(1, 8), Err(Refused::Remote));
        assert_eq!(bind(2, 8), Ok(()));
        table.unbind(mac(2), (gid(8), None));
        // What a device has is no other host's, whatever comes from there.
        table.seen((gid(8), None));
        clock.advance(HOLD);
        assert_eq!(bind(1, 8), Ok(()));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (table, _clock) = table(&[(1, OWN), (2, OWN)]);
        let address = |number: u32| {
            let [a, b, c, d] = number.to_be_bytes();
            (Gid::from(std::net::IpAddr::from([10, a ^ b, c, d])), None)
        };
        for number in 0..10_000 {
            table.announce(mac(1), address(number)).unwrap();
            table.seen(address(number + (1 << 16)));
        }
        let inner = table.inner.lock();
        assert_eq!((inner.holders.len(), inner.remote.len()), (MAX_UNBOUND, MAX_REMOTE));
        drop(inner);
        // The oldest is forgotten, and the newest is not.
        assert_eq!(table.bind(mac(2), address(0)), Ok(()));
        assert_eq!(table.bind(mac(2), address(9_999)), Err(Refused::Taken));
    }

    fn number(number: usize) -> Address {
        let [.., a, b] = number.to_be_bytes();
        (Gid::from(std::net::IpAddr::from([10, 0, a, b])), None)
    }

    #[test]
    fn what_was_bound_is_remembered_as_long_as_there_is_room() {
        let (table, _clock) = table(&[(1, OWN), (2, OWN)]);
        for last in 0..=MAX_UNBOUND {
            table.bind(mac(1), number(last)).unwrap();
            table.unbind(mac(1), number(last));
        }
        assert_eq!(table.bind(mac(2), number(0)), Ok(()), "the oldest is forgotten");
        assert_eq!(table.bind(mac(2), number(1)), Err(Refused::Taken));
        // One that is bound again stays, however many come after it.
        table.bind(mac(1), number(1)).unwrap();
        for last in 0..=MAX_UNBOUND {
            table.announce(mac(1), number(1000 + last)).unwrap();
        }
        assert_eq!(table.bind(mac(2), number(1)), Err(Refused::Taken));
        // And so does one that another device has by now.
        assert_eq!(table.inner.lock().holders.get(&number(0)).map(|holder| holder.mac), Some(mac(2)));
    }

    #[test]
    fn a_host_that_is_known_is_seen_again_when_no_more_fit() {
        let (table, clock) = table(&[(1, OWN)]);
        (0..MAX_REMOTE).for_each(|last| table.seen(number(last)));
        clock.advance(HOLD / 2);
        table.seen(number(0));
        clock.advance(HOLD / 2);
        assert_eq!(table.bind(mac(1), number(0)), Err(Refused::Remote));
        assert_eq!(table.bind(mac(1), number(1)), Ok(()));
    }
}
