//! `bench --pair`: compares this program with an older build of it.
//!
//! Each run is a separate process that measures one part once. The two programs alternate, and their order changes from
//! round to round, so that a temporary slowdown of the machine affects both alike. Each round gives one ratio for each
//! figure.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use super::figure::median;
use super::report::{Machine, write_json};
use crate::cli::BenchOptions;

/// Default parts: all that need no virtual machine.
const PARTS: [&str; 2] = ["in-process", "wire"];
/// Smallest number of rounds that gives a meaningful interval.
const FEWEST_ROUNDS: usize = 3;

/// The part of a results file that both programs write.
#[derive(Debug, Deserialize)]
struct Measured {
    commit: String,
    figures: Vec<MeasuredFigure>,
    skipped: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct MeasuredFigure {
    name: String,
    title: String,
    unit: String,
    less_is_better: bool,
    value: f64,
}

/// One figure of both programs.
#[derive(Debug, Serialize)]
struct Comparison {
    /// Stable name, `part/what`.
    name: String,
    title: String,
    unit: String,
    less_is_better: bool,
    /// Values of the older program, a round each.
    old: Vec<f64>,
    /// Values of this program, a round each.
    new: Vec<f64>,
    #[serde(flatten)]
    ratio: Ratio,
}

/// Factor by which the new program is better: new/old, or old/new where less is better, so values above 1 are better
/// for every figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Ratio {
    /// Median of the rounds' ratios.
    median: f64,
    /// Geometric mean of the rounds' ratios: the middle of the interval.
    geometric_mean: f64,
    /// The 95 % confidence interval of the geometric mean, by Student's t distribution over the logarithms.
    interval_95: [f64; 2],
}

#[derive(Debug, Serialize)]
struct Report {
    old_commit: String,
    new_commit: String,
    /// Number of completed rounds.
    rounds: usize,
    #[serde(flatten)]
    machine: Machine,
    /// Description of the interval's method, for readers of the file.
    method: &'static str,
    comparisons: Vec<Comparison>,
    skipped: Vec<String>,
}

/// Measures with both programs in turn, prints a table and writes the results.
///
/// The results are also written after each round that makes a meaningful interval, because a long comparison may be
/// interrupted.
pub(super) fn run(options: &BenchOptions, old: &Path) -> Result<()> {
    ensure!(options.runs >= FEWEST_ROUNDS, "--pair needs --runs {FEWEST_ROUNDS} or more");
    let new = std::env::current_exe().context("cannot find this program")?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let parts: Vec<&str> =
        if options.only.is_empty() { PARTS.to_vec() } else { options.only.iter().map(String::as_str).collect() };
    let mut runs: [Vec<Measured>; 2] = [Vec::new(), Vec::new()];
    for round in 0..options.runs {
        for part in &parts {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for which in order {
                let name = ["old", "new"][which];
                eprintln!("round {} of {}: {part}, {name}", round + 1, options.runs);
                let measured = measure([old, &new][which], part, &directory.path().join("results.json"))
                    .with_context(|| format!("the {name} program, {part}"))?;
                runs[which].push(measured);
            }
        }
        if (FEWEST_ROUNDS..options.runs).contains(&(round + 1)) {
            write_json(&options.output, &Report::of(round + 1, &runs))?;
        }
    }
    let report = Report::of(options.runs, &runs);
    println!("{}", table(&report.comparisons));
    println!(
        "times better: above 1 the new program is better; interval: Student's t over the logarithms of the ratios"
    );
    for reason in &report.skipped {
        println!("skipped: {reason}");
    }
    write_json(&options.output, &report)?;
    println!("results are in {}", options.output.display());
    Ok(())
}

impl Report {
    /// Compares the runs of the old and of the new program.
    fn of(rounds: usize, [old_runs, new_runs]: &[Vec<Measured>; 2]) -> Self {
        Self {
            old_commit: commit_of(old_runs),
            new_commit: commit_of(new_runs),
            rounds,
            machine: Machine::this(),
            method: "ratios above 1: the new program is better; interval_95: Student's t over the logarithms of the \
                     ratios",
            comparisons: compare(old_runs, new_runs),
            skipped: skipped(old_runs, new_runs),
        }
    }
}

/// Runs a program that measures one part once.
fn measure(program: &Path, part: &str, output: &Path) -> Result<Measured> {
    let status = Command::new(program)
        .args(["bench", "--runs", "1", "--only", part, "--output"])
        .arg(output)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(status.success(), "{}: {status}", program.display());
    let json = std::fs::read(output).with_context(|| format!("cannot read {}", output.display()))?;
    serde_json::from_slice(&json).with_context(|| format!("the results of {}", program.display()))
}

/// Returns the commit that a program reports for its build.
fn commit_of(runs: &[Measured]) -> String {
    runs.first().map(|run| run.commit.clone()).unwrap_or_default()
}

/// Values of a figure, in the order of the rounds.
fn values(runs: &[Measured], name: &str) -> Vec<f64> {
    runs.iter().flat_map(|run| &run.figures).filter(|figure| figure.name == name).map(|figure| figure.value).collect()
}

/// Compares each figure of the new program that the old one has in each round, too.
fn compare(old_runs: &[Measured], new_runs: &[Measured]) -> Vec<Comparison> {
    let mut comparisons: Vec<Comparison> = Vec::new();
    for figure in new_runs.iter().flat_map(|run| &run.figures) {
        let (old, new) = (values(old_runs, &figure.name), values(new_runs, &figure.name));
        if old.len() != new.len() || comparisons.iter().any(|known| known.name == figure.name) {
            continue;
        }
        let ratios = old.iter().zip(&new).map(|(old, new)| if figure.less_is_better { old / new } else { new / old });
        comparisons.push(Comparison {
            name: figure.name.clone(),
            title: figure.title.clone(),
            unit: figure.unit.clone(),
            less_is_better: figure.less_is_better,
            ratio: Ratio::of(&ratios.collect::<Vec<f64>>()),
            old,
            new,
        });
    }
    comparisons
}

/// Returns skipped measurements, and figures that only one of the programs measures.
fn skipped(old_runs: &[Measured], new_runs: &[Measured]) -> Vec<String> {
    let mut reasons: Vec<String> = old_runs.iter().chain(new_runs).flat_map(|run| run.skipped.clone()).collect();
    for (runs, others, whose) in [(old_runs, new_runs, "old"), (new_runs, old_runs, "new")] {
        for figure in runs.iter().flat_map(|run| &run.figures) {
            if values(others, &figure.name).len() != values(runs, &figure.name).len() {
                reasons.push(format!("{}: not in every run of both programs (the {whose} one has it)", figure.name));
            }
        }
    }
    reasons.sort();
    reasons.dedup();
    reasons
}

impl Ratio {
    /// Returns the ratio of two rounds or more.
    #[expect(clippy::cast_precision_loss, reason = "a handful of rounds")]
    fn of(ratios: &[f64]) -> Self {
        let count = ratios.len() as f64;
        let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
        let mean = logs.iter().sum::<f64>() / count;
        let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let reach = student_95(ratios.len().saturating_sub(1)) * (variance / count).sqrt();
        Self {
            median: median(ratios),
            geometric_mean: mean.exp(),
            interval_95: [(mean - reach).exp(), (mean + reach).exp()],
        }
    }
}

/// The 97.5 % quantile of Student's t distribution: a table, beyond it the next larger value (that of infinitely many
/// degrees of freedom is 1.960).
fn student_95(degrees_of_freedom: usize) -> f64 {
    const QUANTILES: [f64; 20] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086,
    ];
    match degrees_of_freedom {
        0 => f64::INFINITY,
        within @ 1..=20 => QUANTILES[within - 1],
        21..=29 => 2.080,
        30..=59 => 2.042,
        _ => 2.000,
    }
}

fn table(comparisons: &[Comparison]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["measured", "old", "new", "times better", "geometric mean", "95 % interval"]);
    for comparison in comparisons {
        let Comparison { title, unit, old, new, ratio, .. } = comparison;
        table.add_row([
            title.clone(),
            format!("{:.2} {unit}", median(old)),
            format!("{:.2} {unit}", median(new)),
            format!("{:.3}", ratio.median),
            format!("{:.3}", ratio.geometric_mean),
            format!("{:.3} to {:.3}", ratio.interval_95[0], ratio.interval_95[1]),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(figures: &[(&str, bool, f64)]) -> Measured {
        let figures: Vec<_> = figures
            .iter()
            .map(|(name, less, value)| {
                serde_json::json!({
                    "name": name, "title": name, "unit": "u", "less_is_better": less, "value": value, "baseline": null,
                })
            })
            .collect();
        serde_json::from_value(serde_json::json!({ "commit": "c", "figures": figures, "skipped": [] })).unwrap()
    }

    #[test]
    fn interval_of_known_numbers() {
        // Logarithms -1, 0, 1: standard deviation 1, standard error 1/√3, t(2) = 4.303.
        let ratio = Ratio::of(&[(-1.0_f64).exp(), 1.0, 1.0_f64.exp()]);
        let reach = 4.303 / 3.0_f64.sqrt();
        assert!((ratio.median - 1.0).abs() < 1e-9);
        assert!((ratio.geometric_mean - 1.0).abs() < 1e-9);
        assert!((ratio.interval_95[0].ln() + reach).abs() < 1e-9);
        assert!((ratio.interval_95[1].ln() - reach).abs() < 1e-9);
    }

    #[test]
    fn better_is_above_one_for_rates_and_times() {
        let old =
            [run(&[("rate", false, 10.0), ("time", true, 10.0)]), run(&[("rate", false, 10.0), ("time", true, 10.0)])];
        let new =
            [run(&[("rate", false, 20.0), ("time", true, 5.0)]), run(&[("rate", false, 20.0), ("time", true, 5.0)])];
        for comparison in compare(&old, &new) {
            assert!((comparison.ratio.median - 2.0).abs() < 1e-9, "{comparison:?}");
        }
    }

    #[test]
    fn figures_of_only_one_program_are_reported_and_not_compared() {
        let old = [run(&[("both", false, 1.0), ("gone", false, 1.0)])];
        let new = [run(&[("both", false, 1.0), ("added", false, 1.0)])];
        assert_eq!(compare(&old, &new).iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["both"]);
        let skipped = skipped(&old, &new);
        assert_eq!(skipped.len(), 2, "{skipped:?}");
        assert!(skipped[0].starts_with("added") && skipped[1].starts_with("gone"), "{skipped:?}");
    }
}
