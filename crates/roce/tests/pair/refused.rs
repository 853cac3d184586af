//! Saved states that are refused, each for its reason.

use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_pages::PageListBuilder;
use pvrdma_roce::{
    Requester, Responder,
    saved::{
        RestoreError::{self, Contradiction, Missing, TooMany, Value},
        restore_pages, restore_send, save_pages, save_send,
    },
};
use pvrdma_saved_state::{pages, roce as saved, work};
use pvrdma_verbs_types::{
    Access, FastRegister, Gid, Invalidate, Qpn, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, UdDestination,
};

use super::host::KEY;
use super::net::{End, Setup};

const NOW: Duration = Duration::from_secs(1);
const REMOTE: RemoteAddress = RemoteAddress { addr: 0x5000, rkey: KEY };

fn work(wr_id: u64, op: SendOp, flags: SendFlags) -> SendWr {
    SendWr { wr_id, op, flags, sges: vec![Sge { addr: 0x1000, length: 3000, lkey: KEY }] }
}

/// A requester with a READ, an atomic and two WRITEs, of which the last was not started.
fn requesting() -> End {
    let mut end = End::new(&Setup::default(), 1, 2);
    let write = SendOp::Write { remote: REMOTE, immediate: None };
    end.post(work(0, SendOp::Read { remote: REMOTE }, SendFlags::empty()));
    end.post(work(1, SendOp::FetchAdd { remote: REMOTE, add: 1 }, SendFlags::empty()));
    end.post(work(2, write.clone(), SendFlags::empty()));
    end.post(work(3, write, SendFlags::FENCE));
    end.transmit(NOW);
    end
}

/// A responder that has executed two atomics and a part of a WRITE.
fn responding() -> End {
    let setup = Setup::default();
    let (mut ours, mut peer) = (End::new(&setup, 1, 2), End::new(&setup, 2, 1));
    (0..2).for_each(|id| ours.post(work(id, SendOp::FetchAdd { remote: REMOTE, add: 1 }, SendFlags::empty())));
    ours.post(work(2, SendOp::Write { remote: REMOTE, immediate: None }, SendFlags::empty()));
    let sent = ours.transmit(NOW);
    sent.iter().take(4).for_each(|frame| peer.receive(NOW, frame));
    peer
}

fn requester(change: impl FnOnce(&mut saved::Requester)) -> Option<RestoreError> {
    let end = requesting();
    let mut state = end.requester.save(NOW);
    assert_eq!((state.executed, state.sent, state.posted, state.requests.len()), (0, 7, 10, 4));
    change(&mut state);
    Requester::restore(&end.attrs, end.path, end.tuning, NOW, state).err()
}

fn responder(change: impl FnOnce(&mut saved::Responder)) -> Option<RestoreError> {
    let end = responding();
    let mut state = end.responder.save();
    assert_eq!((state.responses.len(), state.resources.len(), state.message.is_some()), (2, 2, true));
    change(&mut state);
    Responder::restore(&end.attrs, end.path, state).err()
}

#[test]
fn a_requester_with_marks_or_requests_that_contradict_each_other() {
    assert_eq!(requester(|_| {}), None);
    let value = |field, value| Some(Value { field, value });
    assert_eq!(requester(|state| state.una |= 1 << 24), value("oldest PSN", 0x1ff_fff0));
    let order = Some(Contradiction("the marks in PSN space are not in order"));
    assert_eq!(requester(|state| state.executed = 8), order);
    assert_eq!(requester(|state| state.posted = 6), order);
    let many = Some(Contradiction("more PSNs are outstanding than a connection may have"));
    assert_eq!(requester(|state| (state.sent, state.posted) = (1 << 23, 1 << 23)), many);
    assert_eq!(requester(|state| state.posted = u64::MAX), value("number of posted PSNs", u64::MAX));
    let late = Some(Contradiction("the oldest request begins after the oldest PSN that is not done"));
    assert_eq!(requester(|state| state.posted = 11), late);
    // The READ has three PSNs, all of which were done.
    assert_eq!(requester(|state| state.posted = 7), Some(Contradiction("the oldest request is done")));
    let unstarted = Some(Contradiction("PSNs of a request that was not started were sent"));
    assert_eq!(requester(|state| state.sent = 8), unstarted);
    assert_eq!(requester(|state| state.requests[2].stage = 0), unstarted);
    let order = Some(Contradiction("requests were not started in order"));
    assert_eq!(requester(|state| (state.sent, state.requests[1].stage) = (3, 0)), order);
    let none = Some(Contradiction("PSNs are posted without a request"));
    assert_eq!(requester(|state| state.requests.clear()), none);
    assert_eq!(requester(|state| state.requests[0].stage = 3), value("stage of a request", 3));
    let fail =
        |status| move |state: &mut saved::Requester| (state.requests[3].stage, state.requests[3].status) = (2, status);
    assert_eq!(requester(fail(10)), None);
    assert_eq!(requester(fail(0)), value("completion status", 0));
    assert_eq!(requester(fail(3)), value("completion status", 3));
    assert_eq!(requester(|state| state.requests[3].work = None), Some(Missing { field: "work request" }));
    let long = |state: &mut saved::Requester| {
        let work = state.requests[2].work.as_mut().unwrap();
        work.sges = vec![work::Sge { length: u32::MAX, ..work.sges[0] }];
        (state.sent, state.posted) = (4, 7);
    };
    assert_eq!(requester(long), Some(Contradiction("a request that is too long has not failed")));
    let ended = Some(Contradiction("a requester has ended and holds requests"));
    assert_eq!(requester(|state| state.ended = true), ended);
}

#[test]
fn a_requester_with_values_out_of_range() {
    let value = |field, value| Some(Value { field, value });
    assert_eq!(requester(|state| state.retries = 8), value("number of retries", 8));
    assert_eq!(requester(|state| state.rnr_retries = 256), value("number of RNR retries", 256));
    assert_eq!(requester(|state| state.sack = 3), value("state of selective acknowledgements", 3));
    assert_eq!(requester(|state| state.peer_port = Some(1 << 16)), value("UDP port", 1 << 16));
    let fails = |seq, status| requester(|state| state.failing = Some(saved::Failing { seq, status }));
    assert_eq!(fails(3, 9), None);
    assert_eq!(fails(3, 0), value("completion status", 0));
    assert_eq!(fails(7, 9), Some(Contradiction("the request that fails was not sent")));
    assert_eq!(fails(2, 9), Some(Contradiction("the request that fails has none before it")));
    assert_eq!(requester(|state| state.reads = None), Some(Missing { field: "division of READs" }));
    let grid = |change: fn(&mut saved::ReadGrid)| requester(|state| change(state.reads.as_mut().unwrap()));
    assert_eq!(grid(|grid| grid.new_length = 0), value("length of READ requests", 0));
    assert_eq!(grid(|grid| grid.old_length = 0), value("length of READ requests", 0));
    let unsent = Some(Contradiction("the division of READs is not one of requests that were sent"));
    assert_eq!(grid(|grid| grid.new_since = 8), unsent);
    assert_eq!(grid(|grid| grid.old_since = 1), unsent);
    assert_eq!(grid(|grid| grid.splits = vec![8]), unsent);
    assert_eq!(grid(|grid| grid.splits = vec![1; 17]), Some(TooMany { elements: "split READ requests", most: 16 }));
}

#[test]
fn a_responder_with_values_out_of_range() {
    assert_eq!(responder(|_| {}), None);
    let (value, wide) = (|field, value| Some(Value { field, value }), 1 << 24);
    assert_eq!(responder(|state| state.expected = wide), value("expected PSN", wide.into()));
    assert_eq!(responder(|state| state.msn = wide), value("MSN", wide.into()));
    assert_eq!(responder(|state| state.ack_psn = wide), value("acknowledged PSN", wide.into()));
    assert_eq!(responder(|state| state.ack_msn = wide), value("MSN", wide.into()));
    assert_eq!(responder(|state| state.unacked_duplicate = Some(wide)), value("PSN of a duplicate", wide.into()));
    assert_eq!(responder(|state| state.nak_sent = -1), value("kind of NAK", 0xffff_ffff));
    assert_eq!(responder(|state| state.sack = 3), value("state of selective acknowledgements", 3));
    assert_eq!(responder(|state| state.peer_port = Some(1 << 16)), value("UDP port", 1 << 16));
    let inside = Some(Contradiction("a responder has ended inside a message"));
    assert_eq!(responder(|state| state.ended = true), inside);
    let message = |message| responder(|state| state.message = Some(message));
    let long = value("message length", (1 << 31) + 1);
    assert_eq!(message(saved::Message::Send((1 << 31) + 1)), long);
    let write =
        |left, length| message(saved::Message::Write(saved::WriteInProgress { addr: 0, rkey: 0, left, length }));
    assert_eq!(write(1, 1 << 31), None);
    assert_eq!(write(1, (1 << 31) + 1), long);
    let rest = Some(Contradiction("the rest of a WRITE is not a part of it"));
    assert_eq!((write(0, 10), write(10, 10)), (rest, rest));
}

#[test]
fn a_responder_with_responses_and_resources_that_it_cannot_have() {
    let (value, wide) = (|field, value| Some(Value { field, value }), 1 << 24);
    let response = |change: fn(&mut saved::Response)| responder(|state| change(&mut state.responses[0]));
    assert_eq!(response(|response| response.psn = 1 << 24), value("PSN of a response", wide));
    assert_eq!(response(|response| response.msn = 1 << 24), value("MSN", wide));
    assert_eq!(response(|response| response.kind = None), Some(Missing { field: "kind of a response" }));
    let nak = |byte| responder(|state| state.responses[0].kind = Some(saved::ResponseKind::Nak(byte)));
    assert_eq!([0x21, 0x60, 0x63].map(nak), [None; 3]);
    // An ACK, two syndromes that this responder never sends, one that is undefined, and no byte.
    for byte in [0x1f, 0x64, 0x7f, 0x80, 0x100] {
        assert_eq!(nak(byte), value("syndrome of a NAK", byte.into()));
    }
    let read = |request, length| {
        let read = saved::ReadResponse { request, length, ..saved::ReadResponse::default() };
        responder(|state| state.responses[0].kind = Some(saved::ResponseKind::Read(read)))
    };
    assert_eq!(read(0, 1 << 31), None);
    assert_eq!(read(1 << 24, 1), value("PSN of a READ", wide));
    assert_eq!(read(0, u32::MAX), value("message length", u32::MAX.into()));
    let many = |state: &mut saved::Responder| state.responses = vec![state.responses[0]; 1022];
    assert_eq!(responder(many), Some(TooMany { elements: "responses", most: 1021 }));

    let resource = |change: fn(&mut saved::Resource)| responder(|state| change(&mut state.resources[0]));
    assert_eq!(resource(|resource| resource.psn = 1 << 24), value("PSN of a responder resource", wide));
    let none = Some(Missing { field: "operation of a responder resource" });
    assert_eq!(resource(|resource| resource.executed = None), none);
    let long = saved::ReadRange { length: u32::MAX, ..saved::ReadRange::default() };
    let long = responder(|state| state.resources[0].executed = Some(saved::Executed::Read(long)));
    assert_eq!(long, value("message length", u32::MAX.into()));
    let many = |state: &mut saved::Responder| state.resources = vec![state.resources[0]; 256];
    assert_eq!(responder(many), Some(TooMany { elements: "responder resources", most: 255 }));
}

/// A request of every kind.
fn requests() -> Vec<SendWr> {
    let to = UdDestination {
        qpn: Qpn::new(7),
        qkey: 8,
        sgid_index: 9,
        dgid: Gid([10; 16]),
        dmac: MacAddr([11; 6]),
        service_level: 12,
        traffic_class: 13,
        flow_label: 14,
        hop_limit: 15,
    };
    let mut pages = PageListBuilder::default();
    [0x1000, 0x2000, 0x9000].into_iter().for_each(|page| pages.push(page).unwrap());
    let register = |pages| FastRegister { key: 1, iova: 2, length: 3, access: Access::REMOTE_READ, pages };
    let operations = [
        SendOp::Send { data: SendData::None, to: None },
        SendOp::Send { data: SendData::Immediate([1, 2, 3, 4]), to: Some(to) },
        SendOp::Send { data: SendData::Invalidate(5), to: None },
        SendOp::Write { remote: REMOTE, immediate: None },
        SendOp::Write { remote: REMOTE, immediate: Some([5, 6, 7, 8]) },
        SendOp::Read { remote: REMOTE },
        SendOp::CompareSwap { remote: REMOTE, compare: 1, swap: 2 },
        SendOp::FetchAdd { remote: REMOTE, add: 3 },
        SendOp::LocalInvalidate(Invalidate { key: 9 }),
        SendOp::FastRegister(Box::new(register(Some(pages.finish())))),
        SendOp::FastRegister(Box::new(register(None))),
        SendOp::Unsupported { opcode: 99 },
        SendOp::Malformed,
    ];
    let sges = vec![Sge { addr: 1, length: 2, lkey: 3 }, Sge { addr: 4, length: 5, lkey: 6 }];
    (0..).zip(operations).map(|(wr_id, op)| SendWr { wr_id, op, flags: SendFlags::FENCE, sges: sges.clone() }).collect()
}

#[test]
fn every_kind_of_request_comes_back() {
    for request in requests() {
        assert_eq!(restore_send(save_send(&request)), Ok(request));
    }
}

#[test]
fn a_request_with_values_out_of_range() {
    let change = |index: usize, change: fn(&mut work::SendWr)| {
        let mut work = save_send(&requests()[index]);
        change(&mut work);
        restore_send(work).err()
    };
    let value = |field, value| Some(Value { field, value });
    assert_eq!(change(0, |work| work.flags = 8), value("flags of a send request", 8));
    assert_eq!(change(0, |work| work.flags = 0x101), value("flags of a send request", 0x101));
    assert_eq!(change(0, |work| work.operation = None), Some(Missing { field: "operation" }));
    let no_remote = |work: &mut work::SendWr| work.operation = Some(work::Operation::Write(work::Write::default()));
    assert_eq!(change(3, no_remote), Some(Missing { field: "remote address" }));
    let both = |work: &mut work::SendWr| {
        let send = work::Send { immediate: Some(1), invalidate: Some(2), to: None };
        work.operation = Some(work::Operation::Send(send));
    };
    let reason = Contradiction("a SEND has immediate data and a key to invalidate");
    assert_eq!(change(0, both), Some(reason));
    let to = |change: fn(&mut work::Destination)| {
        let mut work = save_send(&requests()[1]);
        let Some(work::Operation::Send(work::Send { to: Some(to), .. })) = &mut work.operation else { unreachable!() };
        change(to);
        restore_send(work).err()
    };
    assert_eq!(to(|_| {}), None);
    assert_eq!(to(|to| to.qpn = 1 << 24), value("QPN", 1 << 24));
    assert_eq!(to(|to| to.sgid_index = 256), value("GID index", 256));
    assert_eq!(to(|to| to.dgid.push(0)), value("length of a GID", 17));
    assert_eq!(to(|to| to.dmac.clear()), value("length of a MAC address", 0));
    assert_eq!(to(|to| to.service_level = 256), value("service level", 256));
    assert_eq!(to(|to| to.traffic_class = 256), value("traffic class", 256));
    assert_eq!(to(|to| to.flow_label = 1 << 20), value("flow label", 1 << 20));
    assert_eq!(to(|to| to.hop_limit = 256), value("hop limit", 256));
    let access = |work: &mut work::SendWr| {
        let register = work::FastRegister { access: 0x10, ..work::FastRegister::default() };
        work.operation = Some(work::Operation::FastRegister(register));
    };
    assert_eq!(change(9, access), value("access rights", 0x10));
}

#[test]
fn lists_of_pages_with_values_out_of_range() {
    let list =
        |first: &[u64], count: &[u32]| restore_pages(&pages::PageList { first: first.to_vec(), count: count.to_vec() });
    let saved = save_pages(&list(&[1, 7], &[3, 2]).unwrap());
    assert_eq!((saved.first, saved.count), (vec![1, 7], vec![3, 2]));
    let lengths = Contradiction("the lists of pages and of their numbers have different lengths");
    assert_eq!(list(&[1], &[]).err(), Some(lengths));
    let bad = |first| Some(Value { field: "page number", value: first });
    assert_eq!(list(&[0], &[1]).err(), bad(0));
    assert_eq!(list(&[1], &[0]).err(), bad(1));
    assert_eq!(list(&[1 << 52], &[1]).err(), bad(1 << 52));
    assert_eq!(list(&[(1 << 52) - 1], &[1]).err(), bad((1 << 52) - 1));
    assert_eq!(list(&[1, 2, 3], &[u32::MAX, 1, 1]).err(), bad(2));
}
