//! Parsers for ARP, RARP and neighbour discovery messages of the network function.
//!
//! A receiver caches the Ethernet address of the IP address in such a message, so a message is either parsed completely
//! or dropped: a receiver that is more lenient than this parser would cache an address that no rule has checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pvrdma_verbs::{Gid, MacAddr};

/// Hop limit that a neighbour discovery message must arrive with (RFC 4861, 6.1 and 7.1).
const HOP_LIMIT: u8 = 255;
/// ICMPv6 types (RFC 4861, 4).
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
/// Source and target link-layer address options (RFC 4861, 4.6.1).
const LAYER2_OPTIONS: std::ops::RangeInclusive<u8> = 1..=2;
/// Operations of ARP (RFC 826) and of RARP (RFC 903).
const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const REVERSE_REQUEST: u8 = 3;

/// Statement of a host about itself, as a message contains it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Station {
    /// IP addresses that the host claims.
    pub(super) addresses: [Option<Gid>; 2],
    /// Ethernet address that it claims for them.
    pub(super) hardware: Option<MacAddr>,
    /// The host claims to be a router.
    pub(super) is_router: bool,
}

/// Parses an ARP packet for IPv4 over Ethernet. Returns `None` if it is something else, or incomplete. A probe has no
/// sender address (RFC 5227).
pub(super) fn arp(body: &[u8]) -> Option<Station> {
    let packet = body.first_chunk::<28>()?;
    let [0, 1, 8, 0, 6, 4, 0, REQUEST | REPLY, a, b, c, d, e, f, i, j, k, l, ..] = *packet else { return None };
    let sender = Ipv4Addr::new(i, j, k, l);
    let address = (!sender.is_unspecified()).then(|| IpAddr::V4(sender).into());
    Some(Station { addresses: [address, None], hardware: Some(MacAddr([a, b, c, d, e, f])), is_router: false })
}

/// Parses a RARP request of a host for its own address, which VMMs send to teach switches the new place of a machine.
/// Returns `None` if it is something else.
pub(super) fn rarp(body: &[u8]) -> Option<Station> {
    let packet = body.first_chunk::<28>()?;
    let [0, 1, 8, 0, 6, 4, 0, REVERSE_REQUEST, rest @ ..] = packet else { return None };
    let (sender, rest) = rest.split_first_chunk::<6>()?;
    let ([0, 0, 0, 0], rest) = rest.split_first_chunk::<4>()? else { return None };
    let (target, rest) = rest.split_first_chunk::<6>()?;
    let own = sender == target && rest == [0; 4];
    own.then(|| Station { hardware: Some(MacAddr(*sender)), ..Station::default() })
}

/// Returns `true` if an ICMPv6 type is one of neighbour discovery.
pub(super) const fn is_discovery(kind: u8) -> bool {
    matches!(kind, ROUTER_SOLICITATION..=REDIRECT)
}

/// Parses a message of neighbour discovery, which begins `at` bytes into an IPv6 packet. Returns `None` if it is
/// incomplete, or violates RFC 4861.
pub(super) fn discovery(packet: &[u8], at: usize) -> Option<Station> {
    let header = packet.first_chunk::<40>()?;
    let [_, _, _, _, high, low, _, HOP_LIMIT, ..] = *header else { return None };
    // Receivers treat bytes behind the end of the packet as padding.
    let length = usize::from(u16::from_be_bytes([high, low]));
    let message = packet.get(at..length.checked_add(header.len())?)?;
    let [kind, 0, ..] = *message else { return None };
    let fixed = match kind {
        ROUTER_SOLICITATION => 8,
        ROUTER_ADVERTISEMENT => 16,
        NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT => 24,
        REDIRECT => 40,
        _ => return None,
    };
    let hardware = hardware_address(message.get(fixed..)?)?;
    // The receiver of a redirect caches the Ethernet address of its target, if the message contains that.
    let has_target = kind == NEIGHBOUR_ADVERTISEMENT || kind == REDIRECT && hardware.is_some();
    let target = if has_target { address(message, 8) } else { None };
    let is_router = kind == ROUTER_ADVERTISEMENT;
    Some(Station { addresses: [address(header, 8), target], hardware, is_router })
}

/// Returns the Ethernet address in the options. `None`: they are malformed, or contradict each other.
fn hardware_address(mut options: &[u8]) -> Option<Option<MacAddr>> {
    let mut found = None;
    while let [kind, eights, ..] = *options {
        let length = usize::from(eights).checked_mul(8).filter(|length| *length > 0)?;
        let (option, rest) = options.split_at_checked(length)?;
        if LAYER2_OPTIONS.contains(&kind) {
            let [_, _, a, b, c, d, e, f] = *option else { return None };
            let hardware = MacAddr([a, b, c, d, e, f]);
            if found.is_some_and(|found| found != hardware) {
                return None;
            }
            found = Some(hardware);
        }
        options = rest;
    }
    options.is_empty().then_some(found)
}

/// Returns the address at an offset, unless it is unspecified.
fn address(bytes: &[u8], at: usize) -> Option<Gid> {
    let address = Ipv6Addr::from(*bytes.get(at..)?.first_chunk::<16>()?);
    (!address.is_unspecified()).then(|| IpAddr::V6(address).into())
}
