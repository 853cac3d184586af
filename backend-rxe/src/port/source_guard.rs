//! Guards for source addresses and DHCP servers of the network function, for devices with a list of addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pvrdma_packet::{EtherType, Ipv4Header, Ipv6Header, MacAddr, PROTOCOL_UDP, UdpHeader};
use pvrdma_verbs::link_local;

use super::outgoing::{Transport, behind_tags, transport};
use super::rules::{PortRules, Violation};

/// UDP source ports of DHCP servers and relays (RFC 2131, 4.1; RFC 8415, 7.2).
const DHCP_SERVER: u16 = 67;
const DHCPV6_SERVER: u16 = 547;

/// Checks a frame of the device with this MAC address. Returns immediately if no guard is on.
///
/// # Errors
/// The source address is not listed for the device, or the frame is from a DHCP server.
#[inline]
pub(super) fn check(rules: &PortRules, mac: MacAddr, frame: &[u8]) -> Result<(), Violation> {
    if !rules.source_guard && !rules.dhcp_guard {
        return Ok(());
    }
    match behind_tags(frame) {
        Some((Some(EtherType::IPV4), body)) => ipv4(rules, body),
        Some((Some(EtherType::IPV6), body)) => ipv6(rules, mac, body),
        _ => Ok(()),
    }
}

fn is_listed(rules: &PortRules, address: IpAddr) -> bool {
    rules.addresses.as_ref().is_some_and(|rule| rule.listed.contains(&address))
}

fn ipv4(rules: &PortRules, body: &[u8]) -> Result<(), Violation> {
    let ip = Ipv4Header::new(body);
    // Receivers drop a packet that is shorter than its header.
    let Some([a, b, c, d, ..]) = ip.addresses() else { return Err(Violation::Source) };
    let source = Ipv4Addr::new(a, b, c, d);
    // A DHCP client has no address yet.
    if rules.source_guard && !source.is_unspecified() && !is_listed(rules, source.into()) {
        return Err(Violation::Source);
    }
    let has_ports = ip.protocol() == Some(PROTOCOL_UDP) && ip.has_first_byte() == Some(true);
    match rules.dhcp_guard && has_ports {
        true => dhcp(ip.header_len().and_then(|at| source_port(body, at)), DHCP_SERVER),
        false => Ok(()),
    }
}

fn ipv6(rules: &PortRules, mac: MacAddr, body: &[u8]) -> Result<(), Violation> {
    let Some(source) = Ipv6Header::new(body).source().map(Ipv6Addr::from) else { return Err(Violation::Source) };
    // Duplicate address detection uses the unspecified address, and the link-local address always belongs to the
    // device.
    let own = source.is_unspecified() || source.octets() == link_local(mac).0;
    if rules.source_guard && !own && !is_listed(rules, source.into()) {
        return Err(Violation::Source);
    }
    match (rules.dhcp_guard, transport(body)) {
        (true, Transport::Udp(at)) => dhcp(source_port(body, at), DHCPV6_SERVER),
        _ => Ok(()),
    }
}

/// Returns the source port of a UDP header at an offset.
fn source_port(body: &[u8], at: usize) -> Option<u16> {
    body.get(at..).and_then(|udp| UdpHeader::new(udp).source_port())
}

/// Accepts packets that are not from a server. A truncated header may be a server's, so it is refused.
fn dhcp(port: Option<u16>, server: u16) -> Result<(), Violation> {
    match port {
        Some(port) if port != server => Ok(()),
        _ => Err(Violation::Server),
    }
}
