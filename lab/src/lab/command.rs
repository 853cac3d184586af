//! Runs programs in the guests: their output and their end.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cli::{Place, RunArgs};
use super::guests::Guests;
use super::logs::Logs;
use super::outcome::Outcome;
use super::report::{Annotations, End, GuestResult, Report};
use super::suite::{Case, SKIPPED};
use crate::vm::{Job, Vm};

/// Interval at which a silent guest is checked.
const LOOK: Duration = Duration::from_millis(500);

/// End of a command in a guest.
#[derive(Debug)]
enum Ended {
    Status(u8),
    /// It ended with the guest, for this reason.
    Guest(&'static str),
    /// It was told to stop.
    Stopped,
    /// Its output cannot be passed on.
    Output(io::Error),
}

/// Guests and everything that a program in them needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Runner<'a> {
    pub guests: &'a Guests,
    pub args: &'a RunArgs,
    pub variables: &'a [(String, String)],
    pub logs: &'a Logs,
    pub deadline: Instant,
}

impl Runner<'_> {
    /// Runs all programs, one after the other, and reports each. The outcome is that of the first failure.
    ///
    /// # Errors
    /// A program cannot be started, or its output cannot be passed on.
    pub(super) fn run(self, cases: &[Case], report: &mut Report) -> Result<Outcome> {
        let mut first = Outcome::Ended(0);
        for case in cases {
            let (outcome, results) = self.run_case(case)?;
            for result in results {
                if self.args.has_annotations() {
                    print_group(&result)?;
                }
                if case.is_of_suite {
                    eprintln!("pvrdma-lab: {}: {} {}", result.guest, result.case, result.end);
                }
                report.results.push(result);
            }
            let is_last = !matches!(outcome, Outcome::Ended(_));
            if first.is_success() {
                first = outcome;
            } else if is_last {
                eprintln!("pvrdma-lab: {}", outcome.message().unwrap_or_default());
            }
            if is_last {
                break;
            }
        }
        Ok(first)
    }

    /// Runs a program and passes its output on.
    fn run_case(self, case: &Case) -> Result<(Outcome, Vec<GuestResult>)> {
        let count = if self.args.on == Place::First { 1 } else { self.guests.vms().len() };
        let mut running = Vec::new();
        for (number, vm) in self.guests.vms().iter().take(count).enumerate() {
            let text = self.guests.script(number, self.variables, &case.command);
            let path = self.logs.path(&case.log_name(vm.name()));
            let log = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
            let live = match count {
                _ if self.args.has_annotations() => Live::Later,
                1 => Live::AsItIs,
                _ => Live::Prefixed(format!("{}: ", vm.name())),
            };
            running.push((path, vm, vm.spawn(&text)?, Output { live, line: Vec::new(), log }));
        }
        let paths: Vec<_> = running.iter().map(|(path, ..)| path.clone()).collect();
        let (started, stop) = (Instant::now(), AtomicBool::new(false));
        let (sender, endings) = channel();
        thread::scope(|scope| {
            for (number, (_, vm, job, mut output)) in running.into_iter().enumerate() {
                let (stop, sender) = (&stop, sender.clone());
                scope.spawn(move || follow(vm, &job, &mut output, stop, &|how| send(&sender, number, how)));
            }
            drop(sender);
            Ok(self.collect(case, &endings, &stop, started, &paths))
        })
    }

    /// Waits for the end of a program in all guests. The first failure ends it in the others, which most likely wait
    /// for a peer that is gone; the thread that follows each of them kills it.
    fn collect(
        self,
        case: &Case,
        endings: &Receiver<(usize, Ended)>,
        stop: &AtomicBool,
        started: Instant,
        paths: &[PathBuf],
    ) -> (Outcome, Vec<GuestResult>) {
        let (mut outcome, mut results) = (Outcome::Ended(0), Vec::new());
        while results.len() < paths.len() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let is_stopping = stop.load(Ordering::Acquire);
            // All threads end soon when they are told to stop.
            let ending = if is_stopping { endings.recv().ok() } else { endings.recv_timeout(left).ok() };
            let Some((number, ended)) = ending else {
                if is_stopping {
                    break;
                }
                outcome = Outcome::TimedOut(self.args.timeout);
                stop.store(true, Ordering::Release);
                continue;
            };
            let (Some(vm), Some(output)) = (self.guests.vms().get(number), paths.get(number)) else { break };
            let end = match ended {
                Ended::Status(0) => End::Passed,
                Ended::Status(SKIPPED) if case.is_of_suite => End::Skipped,
                Ended::Status(status) => End::Failed(status),
                Ended::Guest(how) => End::Lost(how.to_owned()),
                Ended::Output(ref error) => End::Lost(format!("its output cannot be passed on: {error}")),
                Ended::Stopped => End::Stopped,
            };
            if end != End::Passed && !is_stopping {
                outcome = match ended {
                    Ended::Status(status) if end == End::Failed(status) => Outcome::Ended(status),
                    Ended::Guest(how) => Outcome::Vm(format!("{}: {how}", vm.name())),
                    Ended::Output(error) => {
                        Outcome::Lab(anyhow::Error::new(error).context(format!("the output of {}", vm.name())))
                    }
                    Ended::Status(_) | Ended::Stopped => Outcome::Ended(0),
                };
                stop.store(true, Ordering::Release);
            }
            results.push(GuestResult::new(vm.name(), &case.name, end, started.elapsed(), output));
        }
        results.sort_by(|one, other| one.output.cmp(&other.output));
        (outcome, results)
    }
}

/// Reports an end. The receiver is gone only if the run is.
fn send(sender: &Sender<(usize, Ended)>, number: usize, how: Ended) {
    let _ = sender.send((number, how));
}

/// Prints the output of a program in a guest as a group, and its result as an annotation.
fn print_group(result: &GuestResult) -> Result<()> {
    let (begin, end) = Annotations::group(result);
    let text = std::fs::read(&result.output).with_context(|| format!("cannot read {}", result.output.display()))?;
    let mut out = io::stdout().lock();
    let mut print = || {
        out.write_all(begin.as_bytes())?;
        out.write_all(&text)?;
        if !text.is_empty() && !text.ends_with(b"\n") {
            out.write_all(b"\n")?;
        }
        out.write_all(end.as_bytes())?;
        out.write_all(Annotations::of(result).unwrap_or_default().as_bytes())?;
        out.flush()
    };
    print().context("cannot print a result")
}

/// Passes on the output of a command until it ends.
fn follow(vm: &Vm, job: &Job, output: &mut Output, stop: &AtomicBool, ended: &dyn Fn(Ended)) {
    let how = loop {
        let (text, status) = job.take(LOOK);
        if let Err(error) = output.take(text.as_bytes()) {
            break Ended::Output(error);
        }
        match status {
            Some(..0) => break Ended::Guest("it rebooted, or could not start the command"),
            Some(status) => break Ended::Status(u8::try_from(status).unwrap_or(u8::MAX)),
            None if stop.load(Ordering::Acquire) => break Ended::Stopped,
            None if !vm.is_running() => break Ended::Guest("QEMU has ended"),
            None if text.is_empty() && vm.has_panicked() => break Ended::Guest("its kernel has panicked"),
            None => {}
        }
    };
    // A failure to write the last partial line is not reported.
    let _ = output.end();
    ended(how);
}

/// Part of a command's output that is printed while it runs.
#[derive(Debug)]
enum Live {
    AsItIs,
    /// Whole lines, with the guest's name.
    Prefixed(String),
    /// Nothing: it is printed as a group at the end.
    Later,
}

/// Output of a command: to standard output and to a log.
struct Output {
    live: Live,
    /// The beginning of a line.
    line: Vec<u8>,
    log: File,
}

impl Output {
    fn take(&mut self, text: &[u8]) -> io::Result<()> {
        self.log.write_all(text)?;
        let mut out = io::stdout().lock();
        let prefix = match &self.live {
            Live::AsItIs => {
                out.write_all(text)?;
                return out.flush();
            }
            Live::Prefixed(prefix) => prefix,
            Live::Later => return Ok(()),
        };
        for piece in text.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.ends_with(b"\n") {
                out.write_all(prefix.as_bytes())?;
                out.write_all(&self.line)?;
                self.line.clear();
            }
        }
        out.flush()
    }

    fn end(&mut self) -> io::Result<()> {
        if self.line.is_empty() { Ok(()) } else { self.take(b"\n") }
    }
}
