//! The state that the requester and the responder show of themselves.

use pvrdma_verbs_types::{Psn, RemoteAddress, SendFlags, SendOp, SendWr, Sge};

use super::host::KEY;
use super::net::{Pair, Setup};

#[test]
fn a_message_on_its_way() {
    let mut pair = Pair::new(&Setup::default(), 1);
    let (now, first) = (pair.now, Psn::new(0x00ff_fff0));
    let op = SendOp::Write { remote: RemoteAddress { addr: 0x5000, rkey: KEY }, immediate: None };
    let sges = vec![Sge { addr: 0x1000, length: 20 * 1024, lkey: KEY }];
    pair.ends[0].post(SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, sges });
    let posted = pair.ends[0].requester.inspect(now);
    assert_eq!((posted.requests, posted.in_flight, posted.srtt_us), (1, 0, None));
    assert_eq!((posted.snd_una, posted.snd_nxt, posted.snd_posted), (first, first, first.plus(20)));
    assert!(posted.timers.is_empty());

    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    // The third is lost.
    for (_, frame) in sent.iter().enumerate().filter(|&(index, _)| index != 2) {
        peer.receive(now, frame);
    }
    let flying = ours.requester.inspect(now);
    assert_eq!((flying.in_flight, flying.stats.packets, flying.snd_max), (20, 20, first.plus(20)));
    assert!(flying.timers.iter().any(|timer| timer.due_in_us > 0));
    let waiting = peer.responder.inspect();
    assert_eq!((waiting.expected_psn, waiting.msn, waiting.in_message), (first.plus(2), 0, true));
    assert!(waiting.pending_responses > 0 && waiting.stats.out_of_sequence > 0);

    let answers = peer.transmit(now);
    for frame in answers {
        ours.receive(now, &frame);
    }
    pair.run();
    let done = pair.ends[0].requester.inspect(pair.now);
    assert_eq!((done.requests, done.in_flight, done.snd_una), (0, 0, first.plus(20)));
    assert!(done.stats.retransmitted > 0);
    let executed = pair.ends[1].responder.inspect();
    assert_eq!((executed.expected_psn, executed.msn, executed.in_message), (first.plus(20), 1, false));
}
