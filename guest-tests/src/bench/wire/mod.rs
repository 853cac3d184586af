//! Over the wire: two processes with a device each, in network namespaces with a pair of interfaces between them.
//!
//! Each process has a processor of its own. What is compared alternates, round by round.

mod baseline;
mod guest;
mod network;
mod peer;
mod session;

use anyhow::Result;

pub(crate) use baseline::{UdpOptions, run as run_udp_peer};
pub(super) use guest::measure as measure_in_guest;
pub(crate) use guest::run_inside as run_in_guest;
pub(crate) use peer::{PeerOptions, run as run_peer};

use super::{Figure, median};
use crate::bed::Bed;
use network::Network;
use peer::Outcome;

/// How long a round of one side takes.
const SECONDS: f64 = 2.0;
/// Bytes that a SEND packet has beside its payload: BTH and ICRC.
const PACKET_OVERHEAD: usize = 16;

/// Large writes on one connection.
const BULK: PeerOptions =
    PeerOptions { side: 0, size: 1 << 20, depth: 4, qps: 1, send: false, loss: 0, seconds: SECONDS };
/// Small sends on one connection.
const SMALL: PeerOptions = PeerOptions { size: 64, depth: 256, send: true, ..BULK };

/// A figure, or why there is none.
pub(super) type Row = Result<Figure, String>;

/// Measures everything, each figure in `runs` rounds.
pub(super) fn measure(runs: usize) -> Result<Vec<Row>> {
    if let Some(obstacle) = Network::obstacle() {
        return Ok(vec![Err(format!("the wire between two processes: {obstacle}"))]);
    }
    let network = Network::new()?;
    let mut rows = Vec::new();
    if Bed::built_program("usr/bin/iperf3").is_some() {
        rows.extend(against_tcp(&network, runs)?.into_iter().map(Ok));
    } else {
        rows.push(Err("one TCP stream over the same wire: iperf3 comes with the guest bed (guest-tests bed)".into()));
    }
    rows.push(Ok(against_datagrams(&network, runs)?));
    rows.push(Ok(with_loss(&network, runs)?));
    rows.push(Ok(many_connections(&network, runs)?));
    Ok(rows)
}

/// Bandwidth of RDMA writes against one TCP stream, and the processor time of both.
fn against_tcp(network: &Network, runs: usize) -> Result<[Figure; 2]> {
    let (mut speed, mut cost) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let ours = session::devices(network, &BULK)?;
        log::info!("{ours:?}");
        let theirs = baseline::stream(network, SECONDS)?;
        speed.push([gigabits(&BULK, &ours[0]), theirs.gigabits]);
        let gibibytes = |bytes: f64| bytes / f64::from(1 << 30);
        let processor = ours[0].processor + ours[1].processor;
        cost.push([processor / gibibytes(bytes(&BULK, &ours[0])), theirs.processor / gibibytes(theirs.bytes)]);
    }
    let base = "one TCP stream (iperf3)";
    Ok([
        figure("write-1m", "RDMA write of 1 MiB, one QP, one core a side".into(), "Gb/s", false, &speed, base),
        figure("write-1m-cpu", "its processor time, both sides".into(), "s/GiB", true, &cost, base),
    ])
}

/// Rate of small sends against datagrams of the same size without any protocol.
fn against_datagrams(network: &Network, runs: usize) -> Result<Figure> {
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let ours = session::devices(network, &SMALL)?;
        log::info!("{ours:?}");
        let theirs = baseline::datagrams(network, SMALL.size + PACKET_OVERHEAD, SECONDS)?;
        rounds.push([rate(&ours[0]) / 1e6, theirs / 1e6]);
    }
    let title = format!("send and receive of {} bytes, one QP, one core a side", SMALL.size);
    Ok(figure("send-rate", title, "million/s", false, &rounds, "sendmmsg and recvmmsg of UDP"))
}

/// What is left when one packet in a hundred is lost in each direction.
fn with_loss(network: &Network, runs: usize) -> Result<Figure> {
    let lossy = PeerOptions { loss: 100, ..BULK };
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let bad = session::devices(network, &lossy)?;
        log::info!("{bad:?}");
        let good = session::devices(network, &BULK)?;
        rounds.push([gigabits(&lossy, &bad[0]), gigabits(&BULK, &good[0])]);
    }
    Ok(figure("loss", "RDMA write of 1 MiB, 1 % of all packets lost".into(), "Gb/s", false, &rounds, "without loss"))
}

/// Many connections at once against one.
fn many_connections(network: &Network, runs: usize) -> Result<Figure> {
    let many = PeerOptions { qps: 1000, ..BULK };
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let crowd = session::devices(network, &many)?;
        log::info!("{crowd:?}");
        let one = session::devices(network, &BULK)?;
        rounds.push([gigabits(&many, &crowd[0]), gigabits(&BULK, &one[0])]);
    }
    Ok(figure("qps", "RDMA write of 1 MiB on 1,000 QPs".into(), "Gb/s", false, &rounds, "one QP"))
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn bytes(options: &PeerOptions, outcome: &Outcome) -> f64 {
    outcome.messages as f64 * options.size as f64
}

fn gigabits(options: &PeerOptions, outcome: &Outcome) -> f64 {
    bytes(options, outcome) * 8.0 / outcome.seconds / 1e9
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn rate(outcome: &Outcome) -> f64 {
    outcome.messages as f64 / outcome.seconds
}

fn figure(
    name: &str,
    title: String,
    unit: &'static str,
    less: bool,
    rounds: &[[f64; 2]],
    base: &'static str,
) -> Figure {
    let column = |index: usize| -> Vec<f64> { rounds.iter().map(|round| round[index]).collect() };
    let ratios: Vec<f64> =
        rounds.iter().map(|[ours, theirs]| if less { theirs / ours } else { ours / theirs }).collect();
    Figure {
        name: format!("wire/{name}"),
        title: format!("wire: {title}"),
        unit,
        less_is_better: less,
        value: median(&column(0)),
        runs: column(0),
        baseline: median(&column(1)),
        baseline_runs: column(1),
        baseline_name: base,
        ratio: median(&ratios),
    }
}
