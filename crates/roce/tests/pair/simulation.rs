//! Several connections over one network: every byte is right in bounded time whatever the network does, and a line that
//! marks is shared fairly.

use std::time::Duration;

use pvrdma_roce::Congestion;
use pvrdma_verbs_types::{Mtu, QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::fabric::{Fabric, Line, Seen};
use super::host::KEY;
use super::mixed::{self, Direction, RECEIVE_LEN, RECEIVES, SOURCE, TARGET};
use super::net::{Random, Setup};

/// Operations of each end.
const OPERATIONS: u64 = 12;

/// Draws a network from a seed: 200 Mb/s to 40 Gb/s, the size of a rack to that of a town, with short queues, losses
/// and detours.
fn network(random: &mut Random) -> Line {
    let rate = [25, 125, 500, 1250, 5000][usize::try_from(random.below(5)).unwrap()] * 1_000_000;
    let mut upto = |limit: u64| if random.chance(600) { random.below(limit + 1) } else { 0 };
    let (loss, reorder, mark) = (upto(300), upto(300), upto(60_000));
    let delay = Duration::from_micros(1 + random.below(300));
    Line { rate, delay, queue: 20_000 + random.below(200_000), mark, loss, reorder }
}

/// Returns a timeout that is long enough for a frame to be repeated even behind the longest queue.
fn timeout(line: &Line) -> u8 {
    let wait = 2 * u128::from(line.queue) * 1_000_000_000 / u128::from(line.rate) + 4 * line.delay.as_nanos();
    (8..20).find(|&code| 4096_u128 << code > 2 * wait).unwrap()
}

/// Runs mixed operations on a few connections, in both directions. Returns the share of the allowed time that was
/// needed.
fn scenario(seed: u64) -> f64 {
    let mut random = Random(seed ^ 0x51e7);
    let line = network(&mut random);
    let flows = usize::try_from(1 + random.below(4)).unwrap();
    let congestion = random.chance(500).then(|| Congestion { line_rate: line.rate, ..Congestion::default() });
    let setups: Vec<_> = (0..flows)
        .map(|_| {
            let base = mixed::setup(&mut random);
            let attrs = QpAttrs { timeout: timeout(&line), ..base.attrs };
            Setup { attrs, ecn: congestion.is_some(), ..base }
        })
        .collect();
    let access = line.rate * (1 + random.below(4));
    let lines = usize::try_from(1 + random.below(3)).unwrap();
    let mut fabric = Fabric::new(&setups, line, access, congestion, random.next()).with_lines(lines);
    let mut directions: Vec<[Direction; 2]> =
        setups.iter().map(|_| [(); 2].map(|()| Direction::new(&mut random, OPERATIONS, false))).collect();
    for (stations, pair) in fabric.flows.iter_mut().zip(&directions) {
        for (from, direction) in pair.iter().enumerate() {
            stations[from].end.keeps = random.chance(500);
            stations[from].end.host.memory.write(SOURCE, &direction.source);
            let peer = &mut stations[1 - from].end.host;
            peer.memory.write(TARGET, &direction.initial);
            (0..direction.messages()).for_each(|id| {
                peer.post_receive(id, RECEIVES + id * u64::from(RECEIVE_LEN), RECEIVE_LEN);
            });
        }
    }
    // Allowed are ten times what the bytes take on the line, in both directions and with all repetitions, and some
    // timeouts for each loss at the end of a transfer.
    let operations = 2 * flows as u64 * OPERATIONS;
    let bytes = Duration::from_nanos(operations * 9000 * 1_000_000_000 / line.rate);
    let wait = Duration::from_nanos(4096 << timeout(&line)).max(Duration::from_millis(4));
    let bound = bytes * 10 + wait * u32::try_from(2 * operations).unwrap();
    let began = fabric.now;
    let all = || (0..flows).flat_map(|flow| [(flow, 0), (flow, 1)]);
    for (flow, side) in all() {
        post(&mut fabric, &mut directions, flow, side);
    }
    let ended = |fabric: &Fabric, (flow, side): (usize, usize)| fabric.flows[flow][side].end.host.sent.len() as u64;
    while all().any(|place| ended(&fabric, place) < OPERATIONS) {
        let at = fabric.step();
        let took = fabric.now - began;
        assert!(at.is_some() && took < bound, "seed {seed}: {took:?} of {bound:?} on {line:?}\n{fabric:?}");
        let Some((flow, side)) = at else { break };
        post(&mut fabric, &mut directions, flow, side);
    }
    let took = fabric.now - began;
    while fabric.step().is_some() {}
    for (stations, pair) in fabric.flows.iter().zip(&directions) {
        for (from, direction) in pair.iter().enumerate() {
            mixed::check(seed, [&stations[0].end, &stations[1].end], from, direction);
        }
    }
    took.as_secs_f64() / bound.as_secs_f64()
}

/// Posts as many operations to an end as it has room for.
fn post(fabric: &mut Fabric, directions: &mut [[Direction; 2]], flow: usize, side: usize) {
    let end = &mut fabric.flows[flow][side].end;
    assert!(!end.host.failed, "{:?}", end.requester.inspect(fabric.now));
    let mut posted = false;
    while end.requester.has_room()
        && let Some(work) = directions[flow][side].works.pop_front()
    {
        end.post(work);
        posted = true;
    }
    if posted {
        fabric.transmit(flow, side);
    }
}

fn random_networks(seeds: std::ops::Range<u64>) {
    let worst = seeds.map(scenario).fold(0.0, f64::max);
    println!("{worst:.2} of the time that a network may take");
}

#[test]
fn a_thousand_random_networks() {
    random_networks(0..1000);
}

#[test]
fn nine_thousand_random_networks_more() {
    random_networks(1000..10_000);
}

/// Jain's index: 1 if all flows got the same.
pub(crate) fn jain(got: &[f64]) -> f64 {
    let (sum, squares) = (got.iter().sum::<f64>(), got.iter().map(|it| it * it).sum::<f64>());
    sum * sum / (squares * got.len() as f64)
}

/// Throughput of equal flows on a line.
#[derive(Debug)]
struct Shares {
    /// Jain's index of the bytes that arrived: 1 if all flows got the same.
    jain: f64,
    /// Bytes of the line that were used.
    utilisation: f64,
    /// Most bytes that waited, once the flows have found their rates.
    most: u64,
    /// Total numbers of frames that were marked and that found the queue full.
    marked: u64,
    overflowed: u64,
}

const GIGABIT: u64 = 125_000_000;
const MESSAGE: u32 = 64 << 10;

/// Lets equal flows write for a while. `joins`: the other flows start this much later than the first.
fn shares(flows: usize, line: Line, congestion: Option<Congestion>, joins: Duration) -> Shares {
    shares_with(flows, line, congestion, joins, 0)
}

/// Same as [`shares`], with lost notifications, given in ten-thousandths.
fn shares_with(flows: usize, line: Line, congestion: Option<Congestion>, joins: Duration, lost: u64) -> Shares {
    let base = Setup::default();
    let setup = Setup {
        tuning: base.tuning.with_negotiate(true),
        ecn: congestion.is_some(),
        attrs: QpAttrs { path_mtu: Mtu::M4096, ..base.attrs },
        ..base
    };
    let mut fabric = Fabric::new(&vec![setup; flows], line, line.rate, congestion, 7);
    fabric.lost_notifications = lost;
    let (warm, length) = (Duration::from_millis(60), Duration::from_millis(80));
    let began = fabric.now;
    let remote = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let write = || SendWr {
        wr_id: 0,
        op: SendOp::Write { remote, immediate: None },
        flags: SendFlags::SIGNALED,
        sges: vec![Sge { addr: 0x200_0000, length: MESSAGE, lkey: KEY }],
    };
    let mut begins = vec![joins; flows];
    begins[0] = Duration::ZERO;
    fabric.flows.iter_mut().for_each(|stations| stations[1].end.keeps = true);
    let mut before: Option<(Vec<usize>, Seen)> = None;
    let arrived = |fabric: &Fabric| fabric.flows.iter().map(|flow| flow[0].end.host.sent.len()).collect::<Vec<_>>();
    loop {
        let since = fabric.now - began;
        for (flow, &begin) in begins.iter().enumerate() {
            let end = &mut fabric.flows[flow][0].end;
            if since >= begin && end.requester.is_empty() {
                (0..8).for_each(|_| end.post(write()));
                fabric.transmit(flow, 0);
            }
        }
        if since >= warm && before.is_none() {
            before = Some((arrived(&fabric), fabric.seen[1]));
            fabric.seen[1].most = 0;
        }
        if since >= warm + length {
            break;
        }
        fabric.step();
    }
    let (count, seen) = before.unwrap();
    let done: Vec<f64> = arrived(&fabric)
        .iter()
        .zip(count)
        .map(|(after, before)| f64::from(u32::try_from(after - before).unwrap()))
        .collect();
    let ok = |flow: &[super::fabric::Station; 2]| flow[0].end.host.sent.iter().all(|it| it.status == WcStatus::Success);
    assert!(fabric.flows.iter().all(ok));
    let bytes = (fabric.seen[1].bytes - seen.bytes) as f64;
    Shares {
        jain: jain(&done),
        utilisation: bytes / (line.rate as f64 * length.as_secs_f64()),
        most: fabric.seen[1].most,
        marked: fabric.seen[1].marked,
        overflowed: fabric.seen[1].overflowed,
    }
}

/// A line of 10 Gb/s in a rack, whose switch marks.
fn marking() -> (Line, Congestion) {
    let line = Line {
        rate: 10 * GIGABIT,
        delay: Duration::from_micros(10),
        queue: 16 << 20,
        mark: 200_000,
        loss: 0,
        reorder: 0,
    };
    (line, Congestion { line_rate: line.rate, ..Congestion::default() })
}

#[test]
fn equal_flows_share_a_line_that_marks() {
    let (line, congestion) = marking();
    for flows in [1, 2, 4, 8, 16] {
        let got = shares(flows, line, Some(congestion), Duration::ZERO);
        println!("{flows} flows: {got:.3?}");
        assert!(got.jain >= 0.9 && got.utilisation >= 0.9, "{flows} flows: {got:.3?}");
        assert!(got.most < 2 * line.mark && got.overflowed == 0, "{flows} flows: {got:.3?}");
        assert_eq!(got.marked > 0, flows > 1, "{flows} flows: {got:.3?}");
    }
    // A sender that does not react to marks fills the queue.
    let deaf = shares(16, line, None, Duration::ZERO);
    assert!(deaf.most > 10 * line.mark, "{deaf:.3?}");
}

/// Flows that come later get their share.
#[test]
fn flows_that_join_get_their_share() {
    let (line, congestion) = marking();
    for flows in [2, 8] {
        let got = shares(flows, line, Some(congestion), Duration::from_millis(20));
        println!("{flows} flows: {got:.3?}");
        assert!(got.jain >= 0.9 && got.utilisation >= 0.9, "{flows} flows: {got:.3?}");
        assert!(got.most < 2 * line.mark && got.overflowed == 0, "{flows} flows: {got:.3?}");
    }
}

/// A lost notification is followed by others: losing one in twenty has no visible cost, and losing three in ten shows
/// in the queue.
#[test]
fn lost_notifications_cost_little() {
    let (line, congestion) = marking();
    for (flows, lost) in [(4, 500), (8, 500), (8, 3000)] {
        let got = shares_with(flows, line, Some(congestion), Duration::ZERO, lost);
        println!("{flows} flows, {lost} notifications of 10,000 lost: {got:.3?}");
        assert!(got.jain >= 0.9 && got.utilisation >= 0.9, "{flows} flows: {got:.3?}");
        assert!(got.most < 2 * line.mark && got.overflowed == 0, "{flows} flows: {got:.3?}");
    }
}

/// Without marks, only losses reveal a full queue. The line is still used and no flow starves, but shares are less
/// equal.
#[test]
fn flows_share_a_line_that_only_drops() {
    let line = Line { queue: 1 << 20, mark: u64::MAX, ..marking().0 };
    for flows in [2, 8] {
        let got = shares(flows, line, None, Duration::ZERO);
        println!("{flows} flows without marks: {got:.3?}");
        assert!(got.jain >= 0.8 && got.utilisation >= 0.9, "{flows} flows: {got:.3?}");
    }
}
