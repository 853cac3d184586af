//! Runs cases one after the other and keeps the pair usable between them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
pub(crate) use pvrdma_lab::causes;

use super::case::{Body, Case, InPair, Skipped};
use super::kernel_log;
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::times::Times;

/// Number of tests by result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tests that passed.
    pub(crate) passed: u64,
    /// Tests that failed.
    pub(crate) failed: u64,
    /// Tests that could not run here.
    pub(crate) skipped: u64,
    /// Names of tests that failed, with the cause where it is known.
    pub(crate) failures: Vec<String>,
    /// Times of tests that ran.
    pub(crate) times: Times,
}

impl Tally {
    /// Adds another tally.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
        self.times.extend(other.times);
    }
}

/// Boots a pair and runs the cases in it. A pair that a failed case has left unusable is replaced. Each case is dropped
/// when it is done, and shared machines are dropped with the last of their cases.
pub(crate) fn run_cases(image: &GuestImage, options: &PairOptions, kind: LinkKind, cases: Vec<Case>) -> Tally {
    let mut tally = Tally::default();
    let mut pair: Option<Pair> = None;
    // A device that does not come up fails every case. A second attempt rules out a sporadic failure.
    let mut boot_failures = 0;
    for case in cases {
        let started = Instant::now();
        let result = (|| {
            let run = match &case.body {
                Body::InPair(run) => run,
                Body::Alone(run) => return run(image),
            };
            let pair = match &mut pair {
                Some(pair) => pair,
                slot => {
                    if boot_failures >= 2 {
                        return Err(anyhow!("not run: the guests cannot be booted, see above"));
                    }
                    slot.insert(boot(image, options).inspect_err(|_| boot_failures += 1)?)
                }
            };
            run_in_pair(&case, run, pair, kind)
        })();
        let time = started.elapsed();
        let seconds = time.as_secs_f64();
        if !result.as_ref().is_err_and(|error| error.is::<Skipped>()) {
            tally.times.push(&*case.name, time);
        }
        match result {
            Ok(note) => {
                tally.passed += 1;
                println!("ok    {:<44} {seconds:6.1} s  {note}", case.name);
            }
            Err(error) if error.downcast_ref::<Skipped>().is_some() => {
                tally.skipped += 1;
                println!("skip  {:<44} {error}", case.name);
            }
            Err(error) => {
                tally.failed += 1;
                // The summary has one line for each failure, so the whole text is printed here.
                let cause = error.root_cause().to_string();
                tally.failures.push(format!("{}: {}", case.name, cause.lines().next_back().unwrap_or_default()));
                let mut text = format!("FAIL  {:<44} {seconds:6.1} s\n{}", case.name, indented(&causes(&error)));
                if let Some(broken) = pair.take_if(|pair| !is_healthy(pair, kind)) {
                    text += &indented(&broken.diagnosis());
                    text += "      the guests are replaced";
                }
                // Printed in one piece, because another lane prints, too.
                println!("{text}");
            }
        }
    }
    tally
}

fn boot(image: &GuestImage, options: &PairOptions) -> Result<Pair> {
    let started = Instant::now();
    let pair = Pair::boot(image, options).context("cannot boot two guests")?;
    println!("      two guests are up after {:.1} s", started.elapsed().as_secs_f64());
    for vm in pair.vms() {
        let warnings = kernel_log::take_warnings(vm)?;
        if !warnings.is_empty() {
            return Err(anyhow!("{}: kernel warnings at boot:\n{}", vm.name(), warnings.join("\n")));
        }
    }
    Ok(pair)
}

/// Runs one case in a pair, checks the kernel logs, and ends all programs.
pub(crate) fn run_single(case: &Case, pair: &mut Pair, kind: LinkKind) -> Result<String> {
    match &case.body {
        Body::InPair(run) => run_in_pair(case, run, pair, kind),
        Body::Alone(_) => Err(anyhow!("{} is no test in a pair", case.name)),
    }
}

fn run_in_pair(case: &Case, run: &InPair, pair: &mut Pair, kind: LinkKind) -> Result<String> {
    let link = pair.link(kind)?;
    let result = run(pair, &link);
    for vm in pair.vms() {
        if vm.is_running() {
            vm.kill_jobs()?;
        }
    }
    let note = result?;
    if !case.ignore_kernel_log {
        for vm in pair.vms() {
            let warnings = kernel_log::take_warnings(vm)?;
            if !warnings.is_empty() {
                return Err(anyhow!("{}: kernel warnings:\n{}", vm.name(), warnings.join("\n")));
            }
        }
    }
    Ok(note)
}

fn is_healthy(pair: &Pair, kind: LinkKind) -> bool {
    let alive = pair.vms().iter().all(|vm| {
        // The log is cleared, so that its messages are not attributed to the next case.
        vm.is_running() && vm.exec("dmesg --clear", Duration::from_secs(15)).is_ok_and(|output| output.code == 0)
    });
    alive && pair.link(kind).is_ok()
}

fn indented(text: &str) -> String {
    let mut out = String::new();
    // perftest prints two lines per queue pair, which do not explain a failure.
    let noise = |line: &&str| line.contains("address: LID") || line.starts_with(" GID: ");
    for line in text.lines().filter(|line| !noise(line)) {
        out.push_str("      | ");
        out.push_str(line);
        out.push('\n');
    }
    out
}
