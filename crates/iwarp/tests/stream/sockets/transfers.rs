//! Random operations in both directions. The kernel splits and delays the bytes, and both ends read and write in pieces
//! of random size.

use proptest::prelude::*;
use pvrdma_iwarp::{Connection, End, Event, Limits, Tuning};
use pvrdma_verbs_types::{NakReason, WcStatus};

use super::endpoint::{Endpoint, Socket, ends, establish, established, run, wait};
use super::{START, tuning};
use crate::pair::{Random, read, send, sge, write};
use crate::properties::{AREA, LANDING, Plan, SOURCE, Step, TARGET, check, first_sends, plan, step};

/// Posts requests and receives at random times, until all are done.
fn play(ends: &mut [Endpoint; 2], plans: &[Plan; 2], random: &mut Random) {
    let mut posted = [0; 2];
    let mut receives = [0; 2];
    loop {
        let mut moved = false;
        for here in [0, 1] {
            let there = 1 - here;
            let end = &mut ends[here];
            while let Some(wr) = plans[here].requests.get(posted[here])
                && end.stream().has_room()
            {
                moved = true;
                if random.up_to(3) == 0 {
                    break;
                }
                end.post(wr.clone());
                posted[here] += 1;
            }
            while let Some(sges) = plans[there].receives.get(receives[here]) {
                moved = true;
                if random.up_to(3) == 0 {
                    break;
                }
                end.host.post_receive(0, sges.clone());
                receives[here] += 1;
            }
            moved |= end.step();
            assert_eq!(end.end(), None);
        }
        let done = |here: usize| {
            ends[here].host.sent.len() == plans[here].requests.len()
                && ends[1 - here].host.received.len() == plans[here].receives.len()
        };
        if done(0) && done(1) {
            break;
        }
        if !moved {
            wait(&*ends);
        }
    }
    // A WRITE completes before it arrives, so a last SEND in each direction shows that it has.
    for here in [0, 1] {
        ends[here].host.post_receive(0, vec![]);
        ends[1 - here].post(send(u64::MAX, vec![]));
    }
    run(ends, |ends| {
        let arrived = |end: &Endpoint| end.host.received.iter().filter(|(ended, _)| ended.wr_id == 0).count();
        [0, 1].iter().all(|&here| {
            let sent = ends[here].host.sent.len() > plans[here].requests.len();
            sent && arrived(&ends[here]) > plans[1 - here].receives.len()
        })
    });
    for end in ends {
        assert!(end.host.sent.pop().is_some_and(|ended| ended.status == WcStatus::Success));
        assert!(end.host.received.pop().is_some());
    }
}

/// Closes the connection: both owners learn of it, and no socket stays open.
fn close(ends: &mut [Endpoint; 2], first: usize) {
    ends[first].flush();
    run(ends, |ends| ends[1 - first].end().is_some());
    assert_eq!(ends[1 - first].end(), Some(End::PeerClosed));
    ends[1 - first].flush();
    run(ends, |ends| ends.iter().all(|end| end.socket == Socket::Closed));
    assert_eq!(ends[first].events, [Event::Ended(End::Flushed)]);
    assert_eq!(ends[1 - first].events, [Event::Ended(End::PeerClosed), Event::Ended(End::Flushed)]);
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    crc: [bool; 2],
    reads: [u16; 2],
    tuning: Tuning,
    /// Size of the buffer of a socket.
    buffer: usize,
    revision_1: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    let mss = prop_oneof![Just(136_usize), 137..600_usize, Just(1448), Just(8948), Just(65_544)];
    let buffer = prop_oneof![Just(16_384_usize), Just(65_536), Just(1 << 20)];
    (any::<[bool; 2]>(), [1..20_u16, 1..20], mss, 1..20_usize, buffer, any::<bool>()).prop_map(
        |(crc, reads, mss, requests, buffer, revision_1)| Setting {
            crc,
            // Revision 1 negotiates no numbers of READs: the ends must know those of each other.
            reads: if revision_1 { [reads[0]; 2] } else { reads },
            tuning: Tuning::default().with_mss(mss).with_requests(requests),
            buffer,
            revision_1,
        },
    )
}

fn check_transfers(steps: &[Vec<Step>; 2], seed: u64, setting: Setting) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let limits = |end: usize| Limits { ird: setting.reads[end], ord: setting.reads[end], crc: setting.crc[end] };
    let tuning = setting.tuning.with_seed(u32::try_from(seed >> 32).unwrap());
    let mut initiator = Connection::initiate(START, limits(0), tuning, b"").unwrap();
    if setting.revision_1 {
        initiator.peer_closed(&mut crate::host::Host::new(0));
        initiator = initiator.fallback(START).unwrap();
    }
    let mut ends = ends(initiator, tuning, 3 * AREA, seed);
    for end in &mut ends {
        end.set_buffers(setting.buffer);
        random.fill(&mut end.host.memory[SOURCE..SOURCE + AREA]);
    }
    let agreed = establish(&mut ends, limits(1));
    prop_assert!(agreed.iter().all(|agreed| agreed.crc == setting.crc.contains(&true)));
    prop_assert_eq!(agreed.map(|agreed| agreed.rtr.is_none()), [setting.revision_1; 2]);

    let [mut a, mut b] = [ends[0].host.memory.clone(), ends[1].host.memory.clone()];
    let mut at = [[TARGET, LANDING], [TARGET, LANDING]];
    let first = plan(&steps[0], &mut a, &mut b, &mut at, &mut random);
    at.reverse();
    let second = plan(&steps[1], &mut b, &mut a, &mut at, &mut random);
    // A responder without a ready-to-receive message must not send first.
    prop_assume!(!setting.revision_1 || first_sends(&steps[0]));
    let plans = [first, second];
    play(&mut ends, &plans, &mut random);
    for (here, plan) in plans.iter().enumerate() {
        let there = 1 - here;
        check(plan, &plans[there], &ends[here].host, &ends[there].host)?;
        prop_assert!(ends[here].stream().is_empty() && ends[here].connection.kept() == 0);
    }
    prop_assert!(ends[0].host.memory == a, "memory of the initiator");
    prop_assert!(ends[1].host.memory == b, "memory of the responder");
    close(&mut ends, random.up_to(1));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_over_sockets(
        steps in [prop::collection::vec(step(), 0..40), prop::collection::vec(step(), 0..40)],
        seed in any::<u64>(),
        setting in setting(),
    ) {
        check_transfers(&steps, seed, setting)?;
    }
}

#[test]
fn a_late_receive_holds_off_the_peer_and_then_takes_everything() {
    let mut ends = established(tuning(), 1 << 20, 7);
    let [a, _] = &mut ends;
    a.host.memory[..1 << 19].fill(5);
    a.post(send(1, vec![sge(0, 1 << 18)]));
    a.post(write(2, 1 << 19, vec![sge(0, 1 << 19)]));
    run(&mut ends, |[_, b]| b.stream().waits_for_receive());
    // The WRITE is behind the SEND, and is kept neither by the connection nor by the adapter.
    let [_, b] = &mut ends;
    assert!(b.connection.kept() <= 1448 && b.host.memory.iter().all(|&byte| byte == 0));
    b.host.post_receive(1, vec![sge(0, 1 << 18)]);
    run(&mut ends, |[a, b]| {
        a.host.sent.len() == 2
            && b.host.memory.iter().all(|&byte| byte == 5 || byte == 0)
            && b.host.memory[(1 << 20) - 1] == 5
    });
    let [a, b] = &mut ends;
    assert_eq!(a.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(b.host.memory[..1 << 18].iter().chain(&b.host.memory[1 << 19..]).all(|&byte| byte == 5));
    assert_eq!(b.stream().stats().waited_for_receive, 1);
}

#[test]
fn a_receive_that_is_never_posted_ends_both_ends() {
    let mut ends = established(tuning(), 1 << 20, 8);
    ends[0].post(send(1, vec![sge(0, 8)]));
    ends[0].post(read(2, 0, vec![sge(0, 8)]));
    run(&mut ends, |[_, b]| b.stream().waits_for_receive());
    ends[1].time_out();
    run(&mut ends, |ends| ends.iter().all(|end| end.socket == Socket::Closed));
    let [a, b] = &ends;
    assert_eq!(a.host.statuses(), [(1, WcStatus::Success), (2, WcStatus::RnrRetryExceeded)]);
    assert_eq!(b.host.refused, [NakReason::InvalidRequest]);
}

#[test]
fn a_close_behind_a_send_that_waits_is_reported_after_it() {
    let mut ends = established(tuning(), 64, 9);
    ends[0].post(send(1, vec![sge(0, 8)]));
    run(&mut ends, |[a, b]| b.stream().waits_for_receive() && a.host.sent.len() == 1);
    ends[0].flush();
    run(&mut ends, |[a, _]| a.socket == Socket::ShutDown);
    // The adapter does not read now, but others learn of the close from the socket's state.
    let [_, b] = &mut ends;
    b.connection.peer_closed(&mut b.host);
    assert_eq!(b.end(), None);
    b.host.post_receive(1, vec![sge(0, 8)]);
    b.connection.resume(b.now, &mut b.host);
    assert_eq!((b.end(), b.host.received.len()), (Some(End::PeerClosed), 1));
}

#[test]
fn memory_that_disappears_in_flight_resets_only_its_connection() {
    let mut bystanders = established(tuning(), 64, 10);
    let mut ends = established(tuning(), 8 << 20, 11);
    ends.iter().for_each(|end| end.set_buffers(65_536));
    ends[0].post(write(1, 0, vec![sge(0, 8 << 20)]));
    // Until the sockets are full, because the other end does not read.
    while ends[0].step() {}
    assert!(ends[0].host.sent.is_empty());
    ends[0].host.gone = true;
    run(&mut ends, |ends| ends.iter().all(|end| end.socket == Socket::Closed));
    let [a, b] = &ends;
    assert_eq!((a.host.statuses(), a.end()), (vec![(1, WcStatus::LocalProtection)], Some(End::Local)));
    assert_eq!(b.end(), Some(End::Lost));

    bystanders[0].post(write(1, 0, vec![sge(0, 8)]));
    bystanders[0].post(read(2, 0, vec![sge(0, 8)]));
    run(&mut bystanders, |[a, _]| a.host.sent.len() == 2);
    assert_eq!(bystanders[0].host.statuses(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}
