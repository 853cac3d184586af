//! Guards for source addresses and DHCP servers of the network function, for devices with a list of addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pvrdma_packet::{EtherType, Ipv4Header, Ipv6Header, MacAddr, PROTOCOL_UDP, UdpHeader};
use pvrdma_verbs::link_local;

use super::outgoing::{Transport, behind_tags, transport};
use super::rules::{PortRules, Violation};

/// UDP ports of DHCP servers and relays, and of clients (RFC 2131, 4.1; RFC 8415, 7.2). Servers alone send to the port
/// of clients. Many clients do not check the source port, so a server need not use its own.
const DHCP: [u16; 2] = [67, 68];
const DHCPV6: [u16; 2] = [547, 546];

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
        true => dhcp(ip.header_len().and_then(|at| ports(body, at)), DHCP),
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
        (true, Transport::Udp(at)) => dhcp(ports(body, at), DHCPV6),
        _ => Ok(()),
    }
}

/// Returns source and destination port of a UDP header at an offset.
fn ports(body: &[u8], at: usize) -> Option<[u16; 2]> {
    let udp = UdpHeader::new(body.get(at..)?);
    Some([udp.source_port()?, udp.destination_port()?])
}

/// Accepts packets that are not from a server. A truncated header may be a server's, so it is refused.
fn dhcp(ports: Option<[u16; 2]>, [server, client]: [u16; 2]) -> Result<(), Violation> {
    match ports {
        Some([from, to]) if from != server && to != client => Ok(()),
        _ => Err(Violation::Server),
    }
}
