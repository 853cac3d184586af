//! Halves that are saved and go on as new ones, at any moment: every byte right, everything once and in order.

use std::collections::BTreeSet;
use std::time::Duration;

use pvrdma_saved_state::Message;
use pvrdma_verbs_types::{
    QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge,
    WcStatus::{Flushed, RemoteAccess, Success},
};

use super::host::KEY;
use super::mixed;
use super::net::{Faults, Pair, Random, Setup};

const LOCAL: u64 = 0x100_0000;
const REMOTE: u64 = 0x500_0000;
const RESULT: u64 = 0x600_0000;
const COUNTER: u64 = 0x900_0000;

fn work(wr_id: u64, op: SendOp, addr: u64, length: u32) -> SendWr {
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: vec![Sge { addr, length, lkey: KEY }] }
}

/// A request of each kind.
fn script() -> Vec<SendWr> {
    let remote = |addr| RemoteAddress { addr, rkey: KEY };
    let add = |wr_id| work(wr_id, SendOp::FetchAdd { remote: remote(COUNTER), add: 1 }, RESULT + 8 * wr_id, 8);
    let send = SendOp::Send { data: pvrdma_verbs_types::SendData::Immediate([1, 2, 3, 4]), to: None };
    let write = |immediate| SendOp::Write { remote: remote(REMOTE), immediate };
    vec![
        work(0, write(None), LOCAL, 9 * 1024),
        add(1),
        work(2, SendOp::Read { remote: remote(LOCAL) }, RESULT + 0x1000, 20 * 1024),
        work(3, send, LOCAL, 5 * 1024),
        add(4),
        work(5, write(Some([5; 4])), LOCAL, 11 * 1024),
        work(6, SendOp::Read { remote: remote(LOCAL) }, RESULT + 0x8000, 3 * 1024),
        add(7),
    ]
}

/// A pair with the script posted on both sides.
fn pair(negotiate: bool, faults: Faults, seed: u64) -> Pair {
    let base = Setup::default();
    let attrs = QpAttrs { retry_cnt: 7, ..base.attrs };
    let mut pair = Pair::new(&Setup { tuning: base.tuning.with_negotiate(negotiate), attrs, ..base }, seed);
    pair.faults = faults;
    for end in &mut pair.ends {
        end.keeps = true;
        end.host.memory.write(LOCAL, &data());
        end.host.post_receive(0, REMOTE + 0x10_0000, 8 * 1024);
        end.host.post_receive(1, REMOTE + 0x20_0000, 8 * 1024);
        script().into_iter().for_each(|work| end.post(work));
    }
    pair
}

fn data() -> Vec<u8> {
    (0..20 * 1024_u32).map(|i| i.to_le_bytes()[(i % 3) as usize]).collect()
}

fn is_done(pair: &Pair) -> bool {
    pair.ends.iter().all(|end| end.host.sent.len() == script().len())
}

/// Checks that the script was executed once, in order.
fn check(pair: &Pair, at: &str) {
    for end in &pair.ends {
        let sent: Vec<_> = end.host.sent.iter().map(|ended| (ended.wr_id, ended.status)).collect();
        assert_eq!(sent, (0..8).map(|wr_id| (wr_id, Success)).collect::<Vec<_>>(), "{at}");
        let received: Vec<_> = end.host.received.iter().map(|(ended, _)| (ended.wr_id, ended.status)).collect();
        assert_eq!(received, [(0, Success), (1, Success)], "{at}");
        let (memory, data) = (&end.host.memory, data());
        assert!(memory.get(REMOTE, 11 * 1024) == data[..11 * 1024], "{at}: WRITE");
        assert!(memory.get(REMOTE + 0x10_0000, 5 * 1024) == data[..5 * 1024], "{at}: SEND");
        assert!(memory.get(RESULT + 0x1000, 20 * 1024) == data, "{at}: READ");
        assert_eq!(end.host.atomics, 3, "{at}");
        let results = [1, 4, 7].map(|wr_id| memory.get(RESULT + 8 * wr_id, 8)[0]);
        assert_eq!((results, memory.get(COUNTER, 8)[0]), ([0, 1, 2], 3), "{at}");
    }
}

/// Saves both ends, or one of them, before every step of the script.
#[test]
fn a_script_goes_on_from_every_step() {
    let lossy = Faults { loss: 30, duplicate: 30, reorder: 100, ..Faults::default() };
    for (negotiate, faults) in [(false, Faults::default()), (true, Faults::default()), (false, lossy), (true, lossy)] {
        for seed in 0..10 {
            for moment in 0.. {
                let at = format!("negotiate {negotiate} seed {seed} moment {moment}");
                let mut pair = pair(negotiate, faults, seed);
                let reached = (0..moment).all(|_| pair.step() && !is_done(&pair));
                let now = pair.now;
                let which = if moment % 3 == 0 { 0..2 } else { moment % 2..moment % 2 + 1 };
                pair.ends[which].iter_mut().for_each(|end| end.replace(now));
                pair.run();
                check(&pair, &format!("{at}\n{}", pair.report()));
                if !reached {
                    break;
                }
            }
        }
    }
}

/// Numbers of the fields that a message has: those that differ from their default.
fn fields(message: &[u8]) -> BTreeSet<u64> {
    let mut rest = message;
    let varint = |rest: &mut &[u8]| {
        let (end, mut value) = (rest.iter().position(|byte| byte & 0x80 == 0).unwrap(), 0);
        rest[..=end].iter().rev().for_each(|byte| value = value << 7 | u64::from(byte & 0x7f));
        *rest = &rest[end + 1..];
        value
    };
    let mut found = BTreeSet::new();
    while !rest.is_empty() {
        let key = varint(&mut rest);
        found.insert(key >> 3);
        let length = match key & 7 {
            0 => {
                varint(&mut rest);
                0
            }
            1 => 8,
            2 => varint(&mut rest),
            _ => 4,
        };
        rest = &rest[usize::try_from(length).unwrap()..];
    }
    found
}

/// Ends that are replaced time and again, with mixed operations over a bad network. Each field occurs, and
/// [`super::net::End::replace`] compares all of them; those of failed and of drained ends have tests of their own.
#[test]
fn random_scripts_go_on_from_anywhere() {
    let mut replaced = 0;
    let mut seen = [BTreeSet::new(), BTreeSet::new()];
    for seed in 0..400 {
        let mut random = Random(seed ^ 0x5a7e);
        let mut upto = |limit: u64| if random.chance(500) { random.below(limit + 1) } else { 0 };
        let faults = Faults { loss: upto(50), duplicate: upto(100), reorder: upto(100), corrupt: upto(20) };
        mixed::scenario_with(seed, Some(faults), seed % 2 == 0, |pair| {
            let now = pair.now;
            for end in &mut pair.ends {
                if random.chance(30) {
                    let states = [end.requester.save(now).encode_to_vec(), end.responder.save().encode_to_vec()];
                    states.iter().zip(&mut seen).for_each(|(state, seen)| seen.extend(fields(state)));
                    end.replace(now);
                    replaced += 1;
                }
            }
        });
    }
    assert!(replaced > 3000, "{replaced}");
    let all = |fields: u64, elsewhere: &[u64]| (1..=fields).filter(|field| !elsewhere.contains(field)).collect();
    assert_eq!(seen, [all(15, &[11, 12, 13]), all(17, &[16])]);
}

/// A peer that agreed on selective acknowledgements hears at once that the buffer is gone.
#[test]
fn an_agreed_peer_needs_no_timeout_and_no_retry() {
    for seed in 0..10 {
        for moment in 3..40 {
            let mut pair = pair(true, Faults { loss: 60, ..Faults::default() }, seed);
            for _ in 0..moment {
                pair.step();
            }
            // A packet that is lost from now on would cost time of its own.
            pair.faults = Faults::default();
            let (now, timeouts) = (pair.now, pair.ends[0].requester.stats().timeouts);
            pair.ends[1].replace(now);
            while !is_done(&pair) {
                assert!(pair.step(), "seed {seed}, moment {moment}: {}", pair.report());
            }
            let took = pair.now - now;
            let stats = pair.ends[0].requester.stats();
            assert_eq!(stats.timeouts, timeouts, "seed {seed}, moment {moment}: {}", pair.report());
            assert!(took < Duration::from_millis(4), "seed {seed}, moment {moment}: {took:?}\n{}", pair.report());
        }
    }
}

/// A request that fails waits for the one before it, and a responder that has ended owes its last NAK.
#[test]
fn a_connection_that_fails_goes_on_to_its_end() {
    let mut pair = Pair::new(&Setup::default(), 1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let remote = |rkey| RemoteAddress { addr: REMOTE, rkey };
    ours.post(work(0, SendOp::Read { remote: remote(KEY) }, RESULT, 2 * 1024));
    ours.post(work(1, SendOp::Write { remote: remote(KEY + 1), immediate: None }, LOCAL, 10));
    ours.post(work(2, SendOp::Write { remote: remote(KEY), immediate: None }, LOCAL, 10));
    ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
    // The WRITE waits until the responses of the READ have left.
    let responses = peer.transmit(now);
    assert_eq!(responses.len(), 2);
    peer.handle(now);
    peer.replace(now);
    assert!(peer.responder.inspect().ended);
    let nak = peer.transmit(now);
    assert_eq!(nak.len(), 1);
    ours.receive(now, &nak[0]);
    ours.replace(now);
    assert!(ours.host.sent.is_empty() && ours.requester.save(now).failing.is_some());
    responses.iter().for_each(|frame| ours.receive(now, frame));
    let statuses: Vec<_> = ours.host.sent.iter().map(|ended| ended.status).collect();
    assert_eq!(statuses, [Success, RemoteAccess, Flushed]);
    ours.replace(now);
    assert!(ours.requester.inspect(now).ended && !ours.requester.has_room());
}

/// A send queue that is drained starts nothing, and ends its wait for a receive when it would have ended.
#[test]
fn a_wait_for_a_receive_and_a_drained_queue_stay() {
    let mut pair = Pair::new(&Setup::default(), 1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let send = SendOp::Send { data: pvrdma_verbs_types::SendData::None, to: None };
    ours.post(work(0, send.clone(), LOCAL, 10));
    ours.transmit(now).iter().for_each(|frame| peer.receive(now, frame));
    peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    let wait = ours.requester.poll_timeout().unwrap() - now;
    ours.requester.set_draining(true);
    ours.post(work(1, send, LOCAL, 10));
    let (requester, responder) = (ours.requester.save(now + wait / 4), ours.responder.save());
    // The clock of the new half has another origin.
    let now = Duration::from_secs(77);
    ours.restore(now, &requester.encode_to_vec(), &responder.encode_to_vec()).unwrap();
    assert_eq!(ours.requester.poll_timeout(), Some(now + wait * 3 / 4));
    assert!(ours.transmit(now).is_empty());
    assert_eq!(ours.transmit(now + wait).len(), 1);
    assert!(ours.requester.inspect(now).draining);
    ours.requester.set_draining(false);
    assert_eq!(ours.transmit(now + wait).len(), 1);
}

/// Whatever is in a state that is accepted: no panic, and an end.
#[test]
fn forged_states_are_refused_or_harmless() {
    let mut random = Random(1);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..3000 {
        let lossy = Faults { loss: 50, reorder: 50, ..Faults::default() };
        let mut pair = pair(round % 2 == 0, lossy, round % 40);
        for _ in 0..random.below(40) {
            pair.step();
        }
        let now = pair.now;
        let end = &mut pair.ends[usize::try_from(round % 2).unwrap()];
        let mut states = [end.requester.save(now).encode_to_vec(), end.responder.save().encode_to_vec()];
        for _ in 0..1 + random.below(3) {
            let state = &mut states[usize::try_from(random.below(2)).unwrap()];
            if !state.is_empty() {
                let at = usize::try_from(random.below(state.len() as u64)).unwrap();
                state[at] = random.next().to_le_bytes()[0];
            }
        }
        end.host.any_key = random.chance(500);
        match end.restore(now, &states[0], &states[1]) {
            Err(_) => refused += 1,
            Ok(()) => {
                accepted += 1;
                // Two halves that disagree forever exchange packets forever, if no retry is spent.
                for _ in 0..300 {
                    pair.step();
                }
            }
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 300 && refused > 300, "{accepted} accepted, {refused} refused");
}
