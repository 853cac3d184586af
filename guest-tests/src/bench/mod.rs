//! `bench`: measurements, their results as JSON.
//!
//! Each part returns [`Figure`]s and is called from [`run`]: [`in_process`] measures the device without a virtual machine,
//! [`wire`] between two processes of this host or of a guest, [`vm`] between guests, [`hca`] on the adapter of a host.
//! [`paired`] compares two builds of this program by these figures.

mod chart;
mod hca;
mod in_process;
mod paired;
mod vm;
pub(crate) mod wire;

use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::cli::BenchOptions;

/// One measured comparison.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    /// Stable name, `part/what`.
    pub(crate) name: String,
    /// What a person reads.
    pub(crate) title: String,
    /// Unit of the values.
    pub(crate) unit: &'static str,
    /// Whether less is better.
    pub(crate) less_is_better: bool,
    /// Median on our device.
    pub(crate) value: f64,
    /// All runs on our device.
    pub(crate) runs: Vec<f64>,
    /// Median of what it is compared with, in the same run.
    pub(crate) baseline: f64,
    /// All runs of the base line.
    pub(crate) baseline_runs: Vec<f64>,
    /// What the base line is.
    pub(crate) baseline_name: &'static str,
    /// How many times better than the base line.
    pub(crate) ratio: f64,
}

/// What was measured where.
#[derive(Debug, Serialize)]
struct Report {
    commit: String,
    processor: String,
    cpus: usize,
    figures: Vec<Figure>,
    /// What was not measured, and why.
    skipped: Vec<String>,
}

/// Measures, prints a table and writes the results.
pub(crate) fn run(options: &BenchOptions) -> Result<()> {
    if let Some(old) = &options.pair {
        return paired::run(options, old);
    }
    let runs = options.runs.max(1);
    let (mut figures, mut skipped) = (Vec::new(), Vec::new());
    let wanted = |part: &str| options.only.is_empty() || options.only.iter().any(|only| only == part);
    if wanted("in-process") {
        figures.extend(in_process::measure(runs)?);
    }
    if wanted("wire") {
        for row in wire::measure(runs)? {
            match row {
                Ok(figure) => figures.push(figure),
                Err(reason) => skipped.push(reason),
            }
        }
    }
    if !options.no_vm && wanted("vm") {
        figures.extend(vm::measure(runs)?);
    }
    if !options.no_vm && wanted("guest") {
        figures.extend(wire::measure_in_guest(runs)?);
    }
    if !options.no_vm && wanted("hca") {
        figures.extend(hca::measure(runs)?);
    }
    let report = Report { commit: commit(), processor: processor(), cpus: cpus(), figures, skipped };
    println!("{}", table(&report.figures));
    for reason in &report.skipped {
        println!("skipped: {reason}");
    }
    write_json(&options.output, &report)?;
    let chart = options.output.with_extension("svg");
    chart::draw(&report.figures, &chart)?;
    println!("results are in {} and {}", options.output.display(), chart.display());
    Ok(())
}

/// Writes results, and the directory for them.
fn write_json(output: &Path, results: &impl Serialize) -> Result<()> {
    if let Some(parent) = output.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let json = serde_json::to_string_pretty(results).context("cannot encode the results")?;
    std::fs::write(output, json + "\n").with_context(|| format!("cannot write {}", output.display()))
}

/// The middle of several runs.
pub(crate) fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

fn table(figures: &[Figure]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["measured", "our device", "compared with", "", "times better"]);
    for figure in figures {
        table.add_row([
            figure.title.clone(),
            format!("{:.2} {}", figure.value, figure.unit),
            format!("{:.2} {}", figure.baseline, figure.unit),
            figure.baseline_name.to_owned(),
            format!("{:.2}", figure.ratio),
        ]);
    }
    table
}

fn commit() -> String {
    std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(0, std::num::NonZero::get)
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }
}
