//! The captured responder answers our requester.

use std::time::Duration;

use pvrdma_roce::{
    Requester, Tuning, admit_connected,
    wire::{Extension, MAX_FRAME, Operation, Packet, Position},
};
use pvrdma_verbs_types::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::{CLEAN, comparable, connections, flow_label, is_response, receiver_of};
use crate::host::{Host, KEY};
use crate::pcap;

const SOURCE: u64 = 0xa_0000_0000;

/// Turns the requests of one captured direction into work requests, and puts their payload into the memory of `host`.
pub(super) fn works(packets: &[&Packet<'_>], host: &mut Host) -> Vec<SendWr> {
    let mut works: Vec<SendWr> = Vec::new();
    let mut end = SOURCE;
    for packet in packets.iter().filter(|packet| !is_response(packet)) {
        let header = &packet.header;
        let info = header.bth.opcode.info().unwrap();
        if info.position.starts() {
            let remote = header.extension.reth().map(|r| RemoteAddress { addr: r.address, rkey: r.rkey });
            let remote = remote.unwrap_or_default();
            let mut length = 0;
            let op = match (info.operation, header.extension) {
                (Operation::Write, _) => SendOp::Write { remote, immediate: None },
                (Operation::ReadRequest, Extension::Reth(reth)) => {
                    length = reth.length;
                    SendOp::Read { remote }
                }
                (Operation::CompareSwap | Operation::FetchAdd, Extension::AtomicEth(a)) => {
                    length = 8;
                    let remote = RemoteAddress { addr: a.address, rkey: a.rkey };
                    match info.operation {
                        Operation::FetchAdd => SendOp::FetchAdd { remote, add: a.swap_or_add },
                        _ => SendOp::CompareSwap { remote, compare: a.compare, swap: a.swap_or_add },
                    }
                }
                _ => SendOp::Send { data: SendData::None, to: None },
            };
            end = (end + 1).next_multiple_of(0x10_0000);
            let sges = vec![Sge { addr: end, length, lkey: KEY }];
            works.push(SendWr { wr_id: works.len() as u64, op, flags: SendFlags::SIGNALED, sges });
        }
        let work = works.last_mut().unwrap();
        host.memory.write(end, packet.payload);
        end += packet.payload.len() as u64;
        work.sges[0].length += u32::try_from(packet.payload.len()).unwrap();
        if header.bth.solicited {
            work.flags |= SendFlags::SOLICITED;
        }
        match (&mut work.op, header.extension.immediate(), header.extension) {
            (SendOp::Send { data, .. }, Some(bytes), _) => *data = SendData::Immediate(bytes),
            (SendOp::Send { data, .. }, _, Extension::Ieth(ieth)) => *data = SendData::Invalidate(ieth.rkey),
            (SendOp::Write { immediate, .. }, Some(bytes), _) => *immediate = Some(bytes),
            _ => {}
        }
    }
    works
}

/// The work requests of the captured requester produce the captured packets, and the captured responses complete them.
#[test]
fn our_requester_asks_as_captured() {
    let mut compared = 0;
    for (name, mtu) in CLEAN {
        let frames = pcap::load(name);
        let packets: Vec<Packet<'_>> = frames.iter().map(|frame| Packet::parse(frame).unwrap()).collect();
        for (own, peer, both) in connections(&packets) {
            // The requester is at the other end of the path.
            let Some(answer) = both.iter().find(|packet| is_response(packet)) else { continue };
            let label = flow_label(&both, name);
            let (mut attrs, path) = receiver_of(answer, own, mtu, label);
            assert_eq!(answer.header.bth.destination, peer);
            attrs.sq_psn = both[0].header.bth.psn;
            let mut host = Host::new();
            let tuning = Tuning::default().with_window(4096).with_read_chunk(2048).with_requests(1000);
            let mut requester = Requester::new(&attrs, path, tuning);
            let works = works(&both, &mut host);
            let reads = works.iter().filter(|work| matches!(work.op, SendOp::Read { .. })).map(|work| work.sges[0]);
            let reads: Vec<Sge> = reads.collect();
            let expected: Vec<(u64, u32)> = works
                .iter()
                .map(|work| {
                    let data = !matches!(work.op, SendOp::Send { .. } | SendOp::Write { .. });
                    (work.wr_id, if data { work.sges[0].length } else { 0 })
                })
                .collect();
            for work in works {
                requester.post(work, &mut host);
            }
            let mut out = [0; MAX_FRAME];
            for packet in &both {
                let at = || format!("{name} {own}: {packet}");
                if is_response(packet) {
                    assert!(admit_connected(packet, peer, &path).is_ok(), "{}", at());
                    requester.handle_packet(Duration::ZERO, packet, &mut host);
                    continue;
                }
                let length = requester.poll_transmit(Duration::ZERO, &mut host, &mut out);
                let length = length.unwrap_or_else(|| panic!("{}: nothing sent", at()));
                let request = Packet::parse(&out[..length]).unwrap();
                let mut theirs = comparable(&packet.header);
                // The requester chooses the packets of a message that ask for an ACK.
                if !packet.header.bth.opcode.info().is_some_and(|info| info.position != Position::Middle) {
                    theirs.bth.ack_request = request.header.bth.ack_request;
                }
                assert_eq!(comparable(&request.header), theirs, "{}", at());
                assert!(request.payload == packet.payload, "{}", at());
                compared += 1;
            }
            assert_eq!(requester.poll_transmit(Duration::ZERO, &mut host, &mut out), None, "{name} {own}");
            let ended: Vec<(u64, u32)> = host.sent.iter().map(|ended| (ended.wr_id, ended.byte_len)).collect();
            let statuses: Vec<WcStatus> = host.sent.iter().map(|ended| ended.status).collect();
            if name == "send_inv_mw" {
                assert_eq!(statuses, [WcStatus::Success, WcStatus::Success, WcStatus::RemoteAccess]);
                continue;
            }
            let answered = both.iter().filter(|packet| is_response(packet)).flat_map(|packet| packet.payload);
            let landed = reads.iter().flat_map(|sge| host.memory.get(sge.addr, usize::try_from(sge.length).unwrap()));
            assert!(landed.eq(answered.copied()), "{name} {own}: wrong data");
            assert!(statuses.iter().all(|&status| status == WcStatus::Success), "{name} {own}: {statuses:?}");
            assert_eq!(ended, expected, "{name} {own}");
            assert_eq!(requester.stats().retransmitted, 0, "{name} {own}");
        }
    }
    assert!(compared > 450, "{compared}");
}
