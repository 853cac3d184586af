//! Measurements between two guests: the PVRDMA device beside `rdma_rxe` in the same guests, in alternating runs, so
//! that a noisy machine disturbs both alike.

use anyhow::{Context, Result};

use super::figure::{Figure, median};
use super::network_card::stream;
use crate::demo::{MEASUREMENTS, Measurement, SIZES};
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};

/// Measures everything `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let pair = Pair::boot(&image, &PairOptions::default())?;
    compare(&pair, &MEASUREMENTS, runs)
}

/// Writes of many sizes, for a curve, also beside TCP with writes of that size.
pub(super) fn sweep(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let pair = Pair::boot(&image, &PairOptions::default())?;
    let mut figures = compare(&pair, &SIZES, runs)?;
    let beside_tcp = figures.iter().map(|figure| tcp(&pair, figure)).collect::<Result<Vec<_>>>()?;
    figures.extend(beside_tcp);
    Ok(figures)
}

/// Compares a figure of [`SIZES`] with one TCP stream between the guests, through the network functions of the device.
fn tcp(pair: &Pair, ours: &Figure) -> Result<Figure> {
    let bytes: u64 = ours.name.trim_start_matches("vm/size-").parse().context("a size is a number")?;
    let address = pair.link(LinkKind::Pvrdma)?.ip[1];
    // iperf3 writes at most 1 MiB at a time.
    let options = format!("-l {}", bytes.min(1 << 20));
    let stream = |run| {
        let (speed, _) = stream(pair, address, &options).with_context(|| pair.diagnosis())?;
        eprintln!("TCP, writes of {bytes} bytes, run {}: {speed:.3} Gb/s", run + 1);
        Ok(speed)
    };
    let streams = (0..ours.runs.len()).map(stream).collect::<Result<Vec<f64>>>()?;
    let rounds: Vec<_> = ours.runs.iter().zip(streams).map(|(&ours, tcp)| [ours, tcp]).collect();
    let (name, title) = (format!("vm/tcp-size-{bytes}"), ours.title.clone());
    Ok(Figure::of_rounds(name, title, ours.unit, false, &rounds, "one TCP stream between the same guests"))
}

fn compare(pair: &Pair, measurements: &[Measurement], runs: usize) -> Result<Vec<Figure>> {
    let links = [pair.link(LinkKind::Pvrdma)?, pair.link(LinkKind::Rxe)?];
    let mut figures = Vec::new();
    for measurement in measurements {
        let mut values = [Vec::new(), Vec::new()];
        for run in 0..runs.max(1) {
            for (link, values) in links.iter().zip(&mut values) {
                let value = measurement.run(pair, link)?;
                eprintln!(
                    "{} on {}, run {}: {value:.2} {}",
                    measurement.title,
                    link.device,
                    run + 1,
                    measurement.unit()
                );
                values.push(value);
            }
        }
        let [ours, theirs] = values;
        let (value, baseline) = (median(&ours), median(&theirs));
        figures.push(Figure {
            name: format!("vm/{}", measurement.key),
            title: format!("between guests: {}", measurement.title),
            unit: measurement.unit(),
            less_is_better: measurement.is_latency(),
            value,
            runs: ours,
            baseline,
            baseline_runs: theirs,
            baseline_name: "rdma_rxe in the same guests",
            ratio: if measurement.is_latency() { baseline / value } else { value / baseline },
        });
    }
    Ok(figures)
}
