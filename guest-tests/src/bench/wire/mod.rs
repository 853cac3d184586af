//! Measurements over the wire: two processes with a device each, in network namespaces with a pair of interfaces
//! between them.
//!
//! Each process has its own processor. Compared sides alternate, round by round.

mod baseline;
pub(crate) mod dumbbell;
mod guest;
mod network;
mod peer;
mod session;
mod sweep;

use anyhow::{Context, Result, ensure};

pub(super) use guest::measure as measure_in_guest;
pub(crate) use guest::run_inside as run_in_guest;
pub(crate) use peer::{PeerOptions, processor_time};

use super::figure::Figure;
use crate::image::GuestImage;
use crate::namespaces::Namespaces;
use network::Network;

/// Bytes of a SEND packet in addition to its payload: BTH and ICRC.
const PACKET_OVERHEAD: usize = 16;

/// Runs one side (hidden command `wire-peer`).
pub(crate) fn run_peer(options: &PeerOptions) -> Result<()> {
    if options.udp { baseline::run_udp(options) } else { peer::run(options) }
}

const NO_IPERF: &str = "one TCP stream over the same wire: iperf3 comes with the guest image (guest-tests image)";

/// A figure, or the reason why there is none.
pub(super) type Row = Result<Figure, String>;

/// Measures everything, each figure in `runs` rounds.
pub(super) fn measure(runs: usize) -> Result<Vec<Row>> {
    if let Some(obstacle) = Namespaces::obstacle() {
        return Ok(vec![Err(format!("the wire between two processes: {obstacle}"))]);
    }
    let network = Network::new()?;
    let mut rows = Vec::new();
    if GuestImage::built_program("usr/bin/iperf3").is_some() {
        rows.extend(against_tcp(&network, runs)?.into_iter().map(Ok));
        rows.push(Ok(without_super_frames(&network, runs)?));
        rows.extend(over_slow_line(runs)?.into_iter().map(Ok));
    } else {
        rows.push(Err(NO_IPERF.into()));
    }
    rows.push(Ok(against_datagrams(&network, runs)?));
    rows.extend(with_faults(&network, runs)?.into_iter().map(Ok));
    rows.push(Ok(many_connections(&network, runs)?));
    rows.push(Ok(beside_bulk(&network, runs)?));
    Ok(rows)
}

/// Measures sizes, connections and losses, for curves.
pub(super) fn sweep(runs: usize) -> Result<Vec<Row>> {
    if let Some(obstacle) = Namespaces::obstacle() {
        return Ok(vec![Err(format!("sweeps over the wire between two processes: {obstacle}"))]);
    }
    let network = Network::new()?;
    let mut rows: Vec<Row> = sweep::losses(&network, runs)?.into_iter().map(Ok).collect();
    if GuestImage::built_program("usr/bin/iperf3").is_some() {
        rows.extend(sweep::sizes(&network, runs)?.into_iter().map(Ok));
        rows.extend(sweep::connections(&network, runs)?.into_iter().map(Ok));
        rows.extend(sweep::slow_connections(runs)?.into_iter().map(Ok));
    } else {
        rows.push(Err(NO_IPERF.into()));
    }
    Ok(rows)
}

/// Compares the bandwidth of RDMA writes, with and without an ICRC, with one TCP stream, and the processor time of all.
fn against_tcp(network: &Network, runs: usize) -> Result<Vec<Figure>> {
    const WRITE: &str = "wire: RDMA write of 1 MiB, one QP, one core a side";
    const AGREED: &str = "wire: RDMA write of 1 MiB without an ICRC, by agreement";
    const WITHOUT_ICRC: PeerOptions = PeerOptions { without_icrc: true, ..PeerOptions::BULK };
    let kinds = [
        ("wire/write-1m", WRITE, "wire: its processor time, both sides", PeerOptions::BULK),
        ("wire/without-icrc", AGREED, "wire: its processor time without an ICRC, both sides", WITHOUT_ICRC),
    ];
    let gibibytes = |bytes: f64| bytes / f64::from(1 << 30);
    let (mut speed, mut cost) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    for _ in 0..runs {
        let theirs = baseline::stream(network, PeerOptions::BULK.seconds)?;
        for ((speed, cost), (.., options)) in speed.iter_mut().zip(&mut cost).zip(&kinds) {
            let ours = session::run(network, options)?;
            log::info!("{ours:?}");
            let omitted = ours[0].counters.get("wire_sent_without_icrc").is_some();
            ensure!(omitted == options.without_icrc, "packets without an ICRC: {omitted}");
            speed.push([ours[0].gigabits(options.size), theirs.gigabits]);
            let processor = ours[0].processor + ours[1].processor;
            cost.push([processor / gibibytes(ours[0].bytes(options.size)), theirs.processor / gibibytes(theirs.bytes)]);
        }
    }
    let base = "one TCP stream (iperf3)";
    let figures = kinds.iter().zip(speed.iter().zip(&cost)).flat_map(|((id, title, cpu, _), (speed, cost))| {
        [
            Figure::of_rounds(*id, (*title).to_owned(), "Gb/s", false, speed, base),
            Figure::of_rounds(format!("{id}-cpu"), (*cpu).to_owned(), "s/GiB", true, cost, base),
        ]
    });
    Ok(figures.collect())
}

/// Compares RDMA writes with TCP while the super-frames of both are segmented before the interface.
fn without_super_frames(network: &Network, runs: usize) -> Result<Figure> {
    let rounds = network.without_super_frames(|network| {
        let round = |_| {
            let ours = session::run(network, &PeerOptions::BULK)?;
            log::info!("{ours:?}");
            let theirs = baseline::stream(network, PeerOptions::BULK.seconds)?;
            Ok([ours[0].gigabits(PeerOptions::BULK.size), theirs.gigabits])
        };
        (0..runs).map(round).collect::<Result<Vec<_>>>()
    })?;
    let title = "wire: RDMA write of 1 MiB, interfaces without super-frames".into();
    Ok(Figure::of_rounds("wire/cut", title, "Gb/s", false, &rounds, "one TCP stream there (iperf3)"))
}

/// Compares the goodput of eight connections over a slow line with a short queue with one TCP stream.
fn over_slow_line(runs: usize) -> Result<Vec<Figure>> {
    const MESSAGE: usize = 256 << 10;
    const EIGHT: PeerOptions = PeerOptions { size: MESSAGE, qps: 8, seconds: 4.0, ..PeerOptions::BULK };
    let network = Network::slow()?;
    let kinds = [("write", EIGHT), ("read", PeerOptions { read: true, ..EIGHT })];
    let mut figures = Vec::new();
    for (name, kind) in kinds {
        let round = |_| {
            let ours = session::run(&network, &kind)?;
            log::info!("{ours:?}");
            let theirs = baseline::stream(&network, kind.seconds)?;
            Ok([ours[0].gigabits(MESSAGE) * 1000.0, theirs.gigabits * 1000.0])
        };
        let rounds = (0..runs).map(round).collect::<Result<Vec<_>>>()?;
        let title = format!("wire: RDMA {name} of 256 KiB on 8 QPs over 100 Mb/s with a queue of 60 KB");
        figures.push(Figure::of_rounds(
            format!("wire/slow-{name}"),
            title,
            "Mb/s",
            false,
            &rounds,
            "one TCP stream there",
        ));
    }
    Ok(figures)
}

/// Compares the rate of small sends with datagrams of the same size without any protocol.
fn against_datagrams(network: &Network, runs: usize) -> Result<Figure> {
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let ours = session::run(network, &PeerOptions::SMALL)?;
        log::info!("{ours:?}");
        let theirs = baseline::datagrams(network, PeerOptions::SMALL.size + PACKET_OVERHEAD)?;
        rounds.push([ours[0].million_messages(), theirs]);
    }
    let title = format!("wire: send and receive of {} bytes, one QP, one core a side", PeerOptions::SMALL.size);
    Ok(Figure::of_rounds("wire/send-rate", title, "million/s", false, &rounds, "sendmmsg and recvmmsg of UDP"))
}

/// Measures the remaining bandwidth when packets are lost or reordered in each direction.
fn with_faults(network: &Network, runs: usize) -> Result<Vec<Figure>> {
    const BULK: PeerOptions = PeerOptions::BULK;
    let kinds =
        [("write", BULK), ("read", PeerOptions { read: true, ..BULK }), ("send", PeerOptions { send: true, ..BULK })];
    let faults = [
        ("loss", "1 % of all packets lost", 100, 0),
        ("few-lost", "0.1 % of all packets lost", 10, 0),
        ("reordered", "1 % of all packets overtaken by up to 16 others", 0, 100),
    ];
    let mut figures = Vec::new();
    for (name, kind) in kinds {
        let mut rounds = [const { Vec::new() }; 3];
        for _ in 0..runs {
            let good = session::run(network, &kind)?;
            log::info!("{good:?}");
            for (rounds, &(_, _, loss, reorder)) in rounds.iter_mut().zip(&faults) {
                let bad = session::run(network, &PeerOptions { loss, reorder, ..kind })?;
                log::info!("{bad:?}");
                rounds.push([bad[0].gigabits(kind.size), good[0].gigabits(kind.size)]);
            }
        }
        for (rounds, (id, what, ..)) in rounds.iter().zip(faults) {
            let id = if name == "write" { format!("wire/{id}") } else { format!("wire/{id}-{name}") };
            let title = format!("wire: RDMA {name} of 1 MiB, {what}");
            figures.push(Figure::of_rounds(id, title, "Gb/s", false, rounds, "without faults"));
        }
    }
    Ok(figures)
}

/// Compares many simultaneous connections with one.
fn many_connections(network: &Network, runs: usize) -> Result<Figure> {
    let many = PeerOptions { qps: 1000, ..PeerOptions::BULK };
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let crowd = session::run(network, &many)?;
        log::info!("{crowd:?}");
        let one = session::run(network, &PeerOptions::BULK)?;
        rounds.push([crowd[0].gigabits(many.size), one[0].gigabits(PeerOptions::BULK.size)]);
    }
    Ok(Figure::of_rounds("wire/qps", "wire: RDMA write of 1 MiB on 1,000 QPs".into(), "Gb/s", false, &rounds, "one QP"))
}

/// Measures the latency of small writes beside large ones of another connection.
fn beside_bulk(network: &Network, runs: usize) -> Result<Figure> {
    let alone = PeerOptions { latency: true, ..PeerOptions::BULK };
    let p99 = |options: &PeerOptions| -> Result<f64> {
        let outcome = session::run(network, options)?;
        log::info!("{outcome:?}");
        outcome[0].p99_us.context("nothing was timed")
    };
    let round = |_| Ok([p99(&PeerOptions { qps: 2, ..alone.clone() })?, p99(&alone)?]);
    let rounds = (0..runs).map(round).collect::<Result<Vec<_>>>()?;
    let title = "wire: p99 of RDMA writes of 8 bytes beside a QP that writes 1 MiB".into();
    Ok(Figure::of_rounds("wire/beside-bulk", title, "µs", true, &rounds, "alone"))
}
