//! `pvrdma-lab`: runs a command in guests that have RDMA with each other, for tests of other projects' programs.
//!
//! [`guests`] boots them, [`script`] defines the command's environment, [`command`] runs it and passes its output on,
//! [`outcome`] is the resulting exit status, and [`logs`] keeps the logs.

mod cli;
mod command;
mod folder;
mod guests;
mod logs;
mod outcome;
mod script;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::error::ErrorKind;

pub use self::cli::LabCli;
use self::cli::{LabCommand, RunArgs};
use self::guests::Guests;
use self::logs::Logs;
use self::outcome::Outcome;
pub use self::outcome::{LAB_FAILED, TIMED_OUT, VM_FAILED};
use crate::image::GuestImage;

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

fn run_command(args: &RunArgs) -> Result<Outcome> {
    let started = Instant::now();
    // The folder is checked before anything is started, because errors in it are the caller's.
    let folder = folder::of(args)?;
    let variables = script::variables(&args.env)?;
    let image = GuestImage::build()?;
    let deadline = started + Duration::from_secs(args.timeout);
    let mut logs = Logs::new(args.logs.as_deref())?;
    let mut guests = Guests::start(&image, args, folder)?;
    let outcome = match guests.bring_up(deadline) {
        Ok(()) => {
            let seconds = started.elapsed().as_secs_f64();
            eprintln!("pvrdma-lab: {} up after {seconds:.1} s; {}", guests.describe(), args.shown());
            command::run(&guests, args, &variables, &logs, deadline)?
        }
        Err(_) if Instant::now() >= deadline => Outcome::TimedOut(args.timeout),
        Err(error) => Outcome::Vm(crate::causes(&error)),
    };
    logs.keep(&guests, &outcome)?;
    guests.stop();
    Ok(outcome)
}
