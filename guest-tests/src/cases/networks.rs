//! Two daemons with a guest each in network namespaces, over the links that real hosts use.

use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;

use anyhow::{Result, bail};

use super::case::{Case, skip};
use super::programs::{self, ALL_SIZES, CONNECTED, DATAGRAMS, Program};
use super::shared::Shared;
use super::two_daemons::TwoDaemons;
use crate::guest_with_daemon::{HostOptions, IPV4, IPV6};
use crate::image::GuestImage;
use crate::namespaces::{INTERFACE, Namespaces};

/// Addresses of the hosts, which are invisible to the guests.
const OUTER: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0x99, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0x99, 0, 0, 0, 0, 0, 2)];
/// MTU of a tunnel through the hosts' network of 1500 bytes.
const TUNNEL_MTU: u32 = 1430;
/// MTU that is large enough for packets with 4096 bytes of payload.
const PACKET_MTU: u32 = 4200;

/// The same programs over a tunnel and over the interfaces of the hosts. Both ends are equal, so one direction is
/// enough.
pub(crate) fn cases() -> Vec<Case> {
    let tunnel = Shared::new(|image| boot(image, "vxlan", 1500, TUNNEL_MTU, vxlan));
    let packet = Shared::new(|image| boot(image, "packet", PACKET_MTU, PACKET_MTU, af_packet));
    // Latency of all sizes takes long, and does not depend on the wire.
    let bandwidth = &ALL_SIZES[..3];
    let (ipv4, ipv6) = (IPV4.map(Into::into), IPV6.map(Into::into));
    let mut cases = [
        group("vxlan/ipv4", &CONNECTED, &tunnel, ipv4),
        group("vxlan/ipv4", &DATAGRAMS, &tunnel, ipv4),
        group("af_packet/ipv6-4096", &CONNECTED, &packet, ipv6),
        group("af_packet/ipv4-4096", &DATAGRAMS, &packet, ipv4),
        group("af_packet/ipv4-4096", bandwidth, &packet, ipv4),
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>();
    cases.push(tunnel.case("vxlan/nothing-dropped", |hosts: &TwoDaemons| nothing_dropped(hosts, &VXLAN_DROPS)));
    cases.push(packet.case("af_packet/nothing-dropped", |hosts: &TwoDaemons| nothing_dropped(hosts, &[])));
    // Cases of one pair of guests follow each other, so that only one pair runs at a time.
    cases.sort_by_key(|case| case.name.starts_with("af_packet"));
    cases
}

fn group(name: &str, programs: &[Program], hosts: &Rc<Shared<TwoDaemons>>, ip: [IpAddr; 2]) -> Vec<Case> {
    let programs: Vec<_> = programs.iter().copied().map(Program::one_way).collect();
    programs::cases(name, &programs, hosts, move |hosts: &TwoDaemons, program, server| {
        program.run(&hosts.endpoints(ip, None)?, server)
    })
}

fn boot(image: &GuestImage, purpose: &str, wire_mtu: u32, mtu: u32, uplink: fn(usize) -> String) -> Result<TwoDaemons> {
    let network =
        Namespaces::new(purpose, wire_mtu, OUTER.map(Into::into)).map_err(|error| skip(format!("{error:#}")))?;
    TwoDaemons::boot_in(Some(network), image, mtu, |_, end| HostOptions::new(format!("{},mtu={mtu}", uplink(end))))
}

fn vxlan(end: usize) -> String {
    format!("uplink=vxlan:{},remote={},vni=77", OUTER[end], OUTER[1 - end])
}

/// Returns the link of one end. One of the ends has more threads for each device than it needs here.
fn af_packet(end: usize) -> String {
    format!("uplink=af_packet:{INTERFACE},port-threads={}", 1 + 2 * end)
}

const VXLAN_DROPS: [&str; 4] =
    ["vxlan_dropped_sender", "vxlan_dropped_malformed", "vxlan_dropped_vni", "vxlan_dropped_congested"];

/// The programs have not increased the counters of discarded frames.
fn nothing_dropped(hosts: &TwoDaemons, more: &[&str]) -> Result<String> {
    let drops = ["too_long", "no_room", "malformed", "damaged", "address", "refused", "deferred"];
    let drops = drops.map(|word| format!("wire_dropped_{word}"));
    for counter in drops.iter().map(String::as_str).chain(more.iter().copied()) {
        match hosts.counter(counter)? {
            0 => {}
            count => bail!("{counter} is {count}"),
        }
    }
    let (sent, received) = (hosts.counter("wire_frames_sent")?, hosts.counter("wire_frames_received")?);
    if sent == 0 || hosts.counter("passed_out")? == 0 {
        bail!("nothing went over the wire");
    }
    Ok(format!("{sent} frames sent, {received} received, {} sent again", hosts.counter("wire_resent")?))
}
