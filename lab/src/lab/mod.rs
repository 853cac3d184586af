//! `pvrdma-lab`: runs a command in guests that have RDMA with each other, for tests of other projects' programs.
//!
//! [`guests`] boots the [`system`], [`script`] defines the command's environment, and [`enter`] takes it into the
//! caller's own system. [`command`] runs the command, or each program of a [`suite`], and passes its output on.
//! [`outcome`] is the resulting exit status, [`report`] has the results, and [`logs`] keeps the logs.

mod cli;
mod command;
mod enter;
mod folder;
mod guests;
mod logs;
mod outcome;
mod report;
mod script;
mod suite;
mod system;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::error::ErrorKind;

pub use self::cli::LabCli;
use self::cli::{LabCommand, RunArgs};
use self::command::Runner;
use self::guests::Guests;
use self::logs::{Logs, removed};
use self::outcome::Outcome;
pub use self::outcome::{LAB_FAILED, TIMED_OUT, VM_FAILED};
use self::report::{Annotations, End, Report};
use self::suite::Case;
use self::system::System;
use crate::image::GuestImage;
use crate::vm::Folder;
use crate::{interrupt, process};

/// Runs the requested subcommand.
pub fn run(cli: &LabCli) -> ExitCode {
    let outcome = match &cli.command {
        LabCommand::Run(args) => run_command(args),
        LabCommand::Bed => bed(),
        LabCommand::Pack { folder } => pack(folder),
        LabCommand::Agent => crate::agent::serve().map(|()| Outcome::Ended(0)),
    };
    let outcome = outcome.unwrap_or_else(Outcome::Lab);
    if let Some(said) = outcome.message() {
        eprintln!("pvrdma-lab: {said}");
    }
    outcome.exit_code()
}

/// Returns the exit status for an invalid command line: it must not be mistaken for the command's status.
pub fn not_understood(error: &clap::Error) -> ExitCode {
    // A failure to print cannot be reported anywhere.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(LAB_FAILED),
    }
}

fn bed() -> Result<Outcome> {
    let image = GuestImage::build()?;
    eprintln!("pvrdma-lab: the guest bed is in {} ({})", image.directory().display(), image.qemu_version()?);
    Ok(Outcome::Ended(0))
}

fn pack(folder: &Path) -> Result<Outcome> {
    GuestImage::build()?.copy_to(folder)?;
    Ok(Outcome::Ended(0))
}

/// A run before its guests start.
struct Run<'a> {
    args: &'a RunArgs,
    started: Instant,
    folder: Folder,
    variables: Vec<(String, String)>,
    cases: Vec<Case>,
    report: Report,
}

fn run_command(args: &RunArgs) -> Result<Outcome> {
    let started = Instant::now();
    // The arguments are checked before anything is started, because errors in them are the caller's.
    let folder = folder::of(args)?;
    let variables = script::variables(&args.env)?;
    let cases = suite::cases(args, &folder.path)?;
    let report = Report::default();
    if let Some(path) = &args.junit {
        report.write_junit(path)?;
    }
    let mut run = Run { args, started, folder, variables, cases, report };
    let outcome = run.outcome().unwrap_or_else(Outcome::Lab);
    let is_known = run.report.results.iter().any(|result| matches!(result.end, End::Lost(_)));
    if !matches!(outcome, Outcome::Ended(_)) && !is_known {
        run.report.problem = outcome.message();
        if let Some(problem) = run.report.problem.as_ref().filter(|_| args.has_annotations()) {
            print!("{}", Annotations::of_problem(problem));
        }
    }
    if let Some(path) = &args.junit {
        run.report.write_junit(path)?;
    }
    Ok(outcome)
}

impl Run<'_> {
    /// Boots the guests, runs the command, and removes everything that it has created.
    fn outcome(&mut self) -> Result<Outcome> {
        let system = System::build(self.args)?;
        interrupt::catch(process::kill_all)?;
        let mut logs = Logs::new(self.args.logs.as_deref())?;
        let directory = tempfile::Builder::new().prefix("pvrdma-lab-").tempdir();
        let directory = directory.context("cannot create a directory for the machines' sockets")?;
        eprintln!("pvrdma-lab: starting (--vms {}) in {}", self.args.vms, directory.path().display());
        let outcome = self.in_guests(&system, &mut logs, directory.path());
        let Some(status) = interrupt::status() else { return outcome };
        let removed: Vec<_> = [removed(directory), logs.remove()].into_iter().flatten().collect();
        let removed: Vec<_> = removed.iter().map(|path| path.display().to_string()).collect();
        Ok(Outcome::Interrupted(status, format!("ended all guests and the daemon, removed {}", removed.join(" and "))))
    }

    /// Starts the guests, runs everything in them, and stops them.
    fn in_guests(&mut self, system: &System, logs: &mut Logs, directory: &Path) -> Result<Outcome> {
        let args = self.args;
        let tree = system::callers_tree(args, directory)?;
        let deadline = Instant::now() + Duration::from_secs(args.timeout);
        let mut guests = Guests::start(system, tree, args, self.folder.clone(), directory)?;
        let outcome = match guests.bring_up(deadline) {
            Ok(()) => {
                let seconds = self.started.elapsed().as_secs_f64();
                eprintln!("pvrdma-lab: {} up after {seconds:.1} s; {}", guests.describe(), args.shown());
                let runner = Runner { guests: &guests, args, variables: &self.variables, logs, deadline };
                runner.run(&self.cases, &mut self.report)?
            }
            Err(_) if Instant::now() >= deadline => Outcome::TimedOut(args.timeout),
            Err(error) => Outcome::Vm(crate::causes(&error)),
        };
        logs.keep(&guests, &outcome)?;
        Ok(outcome)
    }
}
