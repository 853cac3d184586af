//! Requests that a paused responder holds off with an RNR NAK.

use std::time::Duration;

use pvrdma_roce::wire::{Extension, MAX_FRAME, Packet, Syndrome};
use pvrdma_saved_state::Message;
use pvrdma_verbs_types::{Psn, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::host::KEY;
use super::net::{End, Pair, Setup};

const REMOTE: RemoteAddress = RemoteAddress { addr: 0x5000, rkey: KEY };
/// 40.96 ms.
const TIMER: u8 = 24;
const WAIT: Duration = Duration::from_micros(40_960);

fn work(wr_id: u64, op: SendOp) -> SendWr {
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: vec![Sge { addr: 0x1000, length: 8, lkey: KEY }] }
}

fn operations() -> [SendOp; 4] {
    [
        SendOp::Send { data: SendData::None, to: None },
        SendOp::Write { remote: REMOTE, immediate: None },
        SendOp::Read { remote: REMOTE },
        SendOp::FetchAdd { remote: REMOTE, add: 1 },
    ]
}

/// Returns the RNR NAK for a frame, if the responder holds it off. Its state must not change.
fn held(end: &End, frame: &[u8]) -> Option<Vec<u8>> {
    let before = end.responder.save().encode_to_vec();
    let mut out = [0; MAX_FRAME];
    let length = end.responder.hold_off(&Packet::parse(frame).unwrap(), TIMER, &mut out);
    assert_eq!(end.responder.save().encode_to_vec(), before);
    length.map(|length| out[..length].to_vec())
}

fn psn(frame: &[u8]) -> Psn {
    Packet::parse(frame).unwrap().header.bth.psn
}

/// A pair whose requester waits for nothing but an RNR wait.
fn pair() -> Pair {
    let mut setup = Setup::default();
    (setup.attrs.retry_cnt, setup.attrs.timeout) = (0, 0);
    Pair::new(&setup, 1)
}

#[test]
fn a_request_that_was_held_off_is_executed_once_when_it_is_repeated() {
    for op in operations() {
        let mut pair = pair();
        pair.ends[1].host.post_receive(9, 0x9000, 8);
        pair.ends[0].post(work(1, op.clone()));
        let sent = pair.ends[0].transmit(pair.now);
        let begin = pair.now;
        for held_off in 1..=3 {
            let nak = held(&pair.ends[1], &sent[0]).unwrap_or_else(|| panic!("{op:?}"));
            let Extension::Aeth(aeth) = Packet::parse(&nak).unwrap().header.extension else { panic!("no NAK") };
            assert_eq!(aeth.syndrome, Syndrome::RnrNak { timer: TIMER });
            pair.ends[0].receive(pair.now, &nak);
            assert!(pair.ends[0].transmit(pair.now).is_empty(), "the wait has not ended");
            pair.now = begin + WAIT * held_off;
            let now = pair.now;
            pair.ends[0].requester.handle_timeout(now, &mut pair.ends[0].host);
            let repeated = pair.ends[0].transmit(now);
            assert_eq!((repeated.len(), psn(&repeated[0])), (1, psn(&sent[0])), "{op:?}");
        }
        pair.ends[1].receive(pair.now, &sent[0]);
        pair.run();
        let sent = &pair.ends[0].host.sent;
        assert_eq!(sent.iter().map(|ended| (ended.wr_id, ended.status)).collect::<Vec<_>>(), [(1, WcStatus::Success)]);
        let responder = pair.ends[1].responder.stats();
        assert_eq!((responder.executed, responder.duplicates, responder.not_ready), (1, 0, 0), "{op:?}");
    }
}

#[test]
fn other_packets_are_not_held_off() {
    let mut pair = pair();
    (0..3).for_each(|id| pair.ends[0].post(work(id, SendOp::Write { remote: REMOTE, immediate: None })));
    let sent = pair.ends[0].transmit(pair.now);
    pair.ends[1].receive(pair.now, &sent[0]);
    let acknowledgement = pair.ends[1].transmit(pair.now).remove(0);
    assert_eq!(held(&pair.ends[1], &sent[0]), None, "it was executed");
    assert!(held(&pair.ends[1], &sent[1]).is_some());
    assert_eq!(held(&pair.ends[1], &sent[2]), None, "the one before it is missing");
    assert_eq!(held(&pair.ends[1], &acknowledgement), None, "it is a response");
    pair.ends[1].responder.end();
    assert_eq!(held(&pair.ends[1], &sent[1]), None, "the responder has ended");
}

/// The peer takes an RNR NAK behind a READ without data for the loss of that data.
#[test]
fn responses_with_data_leave_before_an_rnr_nak() {
    for op in [SendOp::Read { remote: REMOTE }, SendOp::FetchAdd { remote: REMOTE, add: 1 }] {
        let mut pair = pair();
        pair.ends[0].post(work(1, op));
        pair.ends[0].post(work(2, SendOp::Read { remote: REMOTE }));
        let sent = pair.ends[0].transmit(pair.now);
        pair.ends[1].receive(pair.now, &sent[0]);
        assert_eq!(held(&pair.ends[1], &sent[1]), None);
        pair.ends[1].transmit(pair.now);
        assert!(held(&pair.ends[1], &sent[1]).is_some());
    }
}
