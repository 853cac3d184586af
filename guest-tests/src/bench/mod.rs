//! `bench`: measurements, and their results as JSON.
//!
//! Each part returns [`Figure`](figure::Figure)s and is called from [`run`]: [`in_process`] measures the device without
//! a virtual machine, [`daemon`] the cost of observing a daemon, [`limits`] one daemon with many connections to many
//! hosts, [`state`] saved state and hand-over, [`wire`] traffic between two processes of this host or of a guest,
//! [`vm`] and [`network_card`] traffic between guests, [`kvm`] traffic between guests under KVM, [`lab`] the start of
//! guests, [`host_adapter`] the adapter of a host. [`paired`] compares two builds of this program by these figures.
//! [`published`] generates the figures of the documents.

mod chart;
mod daemon;
mod doorbells;
mod figure;
mod host_adapter;
mod html;
mod in_process;
mod kvm;
mod lab;
mod limits;
mod network_card;
mod paired;
pub(crate) mod published;
mod report;
mod state;
mod sweep;
mod trend;
mod vm;
pub(crate) mod wire;

use std::path::Path;

use anyhow::{Context, Result};

use crate::cli::BenchOptions;
use figure::Figure;
use report::{Report, table, write_json};
use trend::Earlier;

pub(crate) use html::{example_page, parts};
pub(crate) use report::commit;

/// Measures, prints a table and writes the results.
pub(crate) fn run(options: &BenchOptions) -> Result<()> {
    if let Some(old) = &options.pair {
        return paired::run(options, old);
    }
    // Read first, because a wrong path must not be noticed only after hours of measuring.
    let earlier = options.after.iter().map(|path| Earlier::read(path)).collect::<Result<Vec<_>>>()?;
    let runs = options.runs.max(1);
    let (mut figures, mut skipped) = (Vec::new(), Vec::new());
    let (mut distributions, mut rows) = (Vec::new(), Vec::new());
    let wanted = |part: &str| options.only.is_empty() || options.only.iter().any(|only| only == part);
    if wanted("in-process") {
        figures.extend(in_process::measure(runs)?);
    }
    if wanted("daemon") {
        figures.extend(daemon::measure(runs)?);
    }
    if wanted("limits") {
        rows.extend(limits::measure()?);
    }
    if wanted("state") {
        figures.extend(state::measure(runs)?);
    }
    if wanted("sweep") {
        figures.extend(in_process::sweep(runs)?);
        distributions.push(in_process::latencies()?);
        rows.extend(wire::sweep(runs)?);
    }
    if wanted("wire") {
        rows.extend(wire::measure(runs)?);
    }
    if wanted("doorbells") {
        rows.extend(doorbells::measure(runs, !options.no_vm)?);
    }
    for row in rows {
        row.map_or_else(|reason| skipped.push(reason), |figure| figures.push(figure));
    }
    if !options.no_vm {
        figures.extend(with_machines(wanted, runs)?);
    }
    let report = Report::new(figures, distributions, skipped);
    write(&report, &earlier, &options.output)
}

/// Measures the wanted parts that need virtual machines.
fn with_machines(wanted: impl Fn(&str) -> bool, runs: usize) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    if wanted("vm") {
        figures.extend(vm::measure(runs)?);
    }
    if wanted("sweep") || wanted("guest-sweep") {
        figures.extend(vm::sweep(runs)?);
    }
    if wanted("card") {
        figures.extend(network_card::measure(runs)?);
    }
    if wanted("lab") {
        figures.extend(lab::measure(runs)?);
    }
    if wanted("kvm") {
        figures.extend(kvm::measure(runs)?);
    }
    if wanted("guest") {
        figures.extend(wire::measure_in_guest(runs)?);
    }
    if wanted("dumbbell") {
        figures.extend(wire::dumbbell::measure(runs)?);
    }
    if wanted("hca") {
        figures.extend(host_adapter::measure(runs)?);
    }
    Ok(figures)
}

/// Prints the results, and writes them beside `output` in all forms.
fn write(report: &Report, earlier: &[Earlier], output: &Path) -> Result<()> {
    println!("{}", table(&report.figures));
    for reason in &report.skipped {
        println!("skipped: {reason}");
    }
    write_json(output, report)?;
    let chart = output.with_extension("svg");
    chart::draw(&report.figures, &chart)?;
    let page = output.with_extension("html");
    std::fs::write(&page, html::page(report, earlier)?).with_context(|| format!("cannot write {}", page.display()))?;
    println!("results are in {}, {} and {}", output.display(), chart.display(), page.display());
    Ok(())
}
