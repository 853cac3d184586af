//! Measurements between two guests: the PVRDMA device beside `rdma_rxe` in the same guests, in alternating runs, so
//! that a noisy machine disturbs both alike.

use anyhow::Result;

use super::figure::{Figure, median};
use crate::demo::{MEASUREMENTS, Measurement, SIZES};
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};

/// Measures everything `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    compare(&MEASUREMENTS, runs)
}

/// Writes of many sizes, for a curve.
pub(super) fn sweep(runs: usize) -> Result<Vec<Figure>> {
    compare(&SIZES, runs)
}

fn compare(measurements: &[Measurement], runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let pair = Pair::boot(&image, &PairOptions::default())?;
    let links = [pair.link(LinkKind::Pvrdma)?, pair.link(LinkKind::Rxe)?];
    let mut figures = Vec::new();
    for measurement in measurements {
        let mut values = [Vec::new(), Vec::new()];
        for run in 0..runs.max(1) {
            for (link, values) in links.iter().zip(&mut values) {
                let value = measurement.run(&pair, link)?;
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
