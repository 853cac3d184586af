//! Congestion control between two devices: marks, notifications, and the rate that follows.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use pvrdma_link::{Clock, Frames};
use pvrdma_roce::{
    Congestion, MEGABIT,
    wire::{Ecn, Opcode, Packet, build},
};
use pvrdma_rxe::{PortRules, RxeConfig, VlanMode};
use pvrdma_verbs::{Hca, QueuePair};
use pvrdma_verbs_types::{Gid, GidType, QpType, Qpn, SendData, SendOp, UdDestination, WcStatus};

use crate::tap::{Tap, tapped_in, tapped_with};
use crate::world::*;

fn address(number: u8) -> Gid {
    Gid(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into()).octets())
}

/// Two devices with a connection over IPv6.
struct Rig {
    world: World,
    nodes: [Node; 2],
    ends: [End; 2],
    taps: [Arc<Tap>; 2],
}

fn rig(congestion: Option<Congestion>) -> Rig {
    let rules = || PortRules::default().with_congestion(congestion);
    rig_on(tapped_in(VlanMode::Access(5), [rules(), rules()]))
}

fn rig_on((world, taps): (World, [Arc<Tap>; 2])) -> Rig {
    let nodes = [1, 2].map(|number| world.node(number));
    for node in &nodes {
        node.hca.bind_gid(0, address(node.number), GidType::RoceV2).unwrap();
    }
    let ends = [nodes[0].qp(QpType::Rc), nodes[1].qp(QpType::Rc)];
    for (end, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
        end.connect(peer, |a| {
            (a.av.dgid, a.av.traffic_class) = (address(peer.node), 0x68);
            a.timeout = 20;
        });
    }
    Rig { world, nodes, ends, taps }
}

impl Rig {
    fn counters(&self, node: usize, names: [&str; 4]) -> [u64; 4] {
        names.map(|name| self.nodes[node].counter(name))
    }

    /// Lets time pass until the first device has this many completions. Returns the time and the number of steps.
    fn until(&self, total: u64) -> (Duration, u32) {
        let (start, mut steps) = (self.world.clock.now(), 0);
        self.world.run();
        let done = || self.ends[0].scq.total() >= total;
        while !done() {
            assert!(self.world.step(), "nothing is left to wait for");
            steps += 1;
        }
        (self.world.clock.now() - start, steps)
    }

    /// The notifications that a device sent.
    fn notifications(&self, node: usize) -> Vec<Vec<u8>> {
        let sent = self.taps[node].sent.lock();
        let is_cnp = |frame: &&[u8]| Packet::parse(frame).unwrap().header.bth.opcode == Opcode::CNP;
        sent.iter().filter(is_cnp).map(<[u8]>::to_vec).collect()
    }
}

const NOTIFIER: [&str; 4] = ["wire_marked", "wire_cnps_sent", "wire_cnps_received", "wire_rate_cuts"];
const SENDER: [&str; 4] = ["wire_cnps_received", "wire_cnps_ignored", "wire_rate_cuts", "wire_timeouts"];

/// One marked packet among many halves the rate, which then recovers with time. This holds for requests and for
/// responses to a READ.
#[test]
fn a_notification_slows_the_sender_down() {
    const LEN: u64 = 4 << 20;
    for read in [false, true] {
        let config = Congestion::default();
        let rig = rig(Some(config));
        let (mine, theirs) = (rig.nodes[0].buffer(LEN), rig.nodes[1].buffer(LEN));
        let (source, target) = if read { (&theirs, &mine) } else { (&mine, &theirs) };
        let data = pattern(7, LEN);
        source.write(0, &data);
        let op = || if read { SendOp::Read { remote: theirs.remote(0) } } else { write(theirs.remote(0)) };
        // Without a mark, no time passes.
        rig.ends[0].submit(1, op(), &[mine.all()]);
        assert_eq!(rig.ends[0].scq.poll_statuses(), [(1, WcStatus::Success)]);
        // The end that sends data, and the other.
        let (fast, slow) = (usize::from(!read), usize::from(read));
        rig.taps[slow].congested.store(3, SeqCst);
        rig.ends[0].post(2, op(), &[mine.all()]);
        rig.ends[0].qp.notify_send();
        let (took, steps) = rig.until(2);
        assert_eq!(rig.ends[0].scq.poll_statuses(), [(2, WcStatus::Success)]);
        assert!(target.read(0, LEN) == data);
        // All three marks arrive at once, so they cause one notification.
        assert_eq!(rig.counters(fast, NOTIFIER), [3, 1, 0, 0], "{read}");
        assert_eq!(rig.counters(slow, SENDER), [1, 0, 1, 0], "{read}");
        // From half the rate, each of six intervals halves the distance to the line rate. Then the limit is lifted, and
        // the remaining packets leave at once.
        let brakes = config.increase_interval * 6;
        assert!(took >= brakes && took < brakes + config.increase_interval, "{read}: {took:?}");
        assert!(steps > 10 && rig.nodes[slow].counter("wire_paced") > 10);
        assert_eq!(rig.nodes[fast].counter("wire_paced"), 0);
        // Later it is as before.
        rig.world.settle();
        rig.world.clock.advance(Duration::from_secs(1));
        let paced = rig.nodes[slow].counter("wire_paced");
        rig.ends[0].submit(3, op(), &[mine.all()]);
        assert_eq!(rig.ends[0].scq.poll_statuses(), [(3, WcStatus::Success)]);
        assert_eq!(rig.nodes[slow].counter("wire_paced"), paced);
    }
}

/// Lasting congestion: every packet is marked, and the rate drops to its minimum.
#[test]
fn lasting_congestion_ends_at_the_least_rate() {
    let config = Congestion { min_rate: 100_000_000, ..Congestion::default() };
    let rig = rig(Some(config));
    let (mine, theirs) = (rig.nodes[0].buffer(1 << 20), rig.nodes[1].buffer(1 << 20));
    rig.taps[0].congested.store(u32::MAX, SeqCst);
    for wr_id in 0..20 {
        rig.ends[0].submit(wr_id, write(theirs.remote(0)), &[mine.all()]);
        rig.until(wr_id + 1);
    }
    rig.ends[0].submit(20, write(theirs.remote(0)), &[mine.all()]);
    let (took, _) = rig.until(21);
    assert!(rig.ends[0].scq.poll_statuses().iter().all(|(_, status)| *status == WcStatus::Success));
    // 1 MiB at 100 MB/s, apart from headers and growth between two rate cuts.
    assert!((8..12).contains(&took.as_millis()), "{took:?}");
    assert!(rig.nodes[0].counter("wire_rate_cuts") > 5);
    assert_eq!(rig.nodes[0].counter("wire_timeouts"), 0);
}

#[test]
fn a_notification_has_its_format() {
    let rig = rig(Some(Congestion::default()));
    rig.taps[0].congested.store(1, SeqCst);
    rig.ends[0].submit(1, write(Default::default()), &[]);
    let [frame] = &rig.notifications(1)[..] else { panic!() };
    let packet = Packet::parse(frame).unwrap();
    packet.verify().unwrap();
    let header = packet.header;
    assert_eq!((header.network.traffic_class(), packet.payload), (0xc2, &[0; 16][..]));
    assert_eq!((header.network.source(), header.network.destination()), (address(2), address(1)));
    let vlan = header.ethernet.vlan.unwrap();
    assert_eq!((vlan.pcp, vlan.vid, header.ethernet.destination, header.ethernet.source), (6, 5, mac(1), mac(2)));
    let bth = header.bth;
    assert_eq!((bth.destination, bth.psn.get(), bth.pkey), (rig.ends[0].qp.qpn(), 0, 0xffff));
    assert!(bth.becn && !bth.fecn && !bth.solicited && !bth.migration && !bth.ack_request);
    // BTH, 16 bytes and ICRC, as hardware sends it.
    assert_eq!(frame.len(), 18 + 48 + 12 + 16 + 4);
    // All other packets of both ends declare themselves capable of marks.
    for tap in &rig.taps {
        let sent = tap.sent.lock();
        let marks = sent.iter().map(|frame| Packet::parse(frame).unwrap().header.network.ecn());
        assert!(marks.skip(1).all(|mark| mark == Ecn::Capable0));
    }
}

#[test]
fn notifications_that_are_ignored() {
    let config = Congestion::default();
    let rig = rig(Some(config));
    rig.taps[0].congested.store(1, SeqCst);
    rig.ends[0].submit(1, write(Default::default()), &[]);
    let good = rig.notifications(1).remove(0);
    let header = Packet::parse(&good).unwrap().header;
    let received = || rig.counters(0, SENDER);
    assert_eq!(received(), [1, 0, 1, 0]);
    let give = |frame: &[u8]| {
        let mut frames = Frames::default();
        frames.push(frame);
        rig.taps[1].inject(&frames);
        rig.world.rxe.run_ready();
    };
    rig.world.clock.advance(config.cut_interval);
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    give(&damaged);
    let mut other_qp = header;
    other_qp.bth.destination = Qpn::new(0x4444);
    give(&build(&other_qp, &[0; 16]).unwrap());
    let mut stranger = header;
    let pvrdma_roce::wire::Network::V2Ipv6(ip, _) = &mut stranger.network else { panic!() };
    ip.source = address(9);
    give(&build(&stranger, &[0; 16]).unwrap());
    assert_eq!(received(), [4, 3, 1, 0]);
    // Sent to an address that the device does not have. Only that counter increases.
    let mut elsewhere = header;
    let pvrdma_roce::wire::Network::V2Ipv6(ip, _) = &mut elsewhere.network else { panic!() };
    ip.destination = address(9);
    let dropped = || rig.nodes[0].counter("wire_dropped_address");
    let before = dropped();
    give(&build(&elsewhere, &[0; 16]).unwrap());
    assert_eq!((received(), dropped()), ([4, 3, 1, 0], before + 1));
    give(&good);
    assert_eq!(received(), [5, 3, 2, 0]);
    // Too soon after the last cut.
    give(&good);
    assert_eq!(received(), [6, 3, 2, 0]);
    // RESET forgets.
    rig.ends[0].to(pvrdma_verbs_types::QpState::Reset);
    give(&good);
    assert_eq!(received(), [7, 4, 2, 0]);
}

#[test]
fn marked_datagrams_notify_their_sender_which_has_no_rate() {
    let rig = rig(Some(Congestion::default()));
    let (left, right) = (rig.nodes[0].qp(QpType::Ud), rig.nodes[1].qp(QpType::Ud));
    left.start_datagrams(1);
    right.start_datagrams(1);
    let to = UdDestination { qpn: right.qp.qpn(), qkey: 1, dgid: address(2), dmac: mac(2), ..Default::default() };
    rig.taps[0].congested.store(1, SeqCst);
    left.submit(1, SendOp::Send { data: SendData::None, to: Some(to) }, &[]);
    assert_eq!(rig.counters(1, NOTIFIER), [1, 1, 0, 0]);
    let header = Packet::parse(&rig.notifications(1)[0]).unwrap().header;
    assert_eq!((header.bth.destination, header.ethernet.vlan_id()), (left.qp.qpn(), Some(5)));
    assert_eq!(rig.counters(0, SENDER), [1, 1, 0, 0]);
    assert_eq!(left.scq.poll_statuses(), [(1, WcStatus::Success)]);
}

#[test]
fn switched_off_it_only_counts() {
    let rig = rig(None);
    rig.taps[0].congested.store(9, SeqCst);
    let (mine, theirs) = (rig.nodes[0].buffer(1 << 20), rig.nodes[1].buffer(1 << 20));
    rig.ends[0].submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert_eq!(rig.ends[0].scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(rig.counters(1, NOTIFIER), [9, 0, 0, 0]);
    // The traffic class that the consumer chose, without a congestion mark.
    let sent = rig.taps[0].sent.lock();
    assert!(sent.iter().skip(9).all(|frame| Packet::parse(frame).unwrap().header.network.traffic_class() == 0x68));
}

/// With threads and real time: requests and responses that wait for their rate are continued.
#[test]
fn with_threads() {
    const LEN: u64 = 1 << 17;
    // At these rates, which do not recover within the test, a packet's interval is longer than its processing on any
    // machine.
    let (line_rate, min_rate, increase_interval) = (64 * MEGABIT, 16 * MEGABIT, Duration::from_secs(60));
    let congestion = Congestion { line_rate, min_rate, increase_interval, ..Congestion::default() };
    let rules = || PortRules::default().with_congestion(Some(congestion));
    let config = RxeConfig::default().with_workers(1);
    let rig = rig_on(tapped_with([rules(), rules()], &config, Arc::default()));
    let (mine, theirs) = (rig.nodes[0].buffer(2 * LEN), rig.nodes[1].buffer(2 * LEN));
    let data = pattern(7, LEN);
    mine.write(0, &data);
    theirs.write(LEN, &data);
    for tap in &rig.taps {
        tap.congested.store(u32::MAX, SeqCst);
    }
    for wr_id in 0..8 {
        rig.ends[0].submit(2 * wr_id, write(theirs.remote(0)), &[mine.sge(0, LEN)]);
        rig.ends[0].submit(2 * wr_id + 1, SendOp::Read { remote: theirs.remote(LEN) }, &[mine.sge(LEN, LEN)]);
    }
    while rig.ends[0].scq.total() < 16 {
        std::thread::yield_now();
    }
    assert!(rig.ends[0].scq.poll_statuses().iter().all(|(_, status)| *status == WcStatus::Success));
    assert!(theirs.read(0, LEN) == data && mine.read(LEN, LEN) == data);
    assert!(rig.nodes.iter().all(|node| node.counter("wire_paced") > 0));
}

/// Source ports of the packets that an end has sent.
fn ports(tap: &Tap) -> Vec<u16> {
    let mut ports: Vec<u16> = Vec::new();
    for frame in tap.sent.lock().iter() {
        let packet = Packet::parse(frame).unwrap();
        if packet.header.bth.opcode != Opcode::CNP {
            ports.extend(packet.header.network.source_port().filter(|port| ports.last() != Some(port)));
        }
    }
    ports
}

/// Marks in consecutive round trips make a connection change its path, for requests and for responses. A connection
/// without READs that finds only marks then uses many paths.
#[test]
fn a_connection_that_is_marked_repeatedly_takes_another_path() {
    for (multipath, read) in [(true, false), (true, true), (false, false)] {
        let rules = || {
            PortRules::default()
                .with_congestion(Some(Congestion::default()))
                .with_negotiate(true)
                .with_multipath(multipath)
        };
        let rig = rig_on(tapped_in(VlanMode::Access(5), [rules(), rules()]));
        rig.taps[usize::from(read)].congested.store(u32::MAX, SeqCst);
        let (mine, theirs) = (rig.nodes[0].buffer(2 << 20), rig.nodes[1].buffer(2 << 20));
        let remote = theirs.remote(0);
        for wr_id in 0..4 {
            let op = if read { SendOp::Read { remote } } else { write(remote) };
            rig.ends[0].submit(wr_id, op, &[mine.all()]);
        }
        rig.until(4);
        assert!(rig.ends[0].scq.poll_statuses().iter().all(|(_, status)| *status == WcStatus::Success));
        let (moves, seen) = (rig.nodes[0].counter("wire_rehashed"), rig.taps.each_ref().map(|tap| ports(tap)));
        assert_eq!(multipath, moves > 0);
        // Both ends begin with the ports that Linux uses, which are the same in both directions.
        assert_eq!(seen[0][0], seen[1][0]);
        if multipath && !read {
            assert!(moves >= 4 && seen[0].len() > 100, "{moves} changes, {} paths", seen[0].len());
            assert!(seen[1].iter().all(|port| seen[0].contains(port)), "a response takes the path of a request");
        } else {
            assert_eq!(seen[0].len() as u64, moves + 1, "a path is kept");
            assert_eq!(seen[0], seen[1]);
        }
        assert_eq!(rig.nodes[1].counter("wire_rehashed"), 0);
    }
}

/// Other connections to a peer pause for a starved connection: it sends after one round trip, and they continue after
/// another one.
#[test]
fn a_starved_connection_gets_quiet() {
    const ROUND_TRIP: Duration = Duration::from_millis(5);
    let rig = rig(None);
    let (mine, theirs) = (rig.nodes[0].buffer(64), rig.nodes[1].buffer(64));
    let starved = rig.nodes[0].qp(QpType::Rc);
    starved.connect(&rig.ends[1], |a| {
        (a.av.dgid, a.timeout) = (address(2), 14);
        a.dest_qpn = Qpn::new(0x00ab_cdef);
    });
    starved.post(1, write(theirs.remote(0)), &[mine.all()]);
    starved.qp.notify_send();
    let counter = |name| rig.nodes[0].counter(name);
    while counter("wire_timeouts") < 2 {
        assert_eq!(counter("wire_quiet"), 0);
        assert!(rig.world.step(), "no second timeout");
    }
    assert_eq!(counter("wire_quiet"), 1);
    let (began, sent) = (rig.world.clock.now(), rig.taps[0].sent.lock().len());
    rig.ends[0].submit(1, write(theirs.remote(0)), &[mine.all()]);
    rig.world.run();
    assert_eq!(rig.taps[0].sent.lock().len(), sent, "nothing is sent");
    assert!(rig.world.step());
    let passed = || rig.world.clock.now() - began;
    assert_eq!((passed(), rig.taps[0].sent.lock().len()), (ROUND_TRIP, sent + 1), "the starved one sends");
    rig.until(1);
    assert_eq!(rig.ends[0].scq.poll_statuses(), [(1, WcStatus::Success)]);
    assert_eq!(passed(), 2 * ROUND_TRIP);
    // There is no second pause soon after the first. The connection uses up its retries, and the others do not wait for
    // it.
    while starved.scq.total() == 0 {
        assert!(rig.world.step(), "it waits forever");
    }
    assert_eq!(starved.scq.poll_statuses(), [(1, WcStatus::RetryExceeded)]);
    rig.ends[0].submit(2, write(theirs.remote(0)), &[mine.all()]);
    rig.until(2);
    assert_eq!(rig.ends[0].scq.poll_statuses(), [(2, WcStatus::Success)]);
}
