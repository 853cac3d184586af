//! Rules of address ownership, as a value on virtual time: each call receives the time and returns the next action of
//! the caller. `docs/dev/addresses.md` lists the rules in a table.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_verbs::{AddressRule, OtherAddresses, VerbsError};
use pvrdma_verbs_types::Gid;

use super::address::Address;
use super::remote::RemoteHosts;

/// Time for which an address stays reserved for its last owner. Also the time for which a remote host must have been
/// silent before the device probes for its address.
pub(crate) const HOLD: Duration = Duration::from_secs(60);
/// Duration and interval of a probe for an address that no remote host is known to have used.
pub(super) const PROBE: Schedule = (Duration::from_secs(1), Duration::from_millis(300));
/// Duration and interval of a probe for an address that a remote host has used.
pub(super) const LONG_PROBE: Schedule = (HOLD, Duration::from_secs(5));
/// Maximum number of addresses that a device holds without having bound them.
pub(super) const MAX_UNBOUND: usize = 256;
/// Maximum number of addresses that a device probes for at a time.
pub(super) const MAX_PROBING: usize = 32;

/// Duration and interval.
type Schedule = (Duration, Duration);

/// Reason why a device never gets an address, unless the configuration changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The device has a list of addresses, and this one is not in it.
    NotListed,
    /// The address is reserved for another device.
    Reserved,
}

impl From<Refused> for VerbsError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NotListed => Self::NotAllowed("the address is not listed for the device"),
            Refused::Reserved => Self::NotAllowed("the address is reserved for another device"),
        }
    }
}

/// Result of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claimed {
    /// The device owns the address.
    Granted,
    /// The device does not own it yet.
    Waiting(Wait),
}

/// Reason why a claim waits, and the earliest time at which to repeat it. Without a time, the caller is notified when
/// it should claim again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wait {
    pub(crate) why: Why,
    pub(crate) until: Option<Duration>,
}

/// Reason why a claim waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Why {
    /// Another device owns the address, or owned it less than a minute ago.
    Taken,
    /// A host beyond the uplink used it less than a minute ago.
    Remote,
    /// Hosts beyond the uplink are being probed for it.
    Probing,
    /// The device already has the maximum number of probes in progress.
    Busy,
    /// The link of the device is down.
    LinkDown,
    /// A fault on request has removed it.
    Removed,
    /// It is not the address of a single host. The guest's kernel may bind that of a group, which is one of its
    /// interface (`autojoin`).
    NoHost,
}

/// Conflict: a host beyond the uplink uses an address that a device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Conflict {
    /// The device.
    pub(crate) mac: MacAddr,
    pub(crate) address: Address,
    /// The device keeps the address, because it is listed or the rule of the device is `any`.
    pub(crate) kept: bool,
}

/// Kind of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// The RDMA function binds the address.
    Bind,
    /// The RDMA function is restored with the address bound.
    Restore,
    /// The network function announces it by ARP or neighbour discovery, from this Ethernet address.
    Announce(MacAddr),
}

/// A probe in progress.
#[derive(Clone, Copy, Debug)]
struct Probe {
    /// End of the probe.
    until: Duration,
    /// Time of the next probe frame, and the interval after that.
    next: Duration,
    every: Duration,
    /// The device that had the address before, bound or not. If it announces the address during the probe, it gets the
    /// address back.
    former: Option<MacAddr>,
}

/// Owner of an address, or its last one.
#[derive(Clone, Copy, Debug)]
struct Holder {
    mac: MacAddr,
    /// The Ethernet address that the network function announced it from. Behind a bridge it differs from `mac`.
    station: MacAddr,
    /// Number of current bindings.
    bound: u32,
    /// Time of the last binding or announcement.
    last: Duration,
    /// The device has unbound the address, and has neither bound nor announced it since.
    released: bool,
    probe: Option<Probe>,
    /// Time at which a conflict was last reported although the device kept the address.
    told: Option<Duration>,
}

impl Holder {
    fn is_probing(&self, now: Duration) -> bool {
        self.probe.is_some_and(|probe| probe.until > now)
    }

    fn is_valid(&self, now: Duration) -> bool {
        self.bound > 0 || self.is_probing(now) || is_recent(self.last, now)
    }

    /// Returns the time from which another device can get the address. `None`: only once this one releases it.
    fn until(&self) -> Option<Duration> {
        let held = self.last.saturating_add(HOLD);
        (self.bound == 0).then(|| self.probe.map_or(held, |probe| probe.until.max(held)))
    }
}

/// Returns `true` for an address of a host. A device with that of a group would get the datagrams of others to it.
fn is_of_host(gid: Gid) -> bool {
    let address = IpAddr::from(gid.0).to_canonical();
    let is_everyone = address == IpAddr::V4(Ipv4Addr::BROADCAST);
    !(address.is_multicast() || is_everyone || address.is_loopback() || address.is_unspecified())
}

fn is_recent(last: Duration, now: Duration) -> bool {
    now.saturating_sub(last) < HOLD
}

/// A current or former device of the network.
#[derive(Debug, Default)]
struct Member {
    rule: AddressRule,
    /// Number of ports and adapters with this MAC address: zero while the device is away.
    present: u32,
    link_down: bool,
    /// The device can probe hosts beyond the uplink.
    probes: bool,
    /// Addresses that the device holds, possibly without having bound them, the oldest first.
    unbound: VecDeque<Address>,
    /// Addresses that the device probes for.
    probing: Vec<Address>,
    conflicts: u64,
    /// Number of messages of other machines with the MAC address and an address of the device.
    twins: u64,
}

/// The addresses of a network.
#[derive(Debug, Default)]
pub(super) struct Table {
    members: HashMap<MacAddr, Member>,
    /// Devices that each address is reserved for.
    reserved: HashMap<Gid, Vec<MacAddr>>,
    holders: HashMap<Address, Holder>,
    remote: RemoteHosts,
}

impl Table {
    /// Records that a port or an adapter of a device joins the network.
    pub(super) fn join(&mut self, mac: MacAddr, rule: &AddressRule) {
        let member = self.members.entry(mac).or_default();
        member.present = member.present.saturating_add(1);
        let changed = member.present == 1 || member.rule != *rule;
        member.rule = rule.clone();
        if changed {
            self.unreserve(mac);
            for gid in rule.reserved(mac) {
                self.reserved.entry(gid).or_default().push(mac);
            }
        }
    }

    /// Records that a port or an adapter of a device leaves the network. The device keeps its addresses for a while.
    pub(super) fn leave(&mut self, mac: MacAddr) {
        let Some(member) = self.members.get_mut(&mac) else { return };
        member.present = member.present.saturating_sub(1);
        if member.present == 0 {
            self.unreserve(mac);
        }
    }

    fn unreserve(&mut self, mac: MacAddr) {
        self.reserved.retain(|_, macs| {
            macs.retain(|other| *other != mac);
            !macs.is_empty()
        });
    }

    /// Sets whether the device can probe hosts beyond the uplink.
    pub(super) fn set_probes(&mut self, mac: MacAddr, probes: bool) {
        self.members.entry(mac).or_default().probes = probes;
    }

    /// Records that the link of a device goes up or down. Probes cannot be answered while the link is down, so they
    /// end.
    pub(super) fn set_link(&mut self, mac: MacAddr, up: bool) {
        let Self { members, holders, .. } = self;
        let Some(member) = members.get_mut(&mac) else { return };
        member.link_down = !up;
        for address in if up { Vec::new() } else { std::mem::take(&mut member.probing) } {
            if holders.get(&address).is_some_and(|holder| holder.mac == mac && holder.probe.is_some()) {
                holders.remove(&address);
            }
        }
    }

    /// Returns `true` if a device of the network has this MAC address.
    pub(super) fn is_member(&self, mac: MacAddr) -> bool {
        self.members.get(&mac).is_some_and(|member| member.present > 0)
    }

    /// Returns the number of conflicts of a device.
    pub(super) fn conflicts(&self, mac: MacAddr) -> u64 {
        self.members.get(&mac).map_or(0, |member| member.conflicts)
    }

    /// Returns the number of messages of other machines with the MAC address and an address of a device.
    pub(super) fn twins(&self, mac: MacAddr) -> u64 {
        self.members.get(&mac).map_or(0, |member| member.twins)
    }

    /// Returns `true` if a device has bound an address.
    pub(super) fn has_bound(&self, mac: MacAddr, address: Address) -> bool {
        self.holders.get(&address).is_some_and(|holder| holder.mac == mac && holder.bound > 0)
    }

    /// Returns `true` unless an address is reserved for other devices.
    pub(super) fn may_probe(&self, mac: MacAddr, gid: Gid) -> bool {
        self.reserved.get(&gid).is_none_or(|macs| macs.contains(&mac))
    }

    /// Claims an address for a device.
    ///
    /// # Errors
    /// The rules never give the device this address.
    pub(super) fn claim(
        &mut self,
        mac: MacAddr,
        address: Address,
        claim: Claim,
        now: Duration,
    ) -> Result<Claimed, Refused> {
        let claimed = self.judge(mac, address, claim, now)?;
        if claimed == Claimed::Granted {
            self.hold(mac, address, claim, now);
            self.remote.forget(address);
        }
        Ok(claimed)
    }

    fn judge(&mut self, mac: MacAddr, address: Address, claim: Claim, now: Duration) -> Result<Claimed, Refused> {
        let waiting = |why, until| Ok(Claimed::Waiting(Wait { why, until }));
        if !is_of_host(address.0) {
            return waiting(Why::NoHost, None);
        }
        let holder = self.holders.get(&address).copied();
        let other = holder.filter(|holder| holder.mac != mac && holder.is_valid(now));
        match self.reserved.get(&address.0) {
            // An address that another device has bound stays there until it is unbound, even if it is also reserved for
            // this device, because connections of the other device depend on it.
            Some(macs) if macs.contains(&mac) => {
                return match other.filter(|other| other.bound > 0) {
                    Some(_) => waiting(Why::Taken, None),
                    None => Ok(Claimed::Granted),
                };
            }
            Some(_) => return Err(Refused::Reserved),
            None => {}
        }
        let others = self.members.get(&mac).map_or(OtherAddresses::Own, |member| member.rule.others);
        if others == OtherAddresses::Refuse {
            return Err(Refused::NotListed);
        }
        if let Some(other) = other {
            let former = other.is_probing(now) && other.probe.is_some_and(|probe| probe.former == Some(mac));
            if former && matches!(claim, Claim::Announce(_)) {
                return Ok(Claimed::Granted);
            }
            return waiting(Why::Taken, other.until());
        }
        if others == OtherAddresses::Any {
            return Ok(Claimed::Granted);
        }
        // The last owner still owns the address. If a host beyond the uplink had used it since, the holder would have
        // been removed.
        if let Some(own) = holder.filter(|holder| holder.mac == mac) {
            return match own.probe.filter(|_| own.is_probing(now)) {
                Some(probe) => waiting(Why::Probing, Some(probe.until)),
                None => Ok(Claimed::Granted),
            };
        }
        // Moments ago the device had the address in another process or on another host, which gives it up now. A probe
        // would only delay its connections, and the remote entry that it would find is the device's own.
        if claim == Claim::Restore {
            return Ok(Claimed::Granted);
        }
        self.probe(mac, address, claim, now)
    }

    /// Starts to probe hosts beyond the uplink for an address that no device owns.
    fn probe(&mut self, mac: MacAddr, address: Address, claim: Claim, now: Duration) -> Result<Claimed, Refused> {
        let waiting = |why, until| Ok(Claimed::Waiting(Wait { why, until }));
        let member = self.members.entry(mac).or_default();
        if member.link_down && member.probes {
            return waiting(Why::LinkDown, None);
        }
        let remote = self.remote.last(address, now);
        if let Some(last) = remote.filter(|last| is_recent(*last, now)) {
            return waiting(Why::Remote, Some(last.saturating_add(HOLD)));
        }
        if !member.probes {
            return Ok(Claimed::Granted);
        }
        member
            .probing
            .retain(|address| self.holders.get(address).is_some_and(|it| it.mac == mac && it.is_probing(now)));
        if member.probing.len() >= MAX_PROBING {
            return waiting(Why::Busy, Some(now.saturating_add(PROBE.0)));
        }
        member.probing.push(address);
        let (wait, every) = if remote.is_some() { LONG_PROBE } else { PROBE };
        let until = now.saturating_add(wait);
        let former = self.holders.get(&address).map(|holder| holder.mac);
        self.hold(mac, address, claim, now);
        if let Some(holder) = self.holders.get_mut(&address) {
            // The address counts as bound only when the device claims it again after the probe.
            holder.bound = 0;
            holder.probe = Some(Probe { until, next: now, every, former });
        }
        self.remember_unbound(mac, address);
        waiting(Why::Probing, Some(until))
    }

    /// Gives an address to a device.
    fn hold(&mut self, mac: MacAddr, address: Address, claim: Claim, now: Duration) {
        let new = Holder { mac, station: mac, bound: 0, last: now, released: false, probe: None, told: None };
        let holder = self.holders.entry(address).or_insert(new);
        if holder.mac != mac {
            *holder = new;
        }
        holder.last = now;
        holder.released = false;
        holder.probe = None;
        match claim {
            Claim::Bind | Claim::Restore => holder.bound = holder.bound.saturating_add(1),
            Claim::Announce(station) => holder.station = station,
        }
        if holder.bound == 0 {
            self.remember_unbound(mac, address);
        }
    }

    /// Records that a device no longer binds an address. Returns `true` if that may concern waiting devices.
    pub(super) fn unbind(&mut self, mac: MacAddr, address: Address, now: Duration) -> bool {
        let Some(holder) = self.holders.get_mut(&address).filter(|holder| holder.mac == mac) else { return false };
        holder.bound = holder.bound.saturating_sub(1);
        holder.last = now;
        if holder.bound > 0 {
            return false;
        }
        holder.released = true;
        self.remember_unbound(mac, address);
        true
    }

    /// Releases an address of a device, so that others can have it immediately.
    pub(super) fn give_back(&mut self, mac: MacAddr, address: Address) {
        if self.holders.get(&address).is_some_and(|holder| holder.mac == mac) {
            self.holders.remove(&address);
        }
    }

    /// Records that a packet from IP address `address` and Ethernet address `source` arrived over the uplink. Returns
    /// the device whose claim that ends, and the conflict to report, if any.
    pub(super) fn seen(
        &mut self,
        address: Address,
        source: MacAddr,
        now: Duration,
    ) -> (Option<MacAddr>, Option<Conflict>) {
        let holder = self.holders.get(&address).copied();
        let is_own = |holder: &Holder| holder.mac == source || holder.station == source;
        if self.is_member(source) || holder.is_some_and(|holder| is_own(&holder)) {
            return (None, None);
        }
        let Some(holder) = holder else {
            self.remote.seen(address, now);
            return (None, None);
        };
        let reserved = self.reserved.get(&address.0).is_some_and(|macs| macs.contains(&holder.mac));
        let any = self.members.get(&holder.mac).is_some_and(|member| member.rule.others == OtherAddresses::Any);
        let used = holder.is_valid(now) && !holder.released && !holder.is_probing(now);
        let conflict = |kept| Some(Conflict { mac: holder.mac, address, kept });
        let keeps = reserved || any;
        let reported = if keeps {
            let first = holder.told.is_none_or(|told| !is_recent(told, now));
            if let Some(holder) = self.holders.get_mut(&address).filter(|_| used && first) {
                holder.told = Some(now);
                conflict(true)
            } else {
                None
            }
        } else {
            self.holders.remove(&address);
            self.remote.seen(address, now);
            if used { conflict(false) } else { None }
        };
        if let Some(member) = self.members.get_mut(&holder.mac).filter(|_| reported.is_some()) {
            member.conflicts = member.conflicts.saturating_add(1);
        }
        ((!keeps).then_some(holder.mac), reported)
    }

    /// Records that a host beyond the uplink announces an address from the MAC address of a device of the network.
    /// Returns the conflict to report, at most once a minute. The device keeps its address, because a bridge that loops
    /// frames back looks the same.
    pub(super) fn twin(&mut self, mac: MacAddr, address: Address, now: Duration) -> Option<Conflict> {
        let holder = self.holders.get_mut(&address).filter(|holder| holder.mac == mac && holder.bound > 0)?;
        let member = self.members.get_mut(&mac)?;
        member.twins = member.twins.saturating_add(1);
        if holder.told.is_some_and(|told| is_recent(told, now)) {
            return None;
        }
        holder.told = Some(now);
        member.conflicts = member.conflicts.saturating_add(1);
        Some(Conflict { mac, address, kept: true })
    }

    /// Returns the addresses that a device has to probe for now, and the time of the next call.
    pub(super) fn due_probes(&mut self, mac: MacAddr, now: Duration) -> (Vec<Address>, Option<Duration>) {
        let Self { members, holders, .. } = self;
        let Some(member) = members.get_mut(&mac) else { return (Vec::new(), None) };
        let (mut due, mut next) = (Vec::new(), None::<Duration>);
        member.probing.retain(|address| {
            let holder = holders.get_mut(address).filter(|holder| holder.mac == mac && holder.is_probing(now));
            let Some(probe) = holder.and_then(|holder| holder.probe.as_mut()) else { return false };
            // A probe frame is sent only if enough time is left for the answer.
            let asks = |at: Duration| at.saturating_add(probe.every) <= probe.until;
            if probe.next <= now && asks(now) {
                due.push(*address);
                probe.next = now.saturating_add(probe.every);
            }
            if probe.next > now && asks(probe.next) {
                next = Some(next.map_or(probe.next, |next| next.min(probe.next)));
            }
            true
        });
        (due, next)
    }

    /// Records that a device holds an address without having bound it, and forgets the oldest ones above the limit.
    fn remember_unbound(&mut self, mac: MacAddr, address: Address) {
        let Self { members, holders, .. } = self;
        let member = members.entry(mac).or_default();
        member.unbound.retain(|known| *known != address);
        member.unbound.push_back(address);
        while member.unbound.len() > MAX_UNBOUND
            && let Some(oldest) = member.unbound.pop_front()
        {
            if holders.get(&oldest).is_some_and(|holder| holder.mac == mac && holder.bound == 0) {
                holders.remove(&oldest);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.holders.len(), self.remote.len())
    }
}
