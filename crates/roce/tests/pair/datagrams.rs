//! Datagrams: comparison with captured ones, and reasons for drops.

use pvrdma_roce::{
    Datagram, DatagramSender, DropReason, EgressMarking, IcrcRule, Origin, Path, admit,
    wire::{CrcError, Extension, Header, MAX_FRAME, Network, Opcode, Packet, build},
};
use pvrdma_verbs_types::{
    GidType, NetworkType, QpType, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination, WcStatus,
};

use super::host::{Host, KEY};
use super::pcap;

const LOCAL: u64 = 0x1000;

fn work(to: UdDestination, data: SendData, length: u32) -> SendWr {
    let sges = vec![Sge { addr: LOCAL, length, lkey: KEY }];
    SendWr { wr_id: 0, op: SendOp::Send { data, to: Some(to) }, flags: SendFlags::SIGNALED, sges }
}

fn destination(header: &Header) -> UdDestination {
    UdDestination {
        qpn: header.bth.destination,
        qkey: header.extension.deth().unwrap().qkey,
        dgid: header.network.destination(),
        dmac: header.ethernet.destination,
        traffic_class: header.network.traffic_class(),
        hop_limit: 64,
        ..UdDestination::default()
    }
}

fn origin(header: &Header) -> Origin {
    Origin {
        mac: header.ethernet.source,
        gid: header.network.source(),
        kind: GidType::RoceV2,
        vlan: header.ethernet.vlan_id(),
        marks: EgressMarking::default(),
        // Datagrams have an ICRC in any case.
        icrc: IcrcRule::UnlessAgreed,
    }
}

/// Every captured datagram, sent by us: the same frame but for the IPv4 identification, and the AckReq bit that rxe
/// sets in datagrams of QP 1.
#[test]
fn sent_as_captured() {
    let mut compared = 0;
    for (name, frames) in
        ["ud_pingpong_v4", "ud_pingpong_v6ll", "ud_cases", "ud_cases_v6", "ud_send_bw", "udaddy_v4", "rping_v4"]
            .map(|name| (name, pcap::load(name)))
    {
        for frame in &frames {
            let packet = Packet::parse(frame).unwrap();
            let header = packet.header;
            let Some(deth) = header.extension.deth() else { continue };
            let mut host = Host::new();
            host.memory.write(LOCAL, packet.payload);
            let to = destination(&header);
            let path = Path::datagram(&origin(&header), &to, deth.source).unwrap();
            let mut sender = DatagramSender::new(deth.source, 0x8001_0000, header.bth.psn);
            let data = header.extension.immediate().map_or(SendData::None, SendData::Immediate);
            let mut out = [0; MAX_FRAME];
            let mut work = work(to, data, u32::try_from(packet.payload.len()).unwrap());
            let length = sender.send(&mut work, &path, 4096, &mut host, &mut out).unwrap();
            let ours = Packet::parse(&out[..length]).unwrap();
            let mut expected = header;
            if let (Network::V2Ipv4(ip, _), Network::V2Ipv4(own, _)) = (&mut expected.network, &ours.header.network) {
                ip.identification = own.identification;
            }
            expected.bth.ack_request = false;
            assert_eq!(ours.header, expected, "{name}\n{packet}\n{ours}");
            assert_eq!(ours.payload, packet.payload, "{name}");
            assert_eq!(ours.verify(), Ok(()));
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}

#[test]
fn received_as_captured() {
    let frames = pcap::load("ud_cases");
    let packet = Packet::parse(&frames[1]).unwrap();
    admit(&packet, QpType::Ud).unwrap();
    let datagram = Datagram::new(&packet).unwrap();
    assert_eq!((datagram.qkey, datagram.payload.len()), (0x1111_1111, 5));
    assert_eq!(datagram.immediate, Some([0x0d, 0xf0, 0xad, 0x0b]));
    assert_eq!(datagram.network, NetworkType::Ipv4);
    assert_eq!(datagram.header[..20], [0; 20]);
    assert_eq!(datagram.header[20..], frames[1][14..34]);

    let frames = pcap::load("ud_cases_v6");
    let packet = Packet::parse(&frames[1]).unwrap();
    let datagram = Datagram::new(&packet).unwrap();
    assert_eq!(datagram.network, NetworkType::Ipv6);
    assert_eq!(datagram.header, frames[1][14..54]);
}

#[test]
fn what_is_not_let_through() {
    let frames = pcap::load("ud_cases");
    let packet = Packet::parse(&frames[1]).unwrap();
    let refused = |change: &dyn Fn(&mut Header)| {
        let mut header = packet.header;
        change(&mut header);
        admit(&Packet::parse(&build(&header, packet.payload).unwrap()).unwrap(), QpType::Ud).err()
    };
    assert_eq!(refused(&|_| {}), None);
    assert_eq!(refused(&|header| header.bth.version = 1), Some(DropReason::Version));
    assert_eq!(refused(&|header| header.bth.pkey = 0x1234), Some(DropReason::Pkey));
    let rc = |header: &mut Header| (header.bth.opcode, header.extension) = (Opcode(4), Extension::None);
    assert_eq!(refused(&rc), Some(DropReason::Opcode));
    assert_eq!(
        refused(&|header| (header.bth.opcode, header.extension) = (Opcode(0x66), Extension::None)),
        Some(DropReason::Opcode)
    );
    let mut damaged = frames[1].clone();
    *damaged.last_mut().unwrap() ^= 1;
    assert_eq!(admit(&Packet::parse(&damaged).unwrap(), QpType::Ud).err(), Some(DropReason::Damaged(CrcError::Icrc)));
}

#[test]
fn requests_that_are_no_datagrams() {
    let packet_bytes = pcap::load("ud_cases").remove(1);
    let header = Packet::parse(&packet_bytes).unwrap().header;
    let to = destination(&header);
    let mut sender = DatagramSender::new(to.qpn, 0x55, header.bth.psn);
    let path = Path::datagram(&origin(&header), &to, to.qpn).unwrap();
    let (mut host, mut out) = (Host::new(), [0; MAX_FRAME]);
    let mut send =
        |mut work: SendWr| sender.send(&mut work, &path, 1024, &mut host, &mut out).map(|len| out[..len].to_vec());
    assert_eq!(send(work(to, SendData::None, 1025)), Err(WcStatus::LocalLength));
    assert_eq!(send(work(to, SendData::Invalidate(1), 5)), Err(WcStatus::LocalQpOperation));
    let mut foreign = work(to, SendData::None, 5);
    foreign.sges[0].lkey = 1;
    assert_eq!(send(foreign), Err(WcStatus::LocalProtection));
    // If the work request's Q_Key is privileged, the QP's own Q_Key is sent instead.
    let frame = send(work(UdDestination { qkey: 0x8000_0001, ..to }, SendData::None, 5)).unwrap();
    assert_eq!(Packet::parse(&frame).unwrap().header.extension.deth().unwrap().qkey, 0x55);
    // An IPv6 address cannot send to an IPv4 address.
    let v6 = Origin {
        gid: "fd00::1".parse::<std::net::Ipv6Addr>().map(|a| pvrdma_verbs_types::Gid(a.octets())).unwrap(),
        ..origin(&header)
    };
    assert_eq!(Path::datagram(&v6, &to, to.qpn), None);
}
