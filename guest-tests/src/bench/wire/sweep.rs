//! Sweeps over the wire: sizes and connections compared with TCP, losses compared with none.

use anyhow::Result;

use super::network::Network;
use super::peer::PeerOptions;
use super::{baseline, session};
use crate::bench::figure::Figure;

const BULK: PeerOptions = PeerOptions::BULK;

/// Compares RDMA writes of many sizes with one TCP stream that writes as much at a time.
pub(super) fn sizes(network: &Network, runs: usize) -> Result<Vec<Figure>> {
    let figure = |size: usize| {
        // The number of bytes in flight is the same at each size, as far as a queue holds them.
        let depth =
            u32::try_from(BULK.size / size).unwrap_or(u32::MAX).saturating_mul(BULK.depth).clamp(BULK.depth, 256);
        let options = PeerOptions { size, depth, ..BULK };
        let round = |_| {
            let ours = session::run(network, &options)?;
            log::info!("{ours:?}");
            let theirs = baseline::stream_with(network, options.seconds, &["-l", &size.to_string()])?;
            Ok([ours[0].gigabits(size), theirs.gigabits])
        };
        let rounds = (0..runs).map(round).collect::<Result<Vec<_>>>()?;
        let title = format!("wire: RDMA writes of {size} bytes, one QP");
        let base = "one TCP stream that writes as much at a time";
        Ok(Figure::of_rounds(format!("wire/size-{size}"), title, "Gb/s", false, &rounds, base))
    };
    // iperf3 writes at most 1 MiB at a time.
    [64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20].into_iter().map(figure).collect()
}

/// Compares RDMA writes on many connections with the same number of TCP streams.
pub(super) fn connections(network: &Network, runs: usize) -> Result<Vec<Figure>> {
    let figure = |qps: usize| {
        let options = PeerOptions { qps, ..BULK };
        let round = |_| {
            let ours = session::run(network, &options)?;
            log::info!("{ours:?}");
            let theirs = baseline::stream_with(network, options.seconds, &["-P", &qps.to_string()])?;
            Ok([ours[0].gigabits(options.size), theirs.gigabits])
        };
        let rounds = (0..runs).map(round).collect::<Result<Vec<_>>>()?;
        let title = format!("wire: RDMA writes of 1 MiB on {qps} QPs");
        let base = "as many TCP streams";
        Ok(Figure::of_rounds(format!("wire/connections-{qps}"), title, "Gb/s", false, &rounds, base))
    };
    [1, 4, 16, 64, 128].into_iter().map(figure).collect()
}

/// Compares RDMA writes on many connections over a slow line with a short queue with the same number of TCP streams.
pub(super) fn slow_connections(runs: usize) -> Result<Vec<Figure>> {
    let network = Network::slow()?;
    let figure = |qps: usize| {
        let options = PeerOptions { size: 64 << 10, qps, seconds: 4.0, ..BULK };
        let round = |_| {
            let ours = session::run(&network, &options)?;
            log::info!("{ours:?}");
            let theirs = baseline::stream_with(&network, options.seconds, &["-P", &qps.to_string()])?;
            Ok([ours[0].gigabits(options.size) * 1000.0, theirs.gigabits * 1000.0])
        };
        let rounds = (0..runs).map(round).collect::<Result<Vec<_>>>()?;
        let title = format!("wire: RDMA writes of 64 KiB on {qps} QPs over 100 Mb/s with a queue of 60 KB");
        let base = "as many TCP streams there";
        Ok(Figure::of_rounds(format!("wire/slow-connections-{qps}"), title, "Mb/s", false, &rounds, base))
    };
    [1, 2, 4, 8, 16].into_iter().map(figure).collect()
}

/// Compares RDMA writes while packets are lost in each direction with those without loss.
pub(super) fn losses(network: &Network, runs: usize) -> Result<Vec<Figure>> {
    /// Loss rates in hundredths of a percent.
    const LOSSES: [u16; 5] = [3, 10, 30, 100, 300];
    let mut rounds = [const { Vec::new() }; LOSSES.len()];
    for _ in 0..runs {
        let good = session::run(network, &BULK)?;
        log::info!("{good:?}");
        for (rounds, loss) in rounds.iter_mut().zip(LOSSES) {
            let bad = session::run(network, &PeerOptions { loss, ..BULK })?;
            log::info!("{bad:?}");
            rounds.push([bad[0].gigabits(BULK.size), good[0].gigabits(BULK.size)]);
        }
    }
    let figure = |(rounds, loss): (&Vec<_>, u16)| {
        let percent = f64::from(loss) / 100.0;
        let title = format!("wire: RDMA writes of 1 MiB, {percent} % of all packets lost");
        Figure::of_rounds(format!("wire/lost-{percent}"), title, "Gb/s", false, rounds, "none lost")
    };
    Ok(rounds.iter().zip(LOSSES).map(figure).collect())
}
