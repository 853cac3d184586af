//! Delays of a requester without losses: late receives, keys in use, timers.

use std::time::Duration;

use pvrdma_roce::wire::{Network, Packet};
use pvrdma_verbs_types::{
    Invalidate, QpAttrs, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus::Success,
};

use super::host::KEY;
use super::net::{Pair, Setup};

fn work(wr_id: u64, op: SendOp, packets: u32, lkey: u32) -> SendWr {
    let sges = vec![Sge { addr: 0x1000, length: packets * 1024, lkey }];
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges }
}

fn write(wr_id: u64, packets: u32, lkey: u32) -> SendWr {
    let remote = RemoteAddress { addr: 0x5000, rkey: KEY };
    work(wr_id, SendOp::Write { remote, immediate: None }, packets, lkey)
}

fn invalidate(wr_id: u64, key: u32) -> SendWr {
    let op = SendOp::LocalInvalidate(Invalidate { key });
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: Vec::new() }
}

/// Delivers the packets of end 0 and their responses. Returns the number of packets.
fn cross(pair: &mut Pair) -> usize {
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    sent.iter().for_each(|frame| peer.receive(now, frame));
    peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    sent.len()
}

/// A late receive is not a loss: once it is posted, the whole window may be sent.
#[test]
fn a_late_receive_costs_no_slow_start() {
    let mut pair = Pair::new(&Setup::default(), 1);
    pair.ends[0].post(work(0, SendOp::Send { data: SendData::None, to: None }, 200, KEY));
    assert_eq!(cross(&mut pair), 200);
    assert_eq!(pair.ends[0].requester.stats().rnr_naks, 1);
    pair.ends[1].host.post_receive(0, 0x9000, 200 * 1024);
    pair.now = pair.ends[0].requester.poll_timeout().unwrap();
    let first = cross(&mut pair);
    assert!((1..20).contains(&first), "{first} packets before it is known that there is a receive");
    assert_eq!(cross(&mut pair), 200 - first);
    assert_eq!(pair.ends[0].host.sent[0].status, Success);
}

/// A responder that misses a packet and keeps none behind it: the window is halved at once.
#[test]
fn a_nak_costs_half_of_the_window() {
    let mut pair = Pair::new(&Setup::default(), 1);
    pair.ends[0].post(write(0, 250, KEY));
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let sent = ours.transmit(now);
    sent.iter().skip(1).for_each(|frame| peer.receive(now, frame));
    peer.transmit(now).iter().for_each(|frame| ours.receive(now, frame));
    assert_eq!((sent.len(), cross(&mut pair)), (250, 8));
    let next = cross(&mut pair);
    assert!((120..=140).contains(&next), "{next}");
}

/// The shortest timeouts that can be configured are shorter than the time for which a busy host may suspend a process.
#[test]
fn the_shortest_ack_timeout_outlasts_a_scheduler() {
    for (timeout, least) in [(1, 4000), (6, 4000), (9, 4000), (10, 4194), (14, 67_108)] {
        let base = Setup::default();
        let mut pair = Pair::new(&Setup { attrs: QpAttrs { timeout, ..base.attrs }, ..base }, 1);
        pair.ends[0].post(write(0, 1, KEY));
        assert_eq!(pair.ends[0].transmit(pair.now).len(), 1);
        let wait = pair.ends[0].requester.poll_timeout().unwrap() - pair.now;
        assert_eq!(wait.as_micros(), least, "{timeout}");
    }
}

/// A storage initiator invalidates a key with each request. An invalidation has to wait only for earlier requests that
/// use its key.
#[test]
fn an_invalidation_waits_for_its_key_only() {
    const OTHER: u32 = 0x7700;
    let mut pair = Pair::new(&Setup::default(), 1);
    pair.ends[0].host.any_key = true;
    let now = pair.now;
    let ours = &mut pair.ends[0];
    ours.post(write(0, 1, KEY));
    ours.post(invalidate(1, OTHER));
    ours.post(write(2, 1, KEY));
    assert_eq!((ours.transmit(now).len(), ours.host.invalidated.as_slice()), (2, [OTHER].as_slice()));
    assert!(ours.host.sent.is_empty(), "completions stay in order");
    // Another value of the byte that the consumer chooses does not make it another region.
    ours.post(invalidate(3, KEY + 1));
    ours.post(write(4, 1, KEY + 0x100));
    assert!(ours.transmit(now).is_empty());
    assert_eq!(ours.host.invalidated, [OTHER]);
    pair.run();
    let ours = &pair.ends[0].host;
    assert_eq!(ours.invalidated, [OTHER, KEY + 1]);
    assert_eq!(
        ours.sent.iter().map(|ended| (ended.wr_id, ended.status)).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4].map(|id| (id, Success))
    );
}

/// A packet lost before an invalidation that did not wait is retransmitted, but the invalidation is not repeated.
#[test]
fn an_invalidation_is_executed_once() {
    const OTHER: u32 = 0x7700;
    let mut pair = Pair::new(&Setup::default(), 1);
    let ours = &mut pair.ends[0];
    ours.post(write(0, 3, KEY));
    ours.post(invalidate(1, OTHER));
    ours.post(write(2, 3, KEY));
    // All of it is lost.
    assert_eq!(ours.transmit(pair.now).len(), 6);
    pair.run();
    let ours = &pair.ends[0].host;
    assert_eq!((ours.invalidated.as_slice(), ours.sent.len()), ([OTHER].as_slice(), 3));
    assert!(ours.sent.iter().all(|ended| ended.status == Success));
    assert!(pair.now > Duration::from_secs(1));
}

/// Fabrics that select a path by the IPv6 flow label see one flow per connection, with the same label in both
/// directions.
#[test]
fn connections_over_ipv6_have_a_flow_label() {
    let label = |frame: &[u8]| match Packet::parse(frame).unwrap().header.network {
        Network::V2Ipv6(ip, udp) => (ip.flow_label, udp.source_port),
        _ => panic!(),
    };
    let mut pair = Pair::new(&Setup { ipv4: false, ..Setup::default() }, 1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    ours.post(write(0, 1, KEY));
    let request = ours.transmit(now).remove(0);
    peer.receive(now, &request);
    let response = peer.transmit(now).remove(0);
    assert_ne!(label(&request).0, 0);
    assert_eq!(label(&request), label(&response));
}
