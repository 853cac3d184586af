//! Super-frames as values, and links over a veth pair (as root).

use std::os::fd::AsFd as _;
use std::process::Command;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::Priority;
use pvrdma_link::offload::sample::{carried, data, long_tcp, open_checksum};
use pvrdma_packet::{Checksum, Ethernet};
use pvrdma_roce::wire::{Bth, Extension, Header, Ipv4, Network, Opcode, Packet, Position, Udp, build};
use pvrdma_verbs::testing::skipped;
use pvrdma_verbs_types::{Psn, Qpn};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::namespace::Namespace;

const A: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const B: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

/// Returns a packet from A to B.
fn packet(ident: u16, port: u16, payload: usize) -> Vec<u8> {
    let ip = Ipv4 {
        traffic_class: 0,
        identification: ident,
        dont_fragment: true,
        hop_limit: 64,
        source: [10, 0, 0, 1],
        destination: [10, 0, 0, 2],
    };
    let network = Network::V2Ipv4(ip, Udp { source_port: port, checksum: 0 });
    let ethernet = Ethernet { destination: B, source: A, vlan: None };
    let bth = Bth::new(Opcode::send(Position::Middle), Qpn::new(5), Psn::new(1).plus(ident.into()));
    let payload: Vec<u8> = (0..payload).map(|at| ident.to_be_bytes()[at & 1] ^ at.to_le_bytes()[0]).collect();
    build(&Header { ethernet, network, bth, extension: Extension::None }, &payload).unwrap()
}

/// Returns a mixture of packets that can leave together and packets that cannot.
fn mixture() -> Vec<Vec<u8>> {
    let mut frames: Vec<_> = (10..40).map(|ident| packet(ident, 0xc001, 1024)).collect();
    frames.extend((40..45).map(|ident| packet(ident, 0xc001, 100)));
    frames.push(packet(60, 0xc001, 100));
    frames.extend((61..64).map(|ident| packet(ident, 0xc002, 64)));
    frames.extend((64..300).map(|ident| packet(ident, 0xc002, 64)));
    frames
}

fn batch(frames: &[Vec<u8>]) -> Frames {
    let mut batch = Frames::default();
    frames.iter().for_each(|frame| batch.push(frame));
    batch
}

#[test]
fn runs_end_where_packets_differ() {
    let frames = batch(&mixture());
    let (mut next, mut counts) = (0, Vec::new());
    while next < frames.len() {
        let count = offload::run(frames.iter_from(next)).map_or(1, |(count, _)| count);
        counts.push(count);
        next += count;
    }
    // 30 long packets and the first short one, then the other four short ones; the identification; then the port, and
    // the highest number of packets.
    assert_eq!(counts, [31, 4, 1, 64, 64, 64, 47]);
    // Packets with inconsistent headers, which the kernel would reject, begin no run: version, UDP length.
    for (at, value) in [(14, 0x65), (39, 9)] {
        let spoiled = (10..40).map(|ident| packet(ident, 0xc001, 1024));
        let spoiled = spoiled.map(|mut frame| {
            frame[at] = value;
            frame
        });
        assert!(offload::run(batch(&spoiled.collect::<Vec<_>>()).iter()).is_none());
    }
}

/// The kernel rejects a super-frame whose segments have no payload. A guest that may send RoCE itself can send such
/// packets, and packets with padding, which would become payload.
#[test]
fn packets_without_payload_or_with_padding_begin_and_continue_no_run() {
    let lengthened = |ident, payload, padding: usize| {
        let mut frame = packet(ident, 0xc001, payload);
        frame.resize(frame.len() + padding, 0);
        frame
    };
    // Only the headers of Ethernet, IPv4 and UDP, with their own lengths.
    let empty = |ident, padding: usize| {
        let mut frame = packet(ident, 0xc001, 0);
        frame.truncate(42);
        (frame[17], frame[39]) = (28, 8);
        frame.resize(42 + padding, 0);
        frame
    };
    let run = |frames: &[Vec<u8>]| offload::run(batch(frames).iter()).map(|(count, _)| count);
    assert_eq!(run(&[lengthened(1, 64, 0), lengthened(2, 64, 0), lengthened(3, 60, 0)]), Some(3));
    for padding in [0, 18] {
        assert_eq!(run(&[empty(1, padding), empty(2, padding)]), None);
        assert_eq!(run(&[lengthened(1, 64, 0), lengthened(2, 64, 0), empty(3, padding)]), Some(2));
    }
    assert_eq!(run(&[lengthened(1, 64, 4), lengthened(2, 64, 4)]), None);
    assert_eq!(run(&[lengthened(1, 64, 0), lengthened(2, 64, 0), lengthened(3, 60, 4)]), Some(2));
}

/// Work that another sender of the host left to the hardware: a TCP super-frame, for IPv4 and for IPv6.
#[test]
fn tcp_is_cut_and_summed() {
    for v6 in [false, true] {
        let mut frame = [&B.0[..], &A.0, if v6 { &[0x86, 0xdd] } else { &[8, 0] }].concat();
        if v6 {
            frame.extend([0x60, 0, 0, 0, 0, 0, 6, 64]);
            frame.extend([0xfd; 32]);
        } else {
            frame.extend([0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let transport = frame.len();
        // Sequence number 2^32 - 1000, flags CWR, ACK, PSH, FIN.
        frame.extend([0, 80, 1, 0, 0xff, 0xff, 0xfc, 0x18, 0, 0, 0, 1, 0x50, 0x99, 1, 0, 0xaa, 0xaa, 0, 0]);
        let headers = offload::Headers::of(&frame).unwrap();
        assert_eq!((headers.len, headers.are_roce()), (transport + 20, false));
        for (index, bytes, flags, sequence) in
            [(0, 1400, 0x90, 0xffff_fc18), (1, 1400, 0x10, 400), (2, 201, 0x19, 1800)]
        {
            let mut segment = vec![0x11; headers.len + bytes];
            headers.write(index, 1400, index == 2, &mut segment).unwrap();
            assert_eq!(segment[transport + 13], flags);
            assert_eq!(u32::from_be_bytes(segment[transport + 4..][..4].try_into().unwrap()), sequence);
            let length = u16::try_from(20 + bytes).unwrap();
            let (place, total) = if v6 { (18, length) } else { (16, length + 20) };
            assert_eq!(segment[place..place + 2], total.to_be_bytes());
            let mut sum = Checksum::default();
            let addresses = if v6 { 22..54 } else { 26..34 };
            sum.add(&[0, 6]);
            sum.add(&length.to_be_bytes());
            sum.add(&segment[addresses]);
            sum.add(&segment[transport..]);
            assert_eq!(sum.finish(), 0);
            if !v6 {
                assert_eq!(segment[18..20], [0xff, 0xff, 0, 0, 0, 1][index * 2..index * 2 + 2], "identification");
                let mut sum = Checksum::default();
                sum.add(&segment[14..34]);
                assert_eq!(sum.finish(), 0);
            }
        }
    }
}

impl Namespace {
    fn veth(&self) {
        self.ip("link add name va address 02:00:00:00:00:01 mtu 9000 type veth peer name vb address 02:00:00:00:00:02 mtu 9000");
        self.up();
    }

    fn up(&self) {
        self.ip("link set va up");
        self.ip("link set vb up");
    }
}

/// Waits for frames to B. Other frames, which the host sends by itself, are ignored.
fn collect(link: &AfPacketLink, count: usize) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    while got.len() < count {
        let mut frames = Frames::default();
        link.receive(&mut frames, 64);
        got.extend(frames.iter().filter(|frame| frame.starts_with(&B.0)).map(<[u8]>::to_vec));
        if frames.is_empty() {
            let readiness = link.readiness();
            let fd = readiness.readable.expect("the interface is up");
            rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        }
    }
    got
}

/// Waits until frames pass: the kernel drops frames until it has seen a carrier at both ends.
fn plug(a: &AfPacketLink, b: &AfPacketLink) {
    let mut probe = packet(1, 0xc001, 64);
    probe[..6].fill(0xff);
    let mut came = Frames::default();
    while !came.iter().any(|frame| frame[14..] == probe[14..] || frame[18..] == probe[14..]) {
        a.send(&batch(&[probe.clone()]), 0);
        b.receive(&mut came, 64);
    }
}

#[test]
fn frames_cross_a_veth_pair_as_they_are() {
    let Some(host) = Namespace::new("veth") else { return };
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        let sent = mixture();
        // Three times, because from the second time on the receiver uses the layout of the first.
        for _ in 0..3 {
            assert_eq!(a.send(&batch(&sent), 0), sent.len());
            assert!(collect(&b, sent.len()) == sent);
        }
        // A frame to another host, and one with a tag, which the kernel removes on the way.
        let mut other = packet(1, 0xc001, 64);
        other[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        let mut tagged = packet(2, 0xc001, 64);
        tagged.splice(12..12, [0x81, 0, 0x60, 0x2a]);
        assert_eq!(a.send(&batch(&[other, tagged.clone()]), 0), 2);
        assert_eq!(collect(&b, 1), [tagged]);
        assert_eq!((a.lost(), b.lost()), (0, 0));
        assert_eq!(a.send(&batch(&[packet(3, 1, 9100)]), 0), 1, "too long for the interface");
        assert_eq!(a.lost(), 1);
    });
}

/// The kernel gets a long frame whole, and a checksum to compute; between local interfaces it delivers both unchanged.
#[test]
fn offloads_of_the_kernel_deliver_correct_frames() {
    let Some(host) = Namespace::new("open") else { return };
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        let link = pvrdma_link::GsoLink::new(Arc::new(a));
        let bytes = data(50_000);
        let (long, segmentation) = long_tcp(B.0, A.0, &bytes, 1448);
        let (short, _) = long_tcp(B.0, A.0, &data(700), 1448);
        let mut frames = Frames::default();
        frames.push_with_offload(&long, segmentation);
        frames.push_with_offload(&short, open_checksum(&short));
        assert_eq!(link.send(&frames, 0), 2);
        let got = collect(&b, 36);
        assert_eq!((carried(&got[..35]), carried(&got[35..])), (bytes, data(700)));
        // A tagged frame is segmented by the link.
        let mut tagged = long;
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        frames.clear();
        frames.push_with_offload(&tagged, segmentation);
        assert_eq!((link.send(&frames, 0), collect(&b, 35).len(), link.lost()), (1, 35, 0));
    });
}

/// A rejected frame does not affect others: it is lost, and the kernel still segments the TCP of other devices that
/// share the uplink.
#[test]
fn a_refused_frame_affects_no_other() {
    let Some(host) = Namespace::new("refused") else { return };
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        let bytes = data(5000);
        let (long, segmentation) = long_tcp(B.0, A.0, &bytes, 1448);
        let mut frames = Frames::default();
        frames.push_with_offload(&long[..5], segmentation);
        frames.push_with_offload(&long, segmentation);
        assert_eq!((a.send(&frames, 0), a.lost()), (2, 1));
        assert_eq!(carried(&collect(&b, 4)), bytes);
        assert!(a.takes(&long, segmentation));
    });
}

/// Tagged runs are sent and received as super-frames, too.
#[test]
fn tagged_runs_are_super_frames() {
    let tag = [0x81, 0, 0x60, 0x2a];
    let tagged = |frame: Vec<u8>| [&frame[..12], &tag, &frame[12..]].concat();
    let sent: Vec<_> = mixture().into_iter().map(tagged).collect();
    let frames = batch(&sent);
    assert_eq!(offload::run(frames.iter()).map(|(count, _)| count), Some(31));
    let Some(host) = Namespace::new("tagged") else { return };
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        for _ in 0..3 {
            assert_eq!(a.send(&frames, 0), sent.len());
            assert!(collect(&b, sent.len()) == sent);
        }
        assert_eq!((a.lost(), b.lost()), (0, 0));
        // A batch arrived in few messages, each with many packets.
        assert!(b.input.lock().burst > 8, "{}", b.input.lock().burst);
        // The next super-frame may have no tag.
        let plain = mixture();
        assert_eq!(a.send(&batch(&plain), 0), plain.len());
        assert!(collect(&b, plain.len()) == plain);
    });
}

/// Packets from a host to itself.
const SAMPLE: SegmentationSample = SegmentationSample {
    packet: |mac, number| {
        let bytes = packet(number, 0xc001, 64);
        let mut header = Packet::parse(&bytes).unwrap().header;
        header.ethernet = Ethernet { destination: mac, source: mac, vlan: None };
        build(&header, &[0; 64]).unwrap()
    },
    is_intact: |frame, number| {
        let Ok(packet) = Packet::parse(frame) else { return false };
        packet.verify().is_ok() && packet.header.bth.psn == Psn::new(1).plus(number.into()) && packet.payload == [0; 64]
    },
};

/// The place of segmentation is known before any other frame leaves; without offloads there are no super-frames.
#[test]
fn a_super_frame_is_inspected_before_others_leave() {
    let Some(host) = Namespace::new("cutter") else { return };
    host.veth();
    host.enter(|| {
        let (own, peer) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&own, &peer);
        let socket = AfPacketSocket::open("va", VlanFilter::All).unwrap();
        assert_eq!(
            socket.segmentation(A, SAMPLE).unwrap(),
            Segmentation::Interface,
            "a virtual interface passes super-frames on"
        );
        // The kernel was tested for TCP with a frame that it accepts.
        let (asked, mut segments) = (segmentation::long_tcp(A), Vec::new());
        let cut = asked.offload(0).finish(asked.get(0).unwrap(), &mut Vec::new(), |part| segments.push(part.to_vec()));
        assert!(cut && carried(&segments) == [0; 128]);
        host.ip("link set va gso_max_size 200");
        assert_eq!(socket.segmentation(A, SAMPLE).unwrap(), Segmentation::Kernel);
        host.ip("link set va down");
        assert_eq!(socket.segmentation(A, SAMPLE).unwrap(), Segmentation::Unknown);
        host.ip("link set va up");
        let link = AfPacketLink::open("va", A).unwrap().without_offload();
        plug(&link, &peer);
        let sent = mixture();
        assert_eq!(link.send(&batch(&sent), 0), sent.len());
        // The packets of the segmentation test reached no host.
        assert!(collect(&peer, sent.len()) == sent);
        assert_eq!((link.lost(), peer.input.lock().burst), (0, 1));
        let (long, segmentation) = long_tcp(B.0, A.0, &data(5000), 1448);
        assert!(own.takes(&long, segmentation) && !link.takes(&long, segmentation));
    });
}

/// Returns a packet with the traffic class `class`.
fn of_class(ident: u16, class: u8) -> Vec<u8> {
    let mut header = Packet::parse(&packet(ident, 0xc001, 64)).unwrap().header;
    if let Network::V2Ipv4(ip, _) = &mut header.network {
        ip.traffic_class = class;
    }
    build(&header, &[0; 64]).unwrap()
}

/// Frames are sent with the priority of their class, whatever was sent before.
#[test]
fn packets_have_the_priority_of_their_class() {
    let Some(host) = Namespace::new("classes") else { return };
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        let priority = || getsockopt(&a.socket().unwrap(), Priority).unwrap();
        for (classes, last) in [(&[0x68, 0x68][..], 3), (&[0, 0xc0], 6), (&[0x6a, 0], 0), (&[0x6a, 0xe0], 6)] {
            let sent: Vec<_> = classes.iter().zip(1..).map(|(&class, ident)| of_class(ident, class)).collect();
            assert_eq!(a.send(&batch(&sent), 0), sent.len());
            assert_eq!((priority(), collect(&b, sent.len())), (last, sent));
        }
    });
}

/// A VLAN interface maps the priority of a packet to the tag, so that it is visible on the wire.
#[test]
fn a_vlan_interface_sees_the_priority() {
    let Some(host) = Namespace::new("egress") else { return };
    host.veth();
    let vlan = ["-n", &host.0, "link", "add", "link", "va", "name", "va.5", "type", "vlan", "id", "5"];
    let made = Command::new("ip").args(vlan).args(["egress-qos-map", "3:3", "6:6"]).output().unwrap();
    if !made.status.success() {
        skipped("this kernel has no VLAN interfaces");
        return;
    }
    host.ip("link set va.5 up");
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va.5", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        plug(&a, &b);
        let sent: Vec<_> =
            (1..).zip([0x68, 0x68, 0, 0xc0, 0x6a]).map(|(ident, class)| of_class(ident, class)).collect();
        assert_eq!(a.send(&batch(&sent), 0), sent.len());
        let came = collect(&b, sent.len());
        let priorities: Vec<_> = came.iter().map(|frame| Ethernet::parse(frame).unwrap().0.vlan.unwrap().pcp).collect();
        assert_eq!(priorities, [3, 3, 0, 6, 3]);
    });
}

/// Tests the filter alone, in front of a socket that needs no privileges.
#[test]
fn a_filter_passes_its_addresses_and_groups() {
    let mac = |number: u16| MacAddr([2, 0, 0, 0, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
    let passes = |addresses: &[MacAddr], vlan, destination: MacAddr| {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        socket::attach_filter(b.as_fd(), &filter::program(addresses, vlan)).unwrap();
        b.set_nonblocking(true).unwrap();
        a.send(&[&destination.0[..], &[0; 54]].concat()).unwrap();
        b.recv(&mut [0; 100]).is_ok()
    };
    let group = MacAddr([0xff; 6]);
    let many: Vec<_> = (0..u16::try_from(MAX_ADDRESSES).unwrap()).map(mac).collect();
    for addresses in [&many[..1], &many[..2], &many] {
        for vlan in [VlanFilter::All, VlanFilter::Untagged] {
            assert!(addresses.iter().all(|&address| passes(addresses, vlan, address)));
            assert!(passes(addresses, vlan, group));
        }
        assert!(!passes(addresses, VlanFilter::All, mac(0x1000)));
        assert!(!passes(addresses, VlanFilter::All, MacAddr([2, 0, 0, 9, 0, 0])), "the other half differs");
        assert!(
            !passes(addresses, VlanFilter::Tagged(5), addresses[0]) && !passes(addresses, VlanFilter::Tagged(5), group)
        );
    }
    assert!(!passes(&[], VlanFilter::All, group) && !passes(&[], VlanFilter::All, mac(0)), "there are no devices");
}

/// Returns the last byte of the destination and the VLAN of each frame, until this number of marks has arrived.
fn tags(link: &AfPacketLink, marks: usize) -> Vec<(u8, Option<u16>)> {
    let (mut got, mut seen) = (Vec::new(), 0);
    loop {
        let mut frames = Frames::default();
        link.receive(&mut frames, 64);
        for frame in frames.iter() {
            let (ethernet, kind, _) = Ethernet::parse(frame).unwrap();
            if kind.0 == 0x88b5 {
                seen += usize::from(frame.last() == Some(&1));
                got.push((frame[5], ethernet.vlan_id()));
            }
        }
        if frames.is_empty() {
            if seen >= marks {
                return got;
            }
            let fd = link.readiness().readable.expect("the interface is up");
            rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        }
    }
}

/// The link is used outside of the namespace: only with the socket.
#[test]
fn a_socket_that_was_handed_over_receives_the_addresses_of_its_opener() {
    let Some(host) = Namespace::new("given") else { return };
    host.veth();
    let c = MacAddr([2, 0, 0, 0, 0, 3]);
    let open = |interface: &'static str, vlan| host.enter(move || AfPacketSocket::open(interface, vlan).unwrap());
    let given = |host: &AfPacketSocket| {
        AfPacketLink::from_socket("vb", host.descriptor().unwrap(), Arc::new(pvrdma_link::NoConnector))
    };
    let sender = AfPacketLink::from_socket(
        "va",
        open("va", VlanFilter::All).descriptor().unwrap(),
        Arc::new(pvrdma_link::NoConnector),
    );
    let frame = |to: MacAddr, tag: Option<u16>, mark: u8| {
        let tag = tag.map_or_else(Vec::new, |tci| [0x8100_u16.to_be_bytes(), tci.to_be_bytes()].concat());
        [&to.0[..], &A.0, &tag, &[0x88, 0xb5], &[0; 50], &[mark]].concat()
    };
    let group = MacAddr([0xff; 6]);
    let send = || {
        let tags = [None, Some(0x6000), Some(5), Some(0xa006)];
        let mut sent: Vec<_> = [B, c].into_iter().flat_map(|to| tags.map(|tag| frame(to, tag, 0))).collect();
        sent.extend([None, Some(5)].map(|tag| frame(group, tag, 1)));
        assert_eq!(sender.send(&batch(&sent), 0), sent.len());
    };
    let (plain, five, all) =
        (open("vb", VlanFilter::Untagged), open("vb", VlanFilter::Tagged(5)), open("vb", VlanFilter::All));
    let links = [&plain, &five, &all].map(given);
    plain.set_addresses(&[B, c]).unwrap();
    five.set_addresses(&[B]).unwrap();
    all.set_addresses(&[c]).unwrap();
    plug(&sender, &links[0]);
    send();
    assert_eq!(tags(&links[0], 1), [(2, None), (2, None), (3, None), (3, None), (0xff, None)]);
    assert_eq!(tags(&links[1], 1), [(2, Some(5)), (0xff, Some(5))]);
    let every = |to| [None, None, Some(5), Some(6)].map(|vid| (to, vid)).into_iter();
    let marks = || [None, Some(5)].map(|vid| (0xff, vid)).into_iter();
    assert!(tags(&links[2], 2).into_iter().eq(every(3).chain(marks())));
    // One address is added, another one removed.
    plain.set_addresses(&[B]).unwrap();
    five.set_addresses(&[]).unwrap();
    all.set_addresses(&[c, B]).unwrap();
    send();
    assert_eq!(tags(&links[0], 1), [(2, None), (2, None), (0xff, None)]);
    assert!(tags(&links[2], 2).into_iter().eq(every(2).chain(every(3)).chain(marks())));
    assert!(tags(&links[1], 0).is_empty(), "no device is there");
    let too_many = all.set_addresses(&[B; MAX_ADDRESSES + 1]).unwrap_err();
    assert_eq!(too_many.raw_os_error(), Some(Errno::NOBUFS.raw_os_error()));
}

#[test]
fn an_interface_may_be_down_at_first() {
    let Some(host) = Namespace::new("later") else { return };
    host.ip("link add name va mtu 9000 type veth peer name vb mtu 9000");
    let (a, b) = host.enter(|| (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap()));
    for link in [&a, &b] {
        assert_eq!(link.inspect().up, pvrdma_base::Snapshot::Taken(false));
    }
    let frame = batch(&[packet(1, 0xc001, 64)]);
    assert_eq!((a.send(&frame, 0), a.lost()), (1, 1));
    host.up();
    while a.readiness().readable.is_none() || b.readiness().readable.is_none() {
        let wait = [&a, &b].iter().filter_map(|link| link.readiness().wait).min().unwrap();
        rustix::event::poll(&mut [], Some(&wait.try_into().unwrap())).unwrap();
        a.receive(&mut Frames::default(), 64);
        b.receive(&mut Frames::default(), 64);
    }
    plug(&a, &b);
    assert_eq!(a.send(&frame, 0), 1);
    assert_eq!(collect(&b, 1), [packet(1, 0xc001, 64)]);
}

#[test]
fn an_interface_disappears_and_returns() {
    let Some(host) = Namespace::new("down") else { return };
    assert_eq!(host.enter(|| AfPacketLink::open("va", A).unwrap_err()), AfPacketError::NoInterface("va".into()));
    host.veth();
    host.enter(|| {
        let (a, b) = (AfPacketLink::open("va", A).unwrap(), AfPacketLink::open("vb", B).unwrap());
        let frame = batch(&[packet(1, 0xc001, 64)]);
        for act in ["link set vb down", "link delete va"] {
            host.ip(act);
            // The receiver notices the change by itself; frames sent meanwhile are lost.
            let mut frames = Frames::default();
            while b.readiness().readable.is_some() {
                let fd = b.readiness().readable.unwrap();
                rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
                b.receive(&mut frames, 64);
            }
            assert!(b.readiness().wait.is_some());
            assert_eq!(a.send(&frame, 0), 1);
            if act.contains("delete") {
                host.veth()
            } else {
                host.up()
            }
            frames.clear();
            while !frames.iter().any(|frame| frame == packet(1, 0xc001, 64)) {
                a.receive(&mut Frames::default(), 64);
                assert_eq!(a.send(&frame, 0), 1);
                let fd = b.readiness().readable;
                let mut fds: Vec<_> = fd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 })).unwrap();
                b.receive(&mut frames, 64);
            }
        }
    });
}
