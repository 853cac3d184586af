//! A hostile peer: arbitrary sequences of packets to the responders of live queue pairs, and arbitrary responses to
//! their requesters.
//!
//! Most packets are correct, because an invalid one often ends its queue pair.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_fuzz::{
    input::Steps,
    rxe::{DATAGRAMS, Device, MTU, PAGE, QKEY, QPS, peer_qpn, qpn},
};
use pvrdma_packet::{Ethernet, Vlan};
use pvrdma_roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extension, Header, Ieth, ImmDt, Ipv4, NakCode, Network, Opcode,
    Operation, Packet, Position, Reth, Shape, Syndrome, Udp, build,
};
use pvrdma_verbs::testing::{gid, mac};
use pvrdma_verbs_types::{
    Psn, QpState, Qpn, RecvWr, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination,
};

const IP: fn(u8) -> [u8; 4] = |end| [10, 0, 0, end];

/// Part of an input that is used as it is.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Wild(u8);

impl Wild {
    const fn is_wild(self) -> bool {
        self.0 >= 215
    }
}

/// Memory of the device that a packet names.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Place {
    at: u16,
    readable: bool,
    key: u8,
}

#[derive(Arbitrary, Debug)]
struct Sent {
    wild: Wild,
    qp: u8,
    opcode: u8,
    psn: i8,
    place: Place,
    length: u16,
    flags: u8,
    operands: (u8, u8),
    damage: Option<(u16, u8)>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Packet(Sent),
    /// A whole message, by its length in bytes.
    Message(u8, Place, u16, bool),
    /// Bytes behind an Ethernet header.
    Raw(u8, Vec<u8>),
    /// A response to a request of the device: which request, and its difference from a correct response.
    Answer {
        which: u8,
        wild: Wild,
        syndrome: u8,
        psn: i8,
        length: u16,
    },
    Post(u8, u8, Place, u16),
    Receive(u8, u16, u16),
    /// The same frame once more.
    Again(u8),
    /// The peer stops reading frames of the device, or starts again.
    Deaf(bool),
    Time(u16),
    Modify(u8, u8),
    Connect(u8),
    Bind(u8),
}

/// Opcodes of the first packet of a peer.
const REQUESTS: [Opcode; 12] = [
    Opcode::send(Position::Only),
    Opcode::send(Position::First),
    Opcode::write(Position::Only),
    Opcode::write(Position::First),
    Opcode::READ_REQUEST,
    Opcode::READ_REQUEST,
    Opcode::COMPARE_SWAP,
    Opcode::FETCH_ADD,
    Opcode::send_immediate(true),
    Opcode::write_immediate(true),
    Opcode::send_invalidate(true),
    Opcode::CNP,
];

/// Returns the next packet of a peer that follows the rules.
fn lawful(device: &mut Device, qp: usize, choice: u8) -> Opcode {
    device.revive(qp);
    if qp == DATAGRAMS {
        return Opcode::UD_SEND;
    }
    let ends = choice & 1 == 0;
    let message = device.message(qp);
    match *message {
        Some(write) => {
            *message = (!ends).then_some(write);
            let position = if ends { Position::Last } else { Position::Middle };
            if write { Opcode::write(position) } else { Opcode::send(position) }
        }
        None => {
            let opcode = REQUESTS[usize::from(choice) % REQUESTS.len()];
            if opcode.info().is_some_and(|info| info.position == Position::First) {
                *message = Some(opcode == Opcode::write(Position::First));
            }
            opcode
        }
    }
}

fn header(opcode: Opcode, to: Qpn, psn: Psn, extension: Extension) -> Header {
    let mut bth = Bth::new(opcode, to, psn);
    bth.becn = opcode == Opcode::CNP;
    let ip = Ipv4 {
        traffic_class: 0,
        identification: 7,
        dont_fragment: true,
        hop_limit: 64,
        source: IP(2),
        destination: IP(1),
    };
    Header {
        ethernet: Ethernet { destination: mac(1), source: mac(2), vlan: None },
        network: Network::V2Ipv4(ip, Udp { source_port: 0xc001, checksum: 0 }),
        bth,
        extension,
    }
}

/// A PSN before or behind another.
fn moved(psn: Psn, by: i8) -> Psn {
    psn.plus(i32::from(by) as u32)
}

fn remote(device: &Device, place: Place, wild: bool) -> RemoteAddress {
    let (rkey, start) = device.region(place.readable && wild);
    let at = if wild { u64::from(place.at) } else { u64::from(place.at) % (Device::REGION / 2) / 8 * 8 };
    let rkey = if wild && place.key >= 128 { rkey ^ u32::from(place.key) } else { rkey };
    RemoteAddress { addr: start + at, rkey }
}

fn extension(shape: Shape, sent: &Sent, remote: RemoteAddress, length: u32) -> Extension {
    let reth = Reth { address: remote.addr, rkey: remote.rkey, length };
    let immediate = ImmDt([sent.operands.0; 4]);
    let aeth = Aeth { syndrome: Syndrome::from_byte(sent.operands.0), msn: sent.operands.1.into() };
    let deth = Deth { qkey: if sent.operands.0 >= 200 { 1 } else { QKEY }, source: peer_qpn(DATAGRAMS) };
    match shape {
        Shape::None => Extension::None,
        Shape::ImmDt => Extension::ImmDt(immediate),
        Shape::Ieth => Extension::Ieth(Ieth { rkey: remote.rkey }),
        Shape::Reth => Extension::Reth(reth),
        Shape::RethImmDt => Extension::RethImmDt(reth, immediate),
        Shape::Aeth => Extension::Aeth(aeth),
        Shape::AtomicAckEth => Extension::AtomicAckEth(aeth, AtomicAckEth { original: length.into() }),
        Shape::AtomicEth => Extension::AtomicEth(AtomicEth {
            address: remote.addr,
            rkey: remote.rkey,
            swap_or_add: sent.operands.0.into(),
            compare: sent.operands.1.into(),
        }),
        Shape::Deth => Extension::Deth(deth),
        Shape::DethImmDt => Extension::DethImmDt(deth, immediate),
        Shape::FethReth => Extension::FethReth(Default::default(), reth),
    }
}

fn packet(device: &mut Device, sent: &Sent) {
    let wild = sent.wild.is_wild();
    let qp = usize::from(sent.qp) % QPS;
    let opcode = if wild { Opcode(sent.opcode) } else { lawful(device, qp, sent.opcode) };
    let info = opcode.info();
    let position = info.map_or(Position::Only, |info| info.position);
    let operation = info.map(|info| info.operation);
    let full = matches!(position, Position::First | Position::Middle);
    let payload = match operation {
        Some(Operation::Send | Operation::Write) if full && !wild => MTU,
        Some(Operation::Send | Operation::Write) => u32::from(sent.length) % (MTU + 1),
        Some(Operation::CongestionNotification) => 16,
        _ if wild => u32::from(sent.length) % 40,
        _ => 0,
    };
    // The length of a FIRST allows a LAST to follow soon.
    let length = match operation {
        Some(Operation::ReadRequest) => u32::from(sent.length) % (Device::REGION as u32 / 2),
        _ if full => MTU + u32::from(sent.length) % (2 * MTU),
        _ => payload,
    };
    let remote = remote(device, sent.place, wild);
    let shape = info.map_or(Shape::None, |info| info.shape);
    let expected = *device.psn(qp);
    let psn = if wild { moved(expected, sent.psn) } else { expected };
    let mut header = header(opcode, qpn(qp), psn, extension(shape, sent, remote, length));
    header.bth.ack_request = sent.flags & 1 != 0;
    header.bth.solicited = sent.flags & 2 != 0;
    if let Network::V2Ipv4(ip, _) = &mut header.network {
        ip.traffic_class = if sent.flags & 0x60 == 0x60 { 3 } else { 2 };
        ip.source = if wild && sent.flags & 4 != 0 { IP(9) } else { ip.source };
    }
    if wild && sent.flags & 8 != 0 {
        header.ethernet.vlan = Some(Vlan { pcp: 1, dei: false, vid: (sent.flags >> 4).into() });
    }
    let mut frame = build(&header, &vec![sent.opcode; payload as usize]).expect("the headers fit the opcode");
    if let Some((at, byte)) = sent.damage.filter(|_| wild) {
        let at = usize::from(at) % frame.len();
        frame[at] = byte;
    }
    if !wild && operation != Some(Operation::CongestionNotification) {
        let span = if operation == Some(Operation::ReadRequest) { length.div_ceil(MTU).max(1) } else { 1 };
        *device.psn(qp) = expected.plus(span);
    }
    device.give(&frame);
}

/// A correct WRITE of several packets.
fn message(device: &mut Device, qp: usize, place: Place, length: u32, ack: bool) {
    device.revive(qp);
    let target = remote(device, place, false);
    let count = length.div_ceil(MTU).max(1);
    for index in 0..count {
        let position = Position::of(index == 0, index + 1 == count);
        let first = matches!(position, Position::First | Position::Only);
        let reth = Reth { address: target.addr, rkey: target.rkey, length };
        let extension = if first { Extension::Reth(reth) } else { Extension::None };
        let psn = *device.psn(qp);
        *device.psn(qp) = psn.plus(1);
        let mut header = header(Opcode::write(position), qpn(qp), psn, extension);
        header.bth.ack_request = ack && index + 1 == count;
        let payload = vec![0x11; (length - index * MTU).min(MTU) as usize];
        device.give(&build(&header, &payload).expect("a good packet"));
    }
}

fn answer(device: &mut Device, which: u8, wild: bool, syndrome: u8, psn: i8, length: u16) {
    // A correct peer responds in order.
    let at = if wild { usize::from(which) % device.asked.len().max(1) } else { 0 };
    let Some(frame) = device.asked.get(at).cloned() else { return };
    if !wild {
        device.asked.pop_front();
    }
    let asked = Packet::parse(&frame).expect("checked when it came").header;
    // Queue pair numbers of both sides differ by the same offset.
    let to = Qpn::new(asked.bth.destination.get() - 0x100);
    let syndrome = match syndrome {
        any if wild => Syndrome::from_byte(any),
        0..210 => Syndrome::ACK,
        210..235 => Syndrome::RnrNak { timer: syndrome % 32 },
        _ => Syndrome::Nak(NakCode::SequenceError),
    };
    let aeth = Aeth { syndrome, msn: 0 };
    let operation = asked.bth.opcode.info().map(|info| info.operation);
    let acknowledges = wild && length & 0x100 != 0 || syndrome != Syndrome::ACK;
    let at = if wild { moved(asked.bth.psn, psn) } else { asked.bth.psn };
    let (opcode, extension) = match (operation, asked.extension.reth()) {
        (Some(Operation::ReadRequest), Some(reth)) if !acknowledges => {
            for index in 0..reth.length.div_ceil(MTU).max(1) {
                let left = reth.length - index * MTU;
                let position = Position::of(index == 0, left <= MTU);
                let opcode = Opcode::read_response(position);
                let extension = if position == Position::Middle { Extension::None } else { Extension::Aeth(aeth) };
                let payload = if wild { u32::from(length) % 300 } else { left.min(MTU) };
                let header = header(opcode, to, at.plus(index), extension);
                device.give(&build(&header, &vec![0x22; payload as usize]).expect("a response"));
            }
            return;
        }
        (Some(Operation::CompareSwap | Operation::FetchAdd), _) if !acknowledges => {
            (Opcode::ATOMIC_ACKNOWLEDGE, Extension::AtomicAckEth(aeth, AtomicAckEth { original: 9 }))
        }
        _ => (Opcode::ACKNOWLEDGE, Extension::Aeth(aeth)),
    };
    device.give(&build(&header(opcode, to, at, extension), &[]).expect("an answer"));
}

fn post(device: &mut Device, qp: usize, kind: u8, place: Place, length: u32) {
    device.revive(qp);
    let local = remote(device, place, false);
    let sges = vec![Sge { addr: local.addr, length: length % (2 * PAGE as u32), lkey: local.rkey }];
    let target = RemoteAddress { addr: 0x1000, rkey: 7 };
    let to = (qp == DATAGRAMS).then(|| UdDestination {
        qpn: peer_qpn(qp),
        qkey: QKEY,
        dgid: gid(2),
        dmac: mac(2),
        ..UdDestination::default()
    });
    let op = match kind % 5 {
        _ if to.is_some() => SendOp::Send { data: SendData::None, to },
        0 => SendOp::Send { data: SendData::Immediate([kind; 4]), to },
        1 => SendOp::Write { remote: target, immediate: None },
        2 => SendOp::Read { remote: target },
        3 => SendOp::FetchAdd { remote: target, add: 1 },
        _ => SendOp::CompareSwap { remote: target, compare: 1, swap: 2 },
    };
    let flags = if kind & 0x80 != 0 { SendFlags::FENCE } else { SendFlags::empty() };
    device.post(qp, SendWr { wr_id: 0, op, flags, sges });
    device.settle();
    if !device.deaf {
        device.take();
    }
}

fn step(device: &mut Device, step: &Step) {
    match step {
        Step::Packet(sent) => packet(device, sent),
        &Step::Message(qp, place, length, ack) => {
            message(device, usize::from(qp) % DATAGRAMS, place, u32::from(length) % 1500, ack);
        }
        Step::Raw(kind, bytes) => {
            let kind = [[0x89, 0x15], [0x08, 0x00], [0x86, 0xdd], [0x81, 0x00]][usize::from(kind % 4)];
            device.give(&[&mac(1).0[..], &mac(2).0, &kind, bytes].concat());
        }
        &Step::Answer { which, wild, syndrome, psn, length } => {
            answer(device, which, wild.is_wild(), syndrome, psn, length);
        }
        &Step::Post(qp, kind, place, length) => post(device, usize::from(qp) % QPS, kind, place, length.into()),
        &Step::Receive(qp, at, length) => {
            let (lkey, start) = device.region(false);
            let sge = Sge { addr: start + u64::from(at), length: length.into(), lkey };
            device.receive(usize::from(qp) % QPS, RecvWr { wr_id: 0, sges: vec![sge], malformed: false });
        }
        &Step::Again(which) => {
            if let Some(frame) = device.recent(which) {
                device.give(&frame);
            }
        }
        &Step::Deaf(deaf) => device.deaf = deaf,
        &Step::Time(micros) => device.pass(Duration::from_micros(micros.into())),
        &Step::Modify(qp, state) => {
            let state = [QpState::Error, QpState::Sqd, QpState::Rts][usize::from(state % 3)];
            device.modify(usize::from(qp) % QPS, state);
        }
        &Step::Connect(qp) => device.connect(usize::from(qp) % QPS),
        Step::Bind(250..) => device.unbind(),
        &Step::Bind(vlan) => device.bind((vlan >= 240).then_some(vlan.into())),
    }
}

fuzz_target!(|steps: Steps<Step>| {
    let mut device = Device::default();
    for each in &steps.0 {
        step(&mut device, each);
    }
    device.end(|device| {
        let target = remote(device, Place { at: 0, readable: false, key: 0 }, false);
        let reth = Reth { address: target.addr, rkey: target.rkey, length: 4 };
        let mut header = header(Opcode::write(Position::Only), qpn(0), *device.psn(0), Extension::Reth(reth));
        header.bth.ack_request = true;
        build(&header, &[1; 4]).expect("a good packet")
    });
});
