//! A bottleneck of 100 Mb/s with a delay of 5 ms that marks packets which find 60 KB queued: hosts with their own
//! links, many at once, later ones, and lost notifications.

use std::fmt::Write as _;
use std::time::Duration;

use pvrdma_roce::{Congestion, MEGABIT};
use pvrdma_verbs_types::{Mtu, QpAttrs, RemoteAddress, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::fabric::{Fabric, Line, Seen};
use super::host::KEY;
use super::net::Setup;
use super::simulation::jain;

const MESSAGE: u32 = 16 << 10;
/// The expected figures, which `bench --only dumbbell` prints beside those that it measures: hosts, Jain's index,
/// utilisation, and the most bytes that waited.
const FIGURES: &str = include_str!("dumbbell.txt");
/// Time for which the network runs before anything is measured.
const WARM: Duration = Duration::from_secs(4);
const LENGTH: Duration = Duration::from_secs(10);

fn line() -> Line {
    let delay = Duration::from_millis(5);
    Line { rate: 100 * MEGABIT, delay, queue: 16 << 20, mark: 60_000, loss: 0, reorder: 0 }
}

#[derive(Debug)]
struct Shares {
    jain: f64,
    utilisation: f64,
    /// Maximum number of queued bytes, and the total numbers of frames that were marked and that found the queue full.
    most: u64,
    marked: u64,
    overflowed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Senders {
    count: usize,
    /// The other hosts start this much later than the first.
    joins: Duration,
    /// Lost notifications, in ten-thousandths.
    lost: u64,
    /// All hosts write this many messages at the start of each second, followed by a pause.
    burst: Option<usize>,
    /// Parameters for a rack of 10 Gb/s.
    rack: bool,
    /// More time before anything is measured.
    later: Duration,
}

fn shares(senders: Senders, seed: u64) -> Shares {
    let base = Setup::default();
    let setup = Setup {
        tuning: base.tuning.with_negotiate(true),
        ecn: true,
        attrs: QpAttrs { path_mtu: Mtu::M1024, ..base.attrs },
        ..base
    };
    let (line, congestion) = (line(), if senders.rack { Congestion::default() } else { Congestion::slow_line() });
    let mut fabric = Fabric::new(&vec![setup; senders.count], line, 1000 * MEGABIT, Some(congestion), seed);
    fabric.lost_notifications = senders.lost;
    fabric.jitter = Duration::from_micros(100);
    let began = fabric.now;
    let remote = RemoteAddress { addr: 0x100_0000, rkey: KEY };
    let op = SendOp::Write { remote, immediate: None };
    let sges = vec![Sge { addr: 0x200_0000, length: MESSAGE, lkey: KEY }];
    let write = SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges };
    fabric.flows.iter_mut().for_each(|stations| stations[1].end.keeps = true);
    let arrived = |fabric: &Fabric| fabric.flows.iter().map(|flow| flow[0].end.host.sent.len()).collect::<Vec<_>>();
    let mut posted = vec![0; senders.count];
    let mut before: Option<(Vec<usize>, Seen)> = None;
    loop {
        let since = fabric.now - began;
        for (flow, posted) in posted.iter_mut().enumerate() {
            let end = &mut fabric.flows[flow][0].end;
            let due = match senders.burst {
                Some(burst) => burst * (1 + usize::try_from(since.as_secs()).unwrap()) - *posted,
                None => end.host.sent.len() + 16 - *posted,
            };
            if due > 0 && (flow == 0 || since >= senders.joins) {
                (0..due).for_each(|_| end.post(write.clone()));
                *posted += due;
                fabric.transmit(flow, 0);
            }
        }
        if since >= WARM + senders.later && before.is_none() {
            before = Some((arrived(&fabric), fabric.seen[1]));
            fabric.seen[1].most = 0;
        }
        if since >= WARM + senders.later + LENGTH {
            break;
        }
        if fabric.step().is_none() {
            // Let time pass until the next burst.
            fabric.now += Duration::from_millis(1);
        }
    }
    let (count, seen) = before.unwrap();
    let done: Vec<f64> = arrived(&fabric).iter().zip(count).map(|(after, before)| (after - before) as f64).collect();
    let ok = |flow: &[super::fabric::Station; 2]| flow[0].end.host.sent.iter().all(|it| it.status == WcStatus::Success);
    assert!(fabric.flows.iter().all(ok));
    let now = fabric.seen[1];
    Shares {
        jain: jain(&done),
        utilisation: (now.bytes - seen.bytes) as f64 / (line.rate as f64 * LENGTH.as_secs_f64()),
        most: now.most,
        marked: now.marked,
        overflowed: now.overflowed,
    }
}

/// Checks the figures of equal senders against their bounds.
fn assert_shared(what: &str, got: &Shares) {
    println!("{what}: {got:.3?}");
    assert!(got.jain >= 0.9 && got.utilisation >= 0.9, "{what}: {got:.3?}");
    assert!(got.most < 2 * line().mark && got.overflowed == 0 && got.marked > 0, "{what}: {got:.3?}");
}

#[test]
fn equal_senders_share_a_slow_line_that_marks() {
    let mut figures = String::new();
    for count in [1, 2, 4, 8, 16] {
        for seed in 0..3 {
            let got = shares(Senders { count, ..Senders::default() }, seed);
            assert_shared(&format!("{count} senders, seed {seed}"), &got);
            if seed == 0 {
                let _ = writeln!(figures, "{count} {:.3} {:.3} {}", got.jain, got.utilisation, got.most);
            }
        }
    }
    assert_eq!(figures, FIGURES, "dumbbell.txt has what was");
    let rack = shares(Senders { count: 16, rack: true, ..Senders::default() }, 0);
    println!("16 senders with parameters of a rack: {rack:.3?}");
    assert!(rack.most > 4 * line().mark, "{rack:.3?}");
}

/// The rate grows in steps of 1 Mb/s, so this takes half a minute.
#[test]
fn senders_that_come_later_get_their_share_of_a_slow_line() {
    for count in [2, 16] {
        let (joins, later) = (Duration::from_secs(1), Duration::from_secs(30));
        for seed in 7..10 {
            let got = shares(Senders { count, joins, later, ..Senders::default() }, seed);
            assert_shared(&format!("{count} senders, all but one a second later, seed {seed}"), &got);
        }
    }
}

#[test]
fn one_notification_in_twenty_is_lost_on_a_slow_line() {
    for count in [1, 4, 16] {
        let got = shares(Senders { count, lost: 500, ..Senders::default() }, 7);
        assert_shared(&format!("{count} senders, 5 % of notifications lost"), &got);
    }
}

/// Hosts have recovered their rate during a pause, and all start at once. Because of the pauses, the line is not always
/// in use.
#[test]
fn many_begin_at_once_on_a_slow_line() {
    for count in [4, 8, 16] {
        for seed in 7..10 {
            let got = shares(Senders { count, burst: Some(600 / count), ..Senders::default() }, seed);
            println!("{count} senders at once, each second, seed {seed}: {got:.3?}");
            assert!(got.jain >= 0.9 && got.overflowed == 0 && got.most < 2 * line().mark, "{count}: {got:.3?}");
        }
    }
}
