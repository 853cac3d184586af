//! `pvrdmad`: see the library.

use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result};
use clap::Parser;
use env_logger::Env;
use log::info;
use pvrdmad::capture;
use pvrdmad::cli::{CaptureArgs, Cli, Command, ServeArgs, StatusArgs};
use pvrdmad::config::Config;
use pvrdmad::control;
use pvrdmad::daemon::Daemon;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Status(args)) => status(&args),
        Some(Command::Capture(args)) => capture(&args),
        None => serve(cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvrdmad: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: ServeArgs) -> Result<()> {
    env_logger::Builder::from_env(Env::default().default_filter_or("info")).init();
    let (file, command_line) = args.into_parts();
    let config = Config::load(file.as_deref(), command_line)?;
    // Before the first socket exists, so that none is left behind.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("signal handlers")?;
    let daemon = Daemon::start(&config, &mut io::stdout())?;
    signals.forever().next();
    info!("stopping");
    // Whoever asks twice does not want to wait.
    thread::spawn(move || {
        signals.forever().next();
        std::process::exit(1);
    });
    drop(daemon);
    Ok(())
}

fn status(args: &StatusArgs) -> Result<()> {
    let status = control::ask_status(&args.control)?;
    let text = if args.json { serde_json::to_string_pretty(&status)? + "\n" } else { status.render() };
    io::stdout().write_all(text.as_bytes()).context("standard output")
}

fn capture(args: &CaptureArgs) -> Result<()> {
    let frames = capture::client::run(args)?;
    // Standard output may be the capture.
    eprintln!("{frames} frames");
    Ok(())
}
