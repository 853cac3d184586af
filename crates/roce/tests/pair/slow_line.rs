//! A slow line with a short queue that drops without marking: flows find its rate, and none of them starves.

use std::time::Duration;

use pvrdma_verbs_types::{Mtu, QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::fabric::{Fabric, Line, Seen};
use super::host::KEY;
use super::net::Setup;
use super::simulation::jain;

const GIGABIT: u64 = 125_000_000;
const MESSAGE: u32 = 64 << 10;

/// Throughput of equal flows on a slow line with a short queue.
#[derive(Debug)]
struct Slow {
    /// Messages that arrived, as a share of what the line could carry.
    goodput: f64,
    /// Frames that found the queue full, per frame that left.
    dropped: f64,
    jain: f64,
    /// Number of flows with a failed request, and the longest run of ACK timeouts of one flow.
    failed: usize,
    timeouts: u32,
}

/// Flows over a line of 100 Mb/s behind links of 10 Gb/s, with room for 60 KB.
#[derive(Clone, Copy, Debug)]
struct Flows {
    count: usize,
    read: bool,
    /// Each flow comes from a host of its own, which knows nothing of the others.
    hosts: bool,
    /// Delay of the slow line.
    delay: Duration,
    negotiate: bool,
    seed: u64,
    length: Duration,
}

/// A line with room for 60 KB, which only drops.
fn line(rate: u64, delay: Duration) -> Line {
    Line { rate, delay, queue: 60_000, mark: u64::MAX, loss: 0, reorder: 0 }
}

fn setup(negotiate: bool) -> Setup {
    let base = Setup::default();
    Setup {
        tuning: base.tuning.with_negotiate(negotiate),
        attrs: QpAttrs { path_mtu: Mtu::M4096, max_rd_atomic: 16, max_dest_rd_atomic: 16, ..base.attrs },
        ..base
    }
}

fn request(read: bool) -> SendWr {
    let remote = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let op = if read { SendOp::Read { remote } } else { SendOp::Write { remote, immediate: None } };
    let sges = vec![Sge { addr: 0x200_0000, length: MESSAGE, lkey: KEY }];
    SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges }
}

/// Lets the flows run for a while. A failed request does not count as one that arrived.
fn slow(flows: Flows) -> Slow {
    let Flows { count: flows, read, hosts, delay, negotiate, seed, length } = flows;
    let line = line(GIGABIT / 10, delay);
    let mut fabric = Fabric::new(&vec![setup(negotiate); flows], line, 10 * GIGABIT, None, seed);
    fabric.hosts = hosts;
    // Without jitter, flows keep in step, and one of them may find the queue full time and again.
    fabric.jitter = Duration::from_micros(100);
    let side = usize::from(!read);
    let warm = Duration::from_millis(500);
    let began = fabric.now;
    fabric.flows.iter_mut().flatten().for_each(|station| station.end.keeps = true);
    let arrived = |fabric: &Fabric| fabric.flows.iter().map(|flow| flow[0].end.host.sent.len()).collect::<Vec<_>>();
    let mut before: Option<(Vec<usize>, Seen)> = None;
    let mut posted = vec![0; flows];
    let mut timeouts = 0;
    loop {
        for (flow, posted) in posted.iter_mut().enumerate() {
            let end = &mut fabric.flows[flow][0].end;
            if end.host.failed {
                continue;
            }
            let due = end.host.sent.len() + 8 - *posted;
            if due > 0 {
                (0..due).for_each(|_| end.post(request(read)));
                *posted += due;
                fabric.transmit(flow, 0);
            }
        }
        let since = fabric.now - began;
        if since >= warm && before.is_none() {
            before = Some((arrived(&fabric), fabric.seen[side]));
        }
        if since >= warm + length {
            break;
        }
        if let Some((flow, 0)) = fabric.step() {
            let requester = &fabric.flows[flow][0].end.requester;
            timeouts = timeouts.max(requester.inspect(fabric.now).backoff);
        }
    }
    let (count, seen) = before.unwrap();
    let done: Vec<f64> = arrived(&fabric).iter().zip(count).map(|(after, before)| (after - before) as f64).collect();
    let ok = |flow: &[super::fabric::Station; 2]| flow[0].end.host.sent.iter().all(|it| it.status == WcStatus::Success);
    let now = fabric.seen[side];
    Slow {
        goodput: done.iter().sum::<f64>() * f64::from(MESSAGE) / (line.rate as f64 * length.as_secs_f64()),
        dropped: (now.overflowed - seen.overflowed) as f64 / (now.frames - seen.frames) as f64,
        jain: jain(&done),
        failed: fabric.flows.iter().filter(|flow| !ok(flow)).count(),
        timeouts,
    }
}

/// A queue that only drops, in front of a line that is a hundred times slower than those that lead to it. `delay` is
/// the delay of the slow line.
fn flows_find_the_rate_of_a_slow_line(delay: Duration) {
    let kinds =
        [("WRITE", false, true, 0.9, 0.7), ("READ", true, true, 0.9, 0.4), ("plain WRITE", false, false, 0.5, 1.0)];
    for (kind, read, negotiate, least, most) in kinds {
        for flows in [1, 4, 8] {
            let length = Duration::from_secs(2);
            let got = slow(Flows { count: flows, read, hosts: false, delay, negotiate, seed: 7, length });
            println!("{delay:?}, {flows} flows of {kind}: {got:.3?}");
            assert!(
                got.goodput >= least && got.dropped <= most && got.jain >= 0.7 && got.failed == 0,
                "{flows} flows of {kind}: {got:.3?}"
            );
            assert!(flows > 1 || got.dropped <= 0.15, "one flow of {kind}: {got:.3?}");
        }
    }
}

#[test]
fn flows_find_the_rate_of_a_slow_line_nearby() {
    flows_find_the_rate_of_a_slow_line(Duration::from_micros(50));
}

#[test]
fn flows_find_the_rate_of_a_slow_line_far_away() {
    flows_find_the_rate_of_a_slow_line(Duration::from_millis(5));
}

/// A queue with less room than the connections need loses packets at random times, among them those retransmitted after
/// a timeout. Each connection makes progress nevertheless.
#[test]
fn no_flow_of_many_starves() {
    let (delay, length) = (Duration::from_micros(50), Duration::from_secs(10));
    for (count, read, negotiate) in [(8, false, true), (12, false, true), (12, true, true), (8, false, false)] {
        let mut least = Slow { goodput: 1.0, dropped: 0.0, jain: 1.0, failed: 0, timeouts: 0 };
        for seed in 0..12 {
            let flows = Flows { count, read, hosts: false, delay, negotiate, seed, length };
            let got = slow(flows);
            assert!(got.failed == 0 && got.goodput > 0.85 && got.jain > 0.9, "{flows:?}: {got:.3?}");
            least.goodput = least.goodput.min(got.goodput);
            least.jain = least.jain.min(got.jain);
            least.timeouts = least.timeouts.max(got.timeouts);
        }
        println!("{count} flows, read {read}, agreed {negotiate}: {least:.3?}");
    }
}

/// Incast without ECN: several hosts send to one, or read from one each.
#[test]
fn hosts_share_a_line_that_only_drops() {
    for (count, read, least) in [(2, false, 0.9), (4, false, 0.9), (8, false, 0.6), (4, true, 0.7)] {
        for seed in 0..4 {
            let (delay, length) = (Duration::from_micros(50), Duration::from_secs(2));
            let flows = Flows { count, read, hosts: true, delay, negotiate: true, seed, length };
            let got = slow(flows);
            println!("{flows:?}: {got:.3?}");
            assert!(got.failed == 0 && got.goodput > 0.9 && got.jain > least, "{flows:?}: {got:.3?}");
        }
    }
}

/// Packets that wait behind a gap are not late. Random losses of one in a hundred reduce the rate very little at a
/// round-trip time of 10 ms, except when several happen together by chance.
#[test]
fn losses_without_a_queue_cut_little() {
    for read in [false, true] {
        let line = Line { loss: 100, queue: u64::MAX, ..line(10 * GIGABIT, Duration::from_millis(5)) };
        let mut fabric = Fabric::new(&[setup(true)], line, 10 * GIGABIT, None, 3);
        fabric.flows.iter_mut().flatten().for_each(|station| station.end.keeps = true);
        let (began, mut all, mut whole) = (fabric.now, 0.0, 0.0);
        while fabric.now < began + Duration::from_secs(4) {
            let end = &mut fabric.flows[0][0].end;
            let state = end.requester.inspect(fabric.now);
            if state.requests < 64 {
                (state.requests..64).for_each(|_| end.post(request(read)));
                fabric.transmit(0, 0);
            }
            all += 1.0;
            whole += f64::from(u8::from(state.window == 256));
            fabric.step();
        }
        println!("read {read}: the whole window at {:.2} of all moments", whole / all);
        assert!(whole / all > 0.93, "read {read}: {:.2}", whole / all);
    }
}
