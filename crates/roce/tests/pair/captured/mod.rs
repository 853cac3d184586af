//! One half of a captured connection against our engine: the captured requester with our responder, and the captured
//! responder with our requester.
//!
//! Our packets must equal the captured ones except for fields with a free choice: the IPv4 identification, and the flow
//! label, which rxe does not copy to the IPv6 header.

mod losses;
mod packets;
mod requester;

use pvrdma_roce::{
    EgressMarking, Handled, IcrcRule, Origin, Path, Responder, admit_connected,
    wire::{Aeth, Extension, Header, MAX_FRAME, Network, Packet, Service},
};
use pvrdma_verbs_types::{Access, AddressVector, GidType, Mtu, Psn, QpAttrs, Qpn};

use super::host::Host;
use super::pcap;

const RECEIVES: u64 = 0x9_0000_0000;

/// The captures in which nothing was lost, with their path MTU.
const CLEAN: [(&str, Mtu); 22] = [
    ("ops_mix", Mtu::M1024),
    ("ops_mix_v6", Mtu::M512),
    ("rc_pingpong_v4", Mtu::M1024),
    ("rc_pingpong_v6ll", Mtu::M4096),
    ("srq_pingpong_v4", Mtu::M1024),
    ("write_bw_m1024", Mtu::M1024),
    ("write_bw_m4096", Mtu::M4096),
    ("read_bw_m1024", Mtu::M1024),
    ("read_bw_m4096", Mtu::M4096),
    ("send_bw_m1024", Mtu::M1024),
    ("send_bw_m4096", Mtu::M4096),
    ("atomic_bw_fadd", Mtu::M4096),
    ("atomic_bw_cswap", Mtu::M4096),
    ("write_vlan_tc", Mtu::M1024),
    ("write_v6global", Mtu::M2048),
    ("psn_wrap", Mtu::M1024),
    ("write_m256_ackreq", Mtu::M256),
    ("send_inv_mw", Mtu::M1024),
    ("rping_v4", Mtu::M4096),
    ("rping_v6ll", Mtu::M4096),
    ("ucmatose_v4", Mtu::M4096),
    ("srq_limit", Mtu::M1024),
];

fn is_rc(packet: &Packet<'_>) -> bool {
    packet.header.bth.opcode.info().is_some_and(|info| info.service == Service::Rc)
}

fn is_response(packet: &Packet<'_>) -> bool {
    packet.header.bth.opcode.info().is_some_and(|info| info.operation.is_response())
}

/// Returns the parts of a header that must equal the captured ones.
fn comparable(header: &Header) -> Header {
    let mut header = *header;
    match &mut header.network {
        Network::V1(_) => {}
        Network::V2Ipv4(ip, _) => ip.identification = 0,
        Network::V2Ipv6(ip, _) => ip.flow_label = 0,
    }
    header
}

/// Attributes and path of the end that a packet was sent to, given its sender.
fn receiver_of(packet: &Packet<'_>, sender: Qpn, mtu: Mtu, flow_label: u32) -> (QpAttrs, Path) {
    let header = &packet.header;
    let (ethernet, network) = (header.ethernet, header.network);
    let av = AddressVector {
        dgid: network.source(),
        dmac: ethernet.source,
        hop_limit: 64,
        traffic_class: network.traffic_class(),
        flow_label,
        ..AddressVector::default()
    };
    // rxe sends tags with PCP 0, unless the VLAN device maps priorities: then requests and responses alike.
    let av = AddressVector { service_level: ethernet.vlan.map_or(0, |vlan| vlan.pcp), ..av };
    let origin = Origin {
        mac: ethernet.destination,
        gid: network.destination(),
        kind: GidType::RoceV2,
        vlan: ethernet.vlan_id(),
        marks: EgressMarking::default(),
        icrc: IcrcRule::Always,
    };
    let attrs = QpAttrs {
        path_mtu: mtu,
        dest_qpn: sender,
        av,
        rq_psn: header.bth.psn,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttrs::default()
    };
    (attrs, Path::connected(&origin, &av, header.bth.destination, sender).unwrap())
}

/// Returns the flow label of a connection whose creator chose one. In a capture it shows in the source port only.
fn flow_label(packets: &[&Packet<'_>], name: &str) -> u32 {
    match name {
        "ops_mix_v6" => 0x12345,
        _ if name.starts_with("rping") || name.starts_with("ucmatose") => match packets[0].header.network {
            // Any flow label that results in this port will do.
            Network::V2Ipv4(_, udp) | Network::V2Ipv6(_, udp) => u32::from(udp.source_port & 0x3fff),
            Network::V1(_) => 0,
        },
        _ => 0,
    }
}

/// Puts the receiver's memory into the state that the captured answers show.
fn preload(host: &mut Host, packets: &[&Packet<'_>], mtu: Mtu) {
    for request in packets.iter().rev() {
        let first = request.header.bth.psn;
        match request.header.extension {
            Extension::Reth(reth) if request.header.bth.opcode.0 == 0x0c => {
                for answer in packets.iter().filter(|answer| is_response(answer)) {
                    let index = answer.header.bth.psn.since(first);
                    let count = reth.length.div_ceil(mtu.bytes());
                    if let Ok(index) = u64::try_from(index).map_err(|_| ())
                        && index < u64::from(count)
                        && !answer.payload.is_empty()
                    {
                        host.memory.write(reth.address + index * u64::from(mtu.bytes()), answer.payload);
                    }
                }
            }
            Extension::AtomicEth(atomic) => {
                for answer in packets.iter().filter(|answer| answer.header.bth.psn == first) {
                    if let Extension::AtomicAckEth(_, ack) = answer.header.extension {
                        host.memory.write(atomic.address, &ack.original.to_le_bytes());
                    }
                }
            }
            _ => {}
        }
    }
}

/// The two directions of each connection: requests to one QPN and what came back.
fn connections<'p>(packets: &'p [Packet<'p>]) -> Vec<(Qpn, Qpn, Vec<&'p Packet<'p>>)> {
    let mut found: Vec<(Qpn, Qpn, Vec<&Packet<'_>>)> = Vec::new();
    for request in packets.iter().filter(|packet| is_rc(packet) && !is_response(packet)) {
        let to = request.header.bth.destination;
        if found.iter().any(|(own, ..)| *own == to) {
            continue;
        }
        let back = packets.iter().find(|packet| {
            is_rc(packet)
                && is_response(packet)
                && packet.header.network.source() == request.header.network.destination()
                && (0..200).contains(&packet.header.bth.psn.since(request.header.bth.psn))
        });
        let from = back.map_or(Qpn::new(0), |packet| packet.header.bth.destination);
        let both = packets
            .iter()
            .filter(|packet| {
                let at = packet.header.bth.destination;
                is_rc(packet) && (at == to && !is_response(packet) || at == from && is_response(packet))
            })
            .collect();
        found.push((to, from, both));
    }
    found
}

/// An answer: header and payload.
type Answer = (Header, Vec<u8>);

/// Returns our responder's answers to one captured direction, and the captured answers.
fn answers(
    packets: &[&Packet<'_>],
    own: Qpn,
    peer: Qpn,
    mtu: Mtu,
    label: u32,
    prepare: impl Fn(&mut Host, &mut QpAttrs),
) -> (Vec<Answer>, Vec<Answer>, Host) {
    let (mut attrs, path) = receiver_of(packets[0], peer, mtu, label);
    let mut host = Host::new();
    host.any_key = true;
    for i in 0..64 {
        host.post_receive(i, RECEIVES + i * 0x10_0000, 0x10_0000);
    }
    preload(&mut host, packets, mtu);
    prepare(&mut host, &mut attrs);
    let mut responder = Responder::new(&attrs, path);
    let mut out = [0; MAX_FRAME];
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for packet in packets {
        if is_response(packet) {
            theirs.push((comparable(&packet.header), packet.payload.to_vec()));
            continue;
        }
        if admit_connected(packet, own, &path).is_ok() {
            assert_ne!(responder.handle_packet(packet, &mut host), Handled::Deferred, "{packet}");
        }
        while let Some(length) = responder.poll_transmit(&mut host, &mut out) {
            let answer = Packet::parse(&out[..length]).unwrap();
            assert_eq!(answer.verify(), Ok(()));
            ours.push((comparable(&answer.header), answer.payload.to_vec()));
        }
    }
    (ours, theirs, host)
}

#[test]
fn our_responder_answers_as_captured() {
    let mut compared = 0;
    for (name, mtu) in CLEAN {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        for (own, peer, both) in connections(&packets) {
            let label = flow_label(&both, name);
            let (ours, theirs, host) = answers(&both, own, peer, mtu, label, |_, _| {});
            for (i, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                assert_eq!(ours.0, theirs.0, "{name} {own} answer {i}\n{}\n{}", ours.0, theirs.0);
                // rping changes the memory that is read from one round to the next.
                assert_eq!(ours.1.len(), theirs.1.len(), "{name} {own} answer {i}");
                assert!(ours.1 == theirs.1 || name.starts_with("rping"), "{name} {own} answer {i}: payload");
            }
            assert_eq!(ours.len(), theirs.len(), "{name} {own}");
            let refused = name == "send_inv_mw";
            assert_eq!(host.failed, refused, "{name}");
            compared += ours.len();
        }
    }
    assert!(compared > 200, "{compared}");
}

/// We refuse requests as rxe does: with the same NAK, and with no answer afterwards.
#[test]
fn our_responder_refuses_as_captured() {
    type Prepare = fn(&mut Host, &mut QpAttrs, u64);
    let cases: [(&str, Prepare); 8] = [
        ("bad_rkey_write", |host, _, _| host.any_key = false),
        ("bad_rkey_read", |host, _, _| host.any_key = false),
        ("bad_rkey_atomic", |host, _, _| host.any_key = false),
        ("write_out_of_bounds", |host, _, address| host.memory_end = address + 1000),
        ("mr_no_remote_write", |host, _, _| host.mr_access -= Access::REMOTE_WRITE),
        ("qp_no_remote_write", |host, _, _| host.qp_access -= Access::REMOTE_WRITE),
        ("misaligned_atomic", |_, _, _| {}),
        ("zero_dest_rd_atomic", |host, attrs, _| {
            host.max_dest_rd_atomic = 0;
            attrs.max_dest_rd_atomic = 0;
        }),
    ];
    for (name, prepare) in cases {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, peer, both) = connections(&packets).remove(0);
        let address = both.iter().find_map(|packet| packet.header.extension.reth()).map_or(0, |reth| reth.address);
        let adapt = |host: &mut Host, attrs: &mut QpAttrs| {
            host.receives.clear();
            prepare(host, attrs, address);
        };
        let (ours, theirs, host) = answers(&both, own, peer, Mtu::M1024, 0, adapt);
        assert_eq!(ours, theirs, "{name}");
        assert!(host.failed && !host.events.is_empty(), "{name}");
    }
}

/// Opcode, PSN, syndrome and MSN of an answer.
fn summary(header: &Header) -> (u8, u32, Option<(u8, u32)>) {
    let aeth = header.extension.aeth().map(|Aeth { syndrome, msn }| (syndrome.byte(), msn));
    (header.bth.opcode.0, header.bth.psn.get(), aeth)
}

/// Answers to hand-made requests, compared with those of rxe. In the two cases that differ, the architecture leaves the
/// choice open.
#[test]
fn injected_requests() {
    let frames = pcap::load("inject");
    let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
    let mut qpns = Vec::new();
    for packet in &packets {
        let to = packet.header.bth.destination;
        if to.get() < 0x0f_0000 && !qpns.contains(&to) {
            qpns.push(to);
        }
    }
    assert_eq!(qpns.len(), 38);
    let mut differences = Vec::new();
    for (i, &own) in qpns.iter().enumerate() {
        let peer = Qpn::new(0x0f_0000 + u32::try_from(i).unwrap());
        let (mut attrs, path) = receiver_of(&packets[0], peer, Mtu::M1024, 0);
        attrs.rq_psn = Psn::new(0x1000);
        attrs.min_rnr_timer = 14;
        let mut host = Host::new();
        host.key = 0x5368;
        host.rnr_timer = 14;
        for receive in 0..if matches!(i, 26 | 27) { 0 } else { 4 } {
            host.post_receive(receive, RECEIVES, 4096);
        }
        let mut responder = Responder::new(&attrs, path);
        let mut out = [0; MAX_FRAME];
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for packet in &packets {
            if packet.header.bth.destination == peer {
                theirs.push(summary(&packet.header));
            }
            if packet.header.bth.destination == own && admit_connected(packet, own, &path).is_ok() {
                responder.handle_packet(packet, &mut host);
                while let Some(length) = responder.poll_transmit(&mut host, &mut out) {
                    ours.push(summary(&Packet::parse(&out[..length]).unwrap().header));
                }
            }
        }
        if ours != theirs {
            differences.push((i, ours, theirs));
        }
    }
    let ack = |psn, msn| (0x11, psn, Some((0x1f, msn)));
    let [first, last, only] =
        [(0x0d, 0x1000), (0x0f, 0x1001), (0x10, 0x1001)].map(|(op, psn)| (op, psn, Some((0x1f, 1))));
    let expected = vec![
        // A duplicate from before the connection's first packet: we acknowledge the PSN before the first, rxe
        // acknowledges PSN 0xffffff.
        (11, vec![ack(0xfff, 0)], vec![ack(0x00ff_ffff, 0)]),
        // The second half of a READ is requested again: we answer it as a READ of its own, with ONLY instead of LAST.
        (34, vec![first, last, only], vec![first, last, last]),
    ];
    assert_eq!(differences, expected);
}

/// Connections with losses before the capture point, or with duplicates. rxe answers more often than we do (with an ACK
/// for each duplicate, whether it asks for one or not), and some of its answers are missing from the capture. Each
/// answer that we send for the first time must equal the captured one.
#[test]
fn damaged_connections() {
    let mut compared = 0;
    for (name, mtu) in [
        ("reorder_write", Mtu::M256),
        ("reorder_send", Mtu::M256),
        ("reorder_read", Mtu::M256),
        ("duplicate_mix", Mtu::M256),
    ] {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        let (own, peer, both) = connections(&packets).remove(0);
        let requests = both.iter().filter(|packet| !is_response(packet)).map(|packet| packet.header.bth.psn);
        let first = requests.reduce(|first, psn| if psn.precedes(first) { psn } else { first }).unwrap();
        let (ours, theirs, host) = answers(&both, own, peer, mtu, 0, |_, attrs| attrs.rq_psn = first);
        assert!(!host.failed, "{name}");
        let matched = ours.iter().filter(|answer| theirs.contains(answer)).count();
        let missed: Vec<String> =
            ours.iter().filter(|answer| !theirs.contains(answer)).map(|(header, _)| header.to_string()).collect();
        // Answers that were lost before the capture point are in no capture. About three in a hundred were lost.
        assert!(missed.len() * 10 <= ours.len(), "{name}: {matched} of {}\n{}", ours.len(), missed.join("\n"));
        compared += matched;
    }
    assert!(compared > 150, "{compared}");
}
