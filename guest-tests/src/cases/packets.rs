//! Packets of every operation in every encapsulation, from the transport that the daemon uses.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path as FilePath;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pcap_file::DataLink;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
use pvrdma_roce::wire::{MAX_FRAME, Packet};
use pvrdma_roce::{
    AccessError, AtomicChange, Congestion, DatagramSender, EgressMarking, NakReason, Origin, Path, Received, Requester,
    RequesterOps, Responder, ResponderOps, Tuning,
};
use pvrdma_verbs::{
    Access, AddressVector, Gid, GidType, MacAddr, Mtu, Psn, QpAttrs, QpState, Qpn, RemoteAddress, SendData, SendFlags,
    SendOp, SendWr, Sge, UdDestination, WcStatus,
};

const MTU: Mtu = Mtu::M1024;
const REMOTE: RemoteAddress = RemoteAddress { addr: 0x7000_0000, rkey: 0x1234 };
const QKEY: u32 = 0x1111_1111;

/// RoCE v1, v2 over IPv4 and over IPv6, tagged and not: a name and the frames of both directions.
pub(super) fn every_encapsulation() -> Result<Vec<(String, Vec<Vec<u8>>)>> {
    let mut all = Vec::new();
    for (name, kind, ipv4) in
        [("v1", GidType::RoceV1, false), ("v2-ipv4", GidType::RoceV2, true), ("v2-ipv6", GidType::RoceV2, false)]
    {
        for vlan in [None, Some(42)] {
            let origin = |end: u8| Origin {
                mac: MacAddr([2, 0, 0, 0, 0, end]),
                gid: gid(end, ipv4),
                kind,
                vlan,
                marks: EgressMarking { priority_tags: false, ecn: true },
            };
            let tag = if vlan.is_some() { "-tagged" } else { "" };
            let frames = operations(origin(1), origin(2)).with_context(|| format!("{name}{tag}"))?;
            all.push((format!("{name}{tag}"), frames));
        }
    }
    Ok(all)
}

/// Writes frames to a file.
pub(super) fn write(path: &FilePath, frames: &[Vec<u8>]) -> Result<()> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    let mut writer = PcapNgWriter::new(file)?;
    let interface = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen: 0, options: Vec::new() };
    writer.write_pcapng_block(interface)?;
    for (frame, number) in frames.iter().zip(0..) {
        writer.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            timestamp: Duration::from_micros(number),
            original_len: u32::try_from(frame.len())?,
            data: Cow::Borrowed(frame),
            options: Vec::new(),
        })?;
    }
    Ok(())
}

fn gid(end: u8, ipv4: bool) -> Gid {
    match ipv4 {
        true => pvrdma_verbs::testing::gid(end),
        false => Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, end]),
    }
}

/// Every operation between two ends that accept everything.
fn operations(local: Origin, remote: Origin) -> Result<Vec<Vec<u8>>> {
    let (own, peer) = (Qpn::new(0x111), Qpn::new(0x222));
    let mut frames = connected(&local, &remote, [own, peer])?;
    frames.extend(datagrams(&local, &remote, [own, peer])?);
    Ok(frames)
}

/// Of a connection to a peer.
fn attributes(to: &Origin, dest_qpn: Qpn) -> QpAttrs {
    QpAttrs {
        state: QpState::Rts,
        dest_qpn,
        path_mtu: MTU,
        sq_psn: Psn::new(0x00ff_fff8),
        rq_psn: Psn::new(0x00ff_fff8),
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        av: AddressVector {
            dgid: to.gid,
            dmac: to.mac,
            hop_limit: 64,
            traffic_class: 0x6a,
            service_level: 3,
            ..AddressVector::default()
        },
        ..QpAttrs::default()
    }
}

/// Requests of a connection and what comes back.
fn connected(local: &Origin, remote: &Origin, [own, peer]: [Qpn; 2]) -> Result<Vec<Vec<u8>>> {
    let (there, back) = (attributes(remote, peer), attributes(local, own));
    let path = |from: &Origin, attrs: &QpAttrs, qpn| {
        Path::connected(from, &attrs.av, qpn, attrs.dest_qpn).context("the addresses do not go together")
    };
    let mut requester = Requester::new(&there, path(local, &there, own)?, Tuning::default());
    let mut responder = Responder::new(&back, path(remote, &back, peer)?);
    let (mut memory, mut frames, mut out) = (PatternMemory::default(), Vec::new(), [0; MAX_FRAME]);
    for work in requests() {
        requester.post(work, &mut memory);
        // A request, its answer, and so on, until there is nothing to say.
        loop {
            let before = frames.len();
            while let Some(length) = requester.poll_transmit(Duration::ZERO, &mut memory, &mut out) {
                let frame = out[..length].to_vec();
                let packet = Packet::parse(&frame)?;
                responder.handle_packet(&packet, &mut memory);
                frames.push(frame);
            }
            while let Some(length) = responder.poll_transmit(&mut memory, &mut out) {
                let frame = out[..length].to_vec();
                requester.handle_packet(Duration::ZERO, &Packet::parse(&frame)?, &mut memory);
                frames.push(frame);
            }
            if frames.len() == before {
                break;
            }
        }
    }
    if let Some(status) = memory.ended.iter().find(|status| **status != WcStatus::Success) {
        bail!("a request ended with {status:?}");
    }
    Ok(frames)
}

/// Datagrams, and what tells of congestion.
fn datagrams(local: &Origin, remote: &Origin, [own, peer]: [Qpn; 2]) -> Result<Vec<Vec<u8>>> {
    let (mut frames, mut out) = (Vec::new(), [0; MAX_FRAME]);
    let to = UdDestination {
        qpn: peer,
        qkey: QKEY,
        dgid: remote.gid,
        dmac: remote.mac,
        hop_limit: 64,
        traffic_class: 0x6a,
        service_level: 3,
        ..UdDestination::default()
    };
    let path = Path::datagram(local, &to, own).context("the addresses do not go together")?;
    let mut sender = DatagramSender::new(own, QKEY, Psn::new(7));
    for (data, length) in [(SendData::None, 0), (SendData::None, 1001), (SendData::Immediate([1, 2, 3, 4]), 77)] {
        let mut work = work(SendOp::Send { data, to: Some(to) }, length);
        match sender.send(&mut work, &path, MTU.bytes(), &mut PatternMemory::default(), &mut out) {
            Ok(length) => frames.push(out[..length].to_vec()),
            Err(status) => bail!("a datagram ended with {status:?}"),
        }
    }
    frames.push(notification(remote, &attributes(local, own), peer, own, &mut out)?);
    Ok(frames)
}

/// What a peer sends when it meets marked packets.
fn notification(from: &Origin, attrs: &QpAttrs, local: Qpn, remote: Qpn, out: &mut [u8]) -> Result<Vec<u8>> {
    let path = Path::connected(from, &attrs.av, local, remote).context("the addresses do not go together")?;
    let length = path.notification(remote, &Congestion::default(), out).context("no notification")?;
    Ok(out[..length].to_vec())
}

/// Every operation, in lengths that give every position of a packet.
fn requests() -> Vec<SendWr> {
    let mut works = Vec::new();
    for length in [0, 1, 1024, 1026, 5003] {
        for data in [SendData::None, SendData::Immediate([1, 2, 3, 4]), SendData::Invalidate(7)] {
            works.push(work(SendOp::Send { data, to: None }, length));
        }
        for immediate in [None, Some([5, 6, 7, 8])] {
            works.push(work(SendOp::Write { remote: REMOTE, immediate }, length));
        }
        works.push(work(SendOp::Read { remote: REMOTE }, length));
    }
    works.push(work(SendOp::CompareSwap { remote: REMOTE, compare: 1, swap: 2 }, 8));
    works.push(work(SendOp::FetchAdd { remote: REMOTE, add: 3 }, 8));
    works
}

fn work(op: SendOp, length: u32) -> SendWr {
    SendWr { wr_id: 0, op, flags: SendFlags::SOLICITED, sges: vec![Sge { addr: 0, length, lkey: 1 }] }
}

/// Memory that is always there and holds a pattern, and a consumer who wants everything.
#[derive(Debug, Default)]
struct PatternMemory {
    ended: Vec<WcStatus>,
}

fn fill(out: &mut [u8]) {
    for (byte, value) in out.iter_mut().zip((0x40..0x80).cycle()) {
        *byte = value;
    }
}

impl RequesterOps for PatternMemory {
    fn begin(&mut self, _work: &mut SendWr) -> Result<(), WcStatus> {
        Ok(())
    }

    fn gather(&mut self, _sges: &[Sge], _offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        fill(out);
        Ok(())
    }

    fn scatter(&mut self, _sges: &[Sge], _offset: u64, _data: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn finish(&mut self, _work: &SendWr, status: WcStatus, _byte_len: u32) {
        self.ended.push(status);
    }

    fn failed(&mut self) {}
}

impl ResponderOps for PatternMemory {
    fn request_arrived(&mut self) {}

    fn take_receive(&mut self) -> Result<(), NakReason> {
        Ok(())
    }

    fn fill_receive(&mut self, _offset: u64, _data: &[u8]) -> Result<(), NakReason> {
        Ok(())
    }

    fn complete_receive(&mut self, _received: Received) -> Result<(), NakReason> {
        Ok(())
    }

    fn invalidate(&mut self, _key: u32) -> Result<(), NakReason> {
        Ok(())
    }

    fn check_enabled(&mut self, _need: Access) -> Result<(), NakReason> {
        Ok(())
    }

    fn check_remote(&mut self, _remote: RemoteAddress, _length: u64, _need: Access) -> Result<(), AccessError> {
        Ok(())
    }

    fn write(&mut self, _remote: RemoteAddress, _data: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn read(&mut self, _remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        fill(out);
        Ok(())
    }

    fn update(&mut self, _remote: RemoteAddress, _change: AtomicChange) -> Result<u64, AccessError> {
        Ok(0x1122_3344_5566_7788)
    }

    fn refuse(&mut self, _refusal: NakReason) {}

    fn refuse_immediate(&mut self) {}
}
