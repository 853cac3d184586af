//! In one process: the device, the adapter and a test guest that drives them through configuration space and BARs.
//!
//! Every comparison alternates between what is measured and its base line, round by round.

mod memory;
mod pair;
mod rates;

use anyhow::Result;

use super::{Figure, median};

/// Measures everything, each figure in `runs` rounds.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    // First, while the heap has no holes that would hide what objects take.
    let mut figures = vec![memory::objects()?];
    for size in [64 << 10, 1 << 20, 16 << 20] {
        figures.push(rates::write_against_memcpy(size, runs)?);
    }
    figures.push(rates::small_writes(runs)?);
    figures.push(rates::latency(runs)?);
    figures.push(rates::sends_against_writes(64, runs)?);
    figures.push(rates::sends_against_writes(64 << 10, runs)?);
    Ok(figures)
}

/// A figure that is compared with what we aim at.
fn against_target(name: &str, title: String, unit: &'static str, less: bool, runs: Vec<f64>, target: f64) -> Figure {
    let value = median(&runs);
    Figure {
        name: format!("in-process/{name}"),
        title,
        unit,
        less_is_better: less,
        value,
        runs,
        baseline: target,
        baseline_runs: Vec::new(),
        baseline_name: "target",
        ratio: if less { target / value } else { value / target },
    }
}

/// A figure that is compared with a base line of the same rounds: the ratio is the median of the rounds' ratios.
fn against_baseline(
    name: &str,
    title: String,
    unit: &'static str,
    rounds: &[[f64; 2]],
    baseline_name: &'static str,
) -> Figure {
    let runs: Vec<f64> = rounds.iter().map(|round| round[0]).collect();
    let baseline_runs: Vec<f64> = rounds.iter().map(|round| round[1]).collect();
    let ratios: Vec<f64> = rounds.iter().map(|[ours, theirs]| ours / theirs).collect();
    Figure {
        name: format!("in-process/{name}"),
        title,
        unit,
        less_is_better: false,
        value: median(&runs),
        runs,
        baseline: median(&baseline_runs),
        baseline_runs,
        baseline_name,
        ratio: median(&ratios),
    }
}
