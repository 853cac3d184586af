//! Address claims of hosts: ARP, RARP and neighbour discovery messages of the network function.
//!
//! A receiver caches the Ethernet address that such a message gives for an IP address. A message is therefore either
//! parsed completely or dropped: a receiver that is more lenient than this parser would otherwise cache an address that
//! no rule has checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pvrdma_packet::{Arp, Discovery, DiscoveryOptions, MacAddr};
use pvrdma_verbs_types::Gid;

/// Statement of a host about itself, as a message contains it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Station {
    /// IP addresses that the host claims.
    pub(super) addresses: [Option<Gid>; 2],
    /// IP address that the host wants to claim if no other host has it.
    pub(super) probed: Option<Gid>,
    /// Ethernet address that it claims for them.
    pub(super) hardware: Option<MacAddr>,
    /// The host claims to be a router.
    pub(super) is_router: bool,
}

/// Use of an address by a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AddressUse {
    /// The host claims it.
    Claim(Gid),
    /// The host probes for it. A host that is about to claim the same address then gives it up.
    Probe(Gid),
}

impl Station {
    /// Iterates over the addresses of the message.
    pub(super) fn uses(&self) -> impl Iterator<Item = AddressUse> {
        let claims = self.addresses.into_iter().flatten().map(AddressUse::Claim);
        claims.chain(self.probed.map(AddressUse::Probe))
    }
}

/// Parses an ARP packet for IPv4 over Ethernet. Returns `None` if it is something else, or incomplete. A probe has no
/// sender address (RFC 5227).
pub(super) fn arp(body: &[u8]) -> Option<Station> {
    let packet = Arp::parse(body).filter(|packet| matches!(packet.operation, Arp::REQUEST | Arp::REPLY))?;
    let [sender, target] = [packet.sender_ip, packet.target_ip].map(|address| {
        let address = Ipv4Addr::from(address);
        (!address.is_unspecified()).then(|| IpAddr::V4(address).into())
    });
    let probed = target.filter(|_| sender.is_none());
    Some(Station { addresses: [sender, None], probed, hardware: Some(packet.sender_mac), is_router: false })
}

/// Parses a RARP request of a host for its own address, which VMMs send to teach switches the new place of a machine.
/// Returns `None` if it is something else.
pub(super) fn rarp(body: &[u8]) -> Option<Station> {
    let Arp { operation, sender_mac, sender_ip, target_mac, target_ip } = Arp::parse(body)?;
    let own = sender_mac == target_mac && [sender_ip, target_ip] == [[0; 4]; 2];
    (operation == Arp::REVERSE_REQUEST && own).then(|| Station { hardware: Some(sender_mac), ..Station::default() })
}

/// Parses a message of neighbour discovery, which begins `at` bytes into an IPv6 packet. Returns `None` if it is
/// incomplete, or violates RFC 4861.
pub(super) fn discovery(packet: &[u8], at: usize) -> Option<Station> {
    let message = Discovery::parse(packet, at)?;
    let hardware = hardware_address(message.options())?;
    // The receiver of a redirect caches the Ethernet address of its target, if the message contains that.
    let announces_target =
        message.kind == Discovery::NEIGHBOUR_ADVERTISEMENT || message.kind == Discovery::REDIRECT && hardware.is_some();
    let (source, target) = (address(message.source), message.target.and_then(address));
    // Duplicate address detection (RFC 4862, 5.4.2).
    let probed = target.filter(|_| message.kind == Discovery::NEIGHBOUR_SOLICITATION && source.is_none());
    let is_router = message.kind == Discovery::ROUTER_ADVERTISEMENT;
    Some(Station { addresses: [source, target.filter(|_| announces_target)], probed, hardware, is_router })
}

/// Returns the Ethernet address in the options. `None`: the options are malformed, or contradict each other, so
/// receivers may differ in which one they cache.
fn hardware_address(options: DiscoveryOptions<'_>) -> Option<Option<MacAddr>> {
    let mut found = None;
    for option in options {
        let (kind, bytes) = option.ok()?;
        if matches!(kind, DiscoveryOptions::SOURCE_ADDRESS | DiscoveryOptions::TARGET_ADDRESS) {
            let [_, _, a, b, c, d, e, f] = *bytes else { return None };
            let hardware = MacAddr([a, b, c, d, e, f]);
            if found.is_some_and(|found| found != hardware) {
                return None;
            }
            found = Some(hardware);
        }
    }
    Some(found)
}

/// Returns an address as a GID, unless it is unspecified.
fn address(bytes: [u8; 16]) -> Option<Gid> {
    let address = Ipv6Addr::from(bytes);
    (!address.is_unspecified()).then(|| IpAddr::V6(address).into())
}
