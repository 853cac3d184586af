//! Results as a table and as JSON.

use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;

use super::figure::{Distribution, Figure};

/// Machine of a measurement.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) cpus: usize,
}

impl Machine {
    /// Returns this machine.
    pub(super) fn this() -> Self {
        Self { processor: processor(), cpus: std::thread::available_parallelism().map_or(0, std::num::NonZero::get) }
    }
}

/// Results with the machine that they were measured on.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) commit: String,
    /// Day of the measurement, in UTC.
    pub(super) date: String,
    #[serde(flatten)]
    pub(super) machine: Machine,
    pub(super) figures: Vec<Figure>,
    /// Distributions of single samples.
    pub(super) distributions: Vec<Distribution>,
    /// Skipped measurements, with the reasons.
    pub(super) skipped: Vec<String>,
}

impl Report {
    /// Creates the report of this machine and of the current commit.
    pub(super) fn new(figures: Vec<Figure>, distributions: Vec<Distribution>, skipped: Vec<String>) -> Self {
        Self {
            commit: commit(),
            date: jiff::Timestamp::now().strftime("%F").to_string(),
            machine: Machine::this(),
            figures,
            distributions,
            skipped,
        }
    }
}

/// Writes results, and the directory for them.
pub(super) fn write_json(output: &Path, results: &impl Serialize) -> Result<()> {
    if let Some(parent) = output.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let json = serde_json::to_string_pretty(results).context("cannot encode the results")?;
    std::fs::write(output, json + "\n").with_context(|| format!("cannot write {}", output.display()))
}

/// Formats the figures as a table for the reader.
pub(super) fn table(figures: &[Figure]) -> Table {
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

/// Describes the commit of this project.
pub(crate) fn commit() -> String {
    std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
        .unwrap_or_default()
}
