//! A bottleneck of 100 Mb/s and 5 ms delay that marks packets which find 60 KB queued before them, in a guest whose
//! kernel supports marking: the network of `crates/roce/tests/pair/dumbbell.rs`, with the engine's own threads and
//! timers, and real queues.
//!
//! The guest's clocks count its instructions, so that other load of this machine has no effect.

mod hosts;
mod inside;
mod line;
mod losses;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

pub(crate) use hosts::{HostsOptions, run as run_hosts};
pub(crate) use inside::{DumbbellOptions, Shares, run as run_inside};
use line::MARK;

use crate::bench::figure::Figure;
use crate::image::GuestImage;
use crate::vm::{Vm, VmBuilder};

/// Wall-clock limit: a second of the guest takes ten seconds and more.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// A guest with the network.
pub(crate) struct Dumbbell {
    vm: Vm,
    _directory: tempfile::TempDir,
}

impl Dumbbell {
    pub(crate) fn boot(image: &GuestImage) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let vm = VmBuilder::new(image, directory.path()).name("dumbbell").memory_mib(2048).virtual_time().boot()?;
        vm.spawn(&line::script())?.wait_success(TIMEOUT)?;
        Ok(Self { vm, _directory: directory })
    }

    /// Runs the dumbbell once, with `lost` of 100 notifications lost.
    pub(crate) fn run(&self, options: &DumbbellOptions, lost: u32) -> Result<Shares> {
        self.measured(options, lost).with_context(|| self.vm.diagnosis())
    }

    fn measured(&self, options: &DumbbellOptions, lost: u32) -> Result<Shares> {
        self.vm.run(&line::queues(lost))?;
        let command = format!("/run/guest-tests {}", options.arguments().join(" "));
        let output = self.vm.spawn(&command)?.wait_success(TIMEOUT)?;
        let line = output.lines().rev().find(|line| line.starts_with('{')).context("no result")?;
        let shares = serde_json::from_str(line)?;
        log::info!("{options:?}, {lost} % lost: {shares:?}");
        Ok(shares)
    }
}

/// Returns options for `senders` hosts that write all the time, measured for ten seconds after a warm-up of four.
fn equal(senders: u8) -> DumbbellOptions {
    let hosts = HostsOptions { receives: false, senders, seconds: 14, joins: 0, burst: 0, rack: false };
    DumbbellOptions { hosts, warm: 4, tcp: false }
}

/// Returns the numbers of hosts with the results of the simulation: Jain's index, utilisation, maximum of queued bytes.
fn simulated() -> Result<Vec<(u8, [f64; 3])>> {
    // The test of the simulation checks this file.
    let figures = include_str!("../../../../../crates/roce/tests/pair/dumbbell.txt");
    let line = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let &[hosts, jain, utilisation, most] = &words[..] else { bail!("{line}: not four figures") };
        Ok((hosts.parse()?, [jain.parse()?, utilisation.parse()?, most.parse()?]))
    };
    figures.lines().map(line).collect()
}

/// A scenario in addition to equal hosts.
struct Scenario {
    name: &'static str,
    title: &'static str,
    options: DumbbellOptions,
    /// Lost notifications, of 100.
    lost: u32,
}

fn scenarios() -> [Scenario; 4] {
    let late =
        DumbbellOptions { warm: 31, hosts: HostsOptions { joins: 1, seconds: 41, ..equal(2).hosts }, ..equal(2) };
    let begin = DumbbellOptions { hosts: HostsOptions { burst: 75, ..equal(8).hosts }, ..equal(8) };
    let tcp = DumbbellOptions { tcp: true, ..equal(4) };
    let scenario = |name, title, options, lost| Scenario { name, title, options, lost };
    [
        scenario("late", "2 hosts, one of which comes a second later, after 30 s", late, 0),
        scenario("at-once", "8 hosts that begin at once in each second", begin, 0),
        scenario("lost", "4 hosts, 5 % of notifications lost", equal(4), 5),
        scenario("tcp", "4 hosts beside one TCP stream with ECN", tcp, 0),
    ]
}

/// Compares the three figures of each number of hosts with those of the simulation, and runs the other scenarios.
pub(in crate::bench) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let dumbbell = Dumbbell::boot(&GuestImage::build()?)?;
    let mut figures = Vec::new();
    for (senders, simulated) in simulated()? {
        let rounds = (0..runs).map(|_| dumbbell.run(&equal(senders), 0)).collect::<Result<Vec<_>>>()?;
        let title = format!("{senders} hosts");
        figures.extend(beside(&senders.to_string(), &title, &rounds, simulated, "the same in the simulation"));
    }
    for Scenario { name, title, options, lost } in scenarios() {
        let rounds = (0..runs).map(|_| dumbbell.run(&options, lost)).collect::<Result<Vec<_>>>()?;
        figures.extend(beside(name, title, &rounds, [LEAST, LEAST, 2.0 * MARK], "target"));
    }
    Ok(figures)
}

fn beside(name: &str, title: &str, rounds: &[Shares], other: [f64; 3], base: &'static str) -> [Figure; 3] {
    let figure = |kind: &str, what: &str, unit, factor: f64, values: Vec<f64>, other: f64| {
        let rounds: Vec<_> = values.iter().map(|value| [value * factor, other * factor]).collect();
        let title = format!("dumbbell: {what}, {title}");
        Figure::of_rounds(format!("dumbbell/{kind}-{name}"), title, unit, kind == "queue", &rounds, base)
    };
    let values = |of: fn(&Shares) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let [jain, utilisation, queue] = other;
    [
        figure("jain", "Jain's index", "", 1.0, values(|shares| shares.jain), jain),
        figure("utilisation", "utilisation", "%", 100.0, values(|shares| shares.utilisation), utilisation),
        figure("queue", "most that waits", "KB", 1e-3, values(|shares| shares.most), queue),
    ]
}

/// Ten percentage points below the minimum of the simulation.
const LEAST: f64 = 0.8;

/// Checks that hosts share the line, use it, keep its queue short and lose only the packets that the test drops.
pub(crate) fn check(image: &GuestImage) -> Result<String> {
    let dumbbell = Dumbbell::boot(image)?;
    let mut notes = Vec::new();
    for senders in [1, 4, 16] {
        notes.push(check_one(&dumbbell, &format!("{senders} hosts"), &equal(senders), 0)?);
    }
    for Scenario { title, options, lost, .. } in scenarios() {
        notes.push(check_one(&dumbbell, title, &options, lost)?);
    }
    Ok(notes.join("; "))
}

fn check_one(dumbbell: &Dumbbell, title: &str, options: &DumbbellOptions, lost: u32) -> Result<String> {
    let got = dumbbell.run(options, lost)?;
    ensure!(got.looks > 100, "{title}: the queue was looked at too seldom: {got:?}");
    // With pauses there is not always data to send.
    let least = if options.hosts.burst > 0 { 0.7 } else { LEAST };
    ensure!(got.jain >= LEAST && got.utilisation >= least, "{title}: {got:?}");
    ensure!(got.most < 2.2 * MARK && got.marked > 0 && got.dropped == 0, "{title}: {got:?}");
    ensure!(got.losses.is_empty() == (lost == 0), "{title}: lost elsewhere: {got:?}");
    let (sent, came) = (&got.sent["wire_frames_sent"], &got.received["wire_frames_received"]);
    ensure!(sent == came, "{title}: {sent} frames were sent, and {came} came: {got:?}");
    Ok(format!("{title}: Jain {:.2}, {:.2} of the line, {} bytes", got.jain, got.utilisation, got.most))
}
