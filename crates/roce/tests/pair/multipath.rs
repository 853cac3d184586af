//! Several equal lines between two switches. A hash of the UDP source port selects one. Connections that share a line
//! spread out, they leave a dead or slow line, and they stop moving where all lines are equally full.

use std::collections::BTreeSet;
use std::time::Duration;

use pvrdma_roce::{Congestion, wire::Packet};
use pvrdma_verbs_types::{GidType, Mtu, Psn, QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::fabric::{Fabric, Line, Station};
use super::host::KEY;
use super::net::{Faults, Pair, Setup};
use super::simulation::jain;

const GIGABIT: u64 = 125_000_000;
const MESSAGE: u32 = 64 << 10;
const WARM: Duration = Duration::from_millis(200);
const LENGTH: Duration = Duration::from_millis(50);

/// Connections over several lines of 10 Gb/s, each end with a link of that rate.
#[derive(Clone, Copy, Debug)]
struct Flows {
    count: usize,
    lines: usize,
    read: bool,
    multipath: bool,
    /// Switches mark frames instead of dropping those that find no room.
    marks: bool,
    seed: u64,
}

/// Throughput of the flows.
#[derive(Debug)]
struct Got {
    /// Messages that arrived after the warm-up, as a share of what the lines (or the ends' own links) could carry.
    goodput: f64,
    jain: f64,
    /// Path changes of all connections, in total and after the warm-up.
    moves: u64,
    late_moves: u64,
    retransmitted: u64,
}

fn line(marks: bool) -> Line {
    let (queue, mark) = if marks { (16 << 20, 200_000) } else { (256 << 10, u64::MAX) };
    Line { rate: 10 * GIGABIT, delay: Duration::from_micros(10), queue, mark, loss: 0, reorder: 0 }
}

fn setup(flows: &Flows) -> Setup {
    let base = Setup::default();
    // A connection's own source ports follow from its QP numbers, which are the same for each seed. Another starting
    // PSN gives other paths.
    let psn = Psn::new(u32::try_from(flows.seed * 7919 % (1 << 24)).unwrap());
    Setup {
        tuning: base.tuning.with_negotiate(true).with_multipath(flows.multipath),
        ecn: flows.marks,
        attrs: QpAttrs {
            path_mtu: Mtu::M4096,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            sq_psn: psn,
            rq_psn: psn,
            ..base.attrs
        },
        ..base
    }
}

fn fabric(flows: &Flows) -> Fabric {
    let congestion = Congestion { line_rate: 10 * GIGABIT, ..Congestion::default() };
    let setups = vec![setup(flows); flows.count];
    let line = line(flows.marks);
    let mut fabric = Fabric::new(&setups, line, line.rate, flows.marks.then_some(congestion), flows.seed);
    fabric.salt = flows.seed;
    // Without jitter, connections keep in step, and one of them may find the queue full time and again.
    fabric.jitter = Duration::from_micros(if flows.marks { 0 } else { 20 });
    fabric.flows.iter_mut().flatten().for_each(|station| station.end.keeps = true);
    fabric.with_lines(flows.lines)
}

fn request(read: bool) -> SendWr {
    let remote = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let op = if read { SendOp::Read { remote } } else { SendOp::Write { remote, immediate: None } };
    let sges = vec![Sge { addr: 0x200_0000, length: MESSAGE, lkey: KEY }];
    SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges }
}

fn arrived(fabric: &Fabric) -> Vec<usize> {
    fabric.flows.iter().map(|flow| flow[0].end.host.sent.len()).collect()
}

fn moves(fabric: &Fabric) -> u64 {
    fabric.flows.iter().map(|flow| flow[0].end.requester.stats().rehashed).sum()
}

/// Lets connections run until `until`, with eight requests each.
fn run(fabric: &mut Fabric, read: bool, until: Duration) {
    while fabric.now < until {
        for flow in 0..fabric.flows.len() {
            let end = &mut fabric.flows[flow][0].end;
            let posted = end.requester.inspect(fabric.now).requests;
            if posted < 8 {
                (posted..8).for_each(|_| end.post(request(read)));
                fabric.transmit(flow, 0);
            }
        }
        fabric.step();
    }
}

fn all_succeeded(fabric: &Fabric) -> bool {
    let ok = |flow: &[Station; 2]| flow[0].end.host.sent.iter().all(|it| it.status == WcStatus::Success);
    fabric.flows.iter().all(ok)
}

fn shares(flows: Flows) -> Got {
    let mut fabric = fabric(&flows);
    let began = fabric.now;
    run(&mut fabric, flows.read, began + WARM);
    let (before, early) = (arrived(&fabric), moves(&fabric));
    run(&mut fabric, flows.read, began + WARM + LENGTH);
    assert!(all_succeeded(&fabric), "{flows:?}");
    let done: Vec<f64> = arrived(&fabric).iter().zip(before).map(|(after, before)| (after - before) as f64).collect();
    let most = 10 * GIGABIT * flows.lines.min(flows.count) as u64;
    let stats = fabric.flows.iter().map(|flow| flow[0].end.requester.stats());
    Got {
        goodput: done.iter().sum::<f64>() * f64::from(MESSAGE) / (most as f64 * LENGTH.as_secs_f64()),
        jain: jain(&done),
        moves: moves(&fabric),
        late_moves: moves(&fabric) - early,
        retransmitted: stats.map(|stats| stats.retransmitted + stats.lost_responses).sum(),
    }
}

/// Connections that share a line while others are empty find the empty ones. They do not take late packets for lost
/// ones.
#[test]
fn connections_that_collide_spread_out() {
    for (marks, read) in [(true, false), (true, true), (false, false), (false, true)] {
        let run = |multipath, seeds: u64| {
            let flows = |seed| Flows { count: 4, lines: 4, read, multipath, marks, seed };
            (1..=seeds).map(move |seed| shares(flows(seed))).collect::<Vec<_>>()
        };
        let mean = |got: &[Got], part: fn(&Got) -> f64| got.iter().map(part).sum::<f64>() / got.len() as f64;
        let (before, after) = (run(false, 3), run(true, 5));
        let (kept, goodput) = (mean(&before, |got| got.goodput), mean(&after, |got| got.goodput));
        println!("marks {marks}, read {read}: {kept:.2}, then {goodput:.2}: {after:.2?}");
        assert!(goodput > 0.85 && goodput > kept + 0.2 && mean(&after, |got| got.jain) > 0.95, "{after:.2?}");
        assert!(!marks || after.iter().all(|got| got.retransmitted <= 40), "late is not lost: {after:.2?}");
    }
}

/// Where all lines are equally full, no connection finds a better one, and soon none moves any more. WRITEs then use
/// all lines at a time.
#[test]
fn connections_that_find_no_better_path_stop_moving() {
    for (marks, read) in [(true, false), (true, true), (false, false), (false, true)] {
        for seed in 1..=2 {
            let flows = Flows { count: 8, lines: 4, read, multipath: true, marks, seed };
            let got = shares(flows);
            println!("{flows:?}: {got:.2?}");
            assert!(got.moves <= 16 * 8 && got.late_moves <= 2 * 8 && got.goodput > 0.7, "{flows:?}: {got:.2?}");
        }
    }
}

/// Returns the times, in microseconds, at which connections continue after something has happened to a line.
fn recovery(fabric: &mut Fabric, read: bool) -> Vec<Option<u64>> {
    let (began, before) = (fabric.now, arrived(fabric));
    let mut first = vec![None; before.len()];
    for after in (500..2_000_000).step_by(500) {
        run(fabric, read, began + Duration::from_micros(after));
        for ((first, now), before) in first.iter_mut().zip(arrived(fabric)).zip(&before) {
            if now > before + 16 {
                first.get_or_insert(after);
            }
        }
        if first.iter().all(Option::is_some) {
            break;
        }
    }
    first
}

/// A line that begins to lose everything, in both directions, is left, and no request fails.
#[test]
fn a_dead_line_is_left() {
    for (read, lines, limit, timeouts) in [(false, 4, 100_000, 0), (true, 4, 200_000, 0), (false, 2, 400_000, 1)] {
        let mut worst = (0, 0);
        for seed in 1..=12 {
            let flows = Flows { count: 4, lines, read, multipath: true, marks: true, seed };
            let mut fabric = fabric(&flows);
            let began = fabric.now;
            run(&mut fabric, read, began + Duration::from_millis(5));
            fabric.set_line(0, Line { loss: 10_000, ..line(true) });
            let took = recovery(&mut fabric, read).into_iter().map(|after| after.unwrap()).max().unwrap();
            let most = fabric.flows.iter().map(|flow| flow[0].end.requester.stats().timeouts).max().unwrap();
            assert!(all_succeeded(&fabric) && took <= limit && most <= timeouts, "{flows:?}: {took} us, {most}");
            worst = (worst.0.max(took), worst.1.max(most));
        }
        println!("{lines} lines, read {read}: at most {} us and {} ACK timeouts", worst.0, worst.1);
    }
}

/// Connections that use all lines at a time leave a dead one, too.
#[test]
fn a_dead_line_among_many_is_left() {
    for seed in 1..=4 {
        let flows = Flows { count: 8, lines: 4, read: false, multipath: true, marks: true, seed };
        let mut fabric = fabric(&flows);
        let began = fabric.now;
        run(&mut fabric, false, began + WARM);
        let ports = fabric.flows.iter().map(|flow| flow[0].end.requester.path().inspect().source_port);
        let before: Vec<_> = ports.collect();
        run(&mut fabric, false, began + WARM + Duration::from_millis(1));
        let ports = fabric.flows.iter().map(|flow| flow[0].end.requester.path().inspect().source_port);
        let spread = ports.zip(before).filter(|(after, before)| after != before).count();
        fabric.set_line(0, Line { loss: 10_000, ..line(true) });
        let took = recovery(&mut fabric, false).into_iter().map(|after| after.unwrap()).max().unwrap();
        println!("{spread} connections on several lines: after {took} us");
        assert!(spread >= 4 && took <= 400_000 && all_succeeded(&fabric), "{flows:?}: {spread}, {took} us");
    }
}

/// A line that becomes ten times slower is left.
#[test]
fn a_slow_line_is_left() {
    for (marks, read) in [(true, false), (true, true), (false, false), (false, true)] {
        for seed in 1..=4 {
            let flows = Flows { count: 1, lines: 4, read, multipath: true, marks, seed };
            let mut fabric = fabric(&flows);
            let began = fabric.now;
            run(&mut fabric, read, began + Duration::from_millis(10));
            let side = usize::from(!read);
            let at = |fabric: &Fabric| {
                let end = &fabric.flows[0][1 - side].end;
                let path = if read { end.responder.path() } else { end.requester.path() };
                fabric.line_of(0, side, path.inspect().source_port.unwrap())
            };
            let slow = at(&fabric);
            fabric.set_line(slow, Line { rate: GIGABIT, ..line(marks) });
            let slowed = fabric.now;
            let left = (1..50).find(|&after| {
                run(&mut fabric, read, slowed + Duration::from_millis(after));
                at(&fabric) != slow
            });
            println!("{flows:?}: after {left:?} ms");
            assert!(left.is_some() && all_succeeded(&fabric), "{flows:?}");
        }
    }
}

/// Returns what both ends send over a network that loses, reorders and goes silent for a while. `offers` says whether
/// they agree.
fn frames(multipath: bool, offers: bool, kind: GidType, seed: u64) -> [Vec<Vec<u8>>; 2] {
    let base = Setup::default();
    let tuning = base.tuning.with_negotiate(offers).with_multipath(multipath);
    let mut pair = Pair::new(&Setup { tuning, kind, ..base }, seed);
    pair.keep_frames = true;
    pair.ends.iter_mut().for_each(|end| end.keeps = true);
    for loss in [0, 10, 1000, 10] {
        (0..8).for_each(|number| pair.ends[0].post(request(number % 2 == 0)));
        pair.faults = Faults { loss, reorder: 20, ..Faults::default() };
        let until = pair.now + Duration::from_millis(300);
        while pair.now < until && pair.step() {}
    }
    assert!(pair.ends[0].requester.stats().timeouts > 0 && !pair.ends[0].host.failed, "{}", pair.report());
    pair.frames
}

/// The source ports of frames.
fn ports(frames: &[Vec<u8>]) -> BTreeSet<u16> {
    let port = |frame: &Vec<u8>| Packet::parse(frame).unwrap().header.network.source_port().unwrap();
    frames.iter().map(port).collect()
}

/// Only a peer that agreed sees source ports other than the connection's own. RoCE v1 has no ports.
#[test]
fn any_other_peer_sees_what_it_saw() {
    for seed in 1..=8 {
        for (offers, kind) in [(false, GidType::RoceV2), (true, GidType::RoceV1)] {
            assert_eq!(frames(false, offers, kind, seed), frames(true, offers, kind, seed), "{offers} {kind:?} {seed}");
        }
        let off = frames(false, true, GidType::RoceV2, seed);
        assert_eq!(off.each_ref().map(|frames| ports(frames).len()), [1, 1]);
        let on = frames(true, true, GidType::RoceV2, seed);
        for ports in on.each_ref().map(|frames| ports(frames)) {
            assert!(ports.len() > 1 && ports.first() >= Some(&0xc000), "{ports:x?}");
        }
    }
}
