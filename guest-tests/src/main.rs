//! Builds the guest bed, boots guests with the device, and tests and measures it there.

mod agent;
mod bed;
mod bench;
mod cli;
mod daemon;
mod demo;
mod ends;
mod hca;
mod host;
mod jobs;
mod namespaces;
mod pair;
mod process;
mod shell;
mod suite;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use bed::Bed;
use cli::{Cli, Command};

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", jobs::causes(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Agent => agent::serve()?,
        Command::Hca(command) => hca::run(&command)?,
        Command::WirePeer(options) => bench::wire::run_peer(&options)?,
        Command::WireInGuest { loss } => bench::wire::run_in_guest(loss)?,
        Command::UdpPeer(options) => bench::wire::run_udp_peer(&options)?,
        Command::Bed => {
            let bed = Bed::build()?;
            println!("the bed is ready in {} ({})", bed.directory().display(), bed.qemu_version()?);
        }
        Command::Demo => demo::run(&Bed::build()?)?,
        Command::Test(options) => return suite::run(&options),
        Command::Bench(options) => bench::run(&options)?,
        Command::Shell(options) => shell::run(&Bed::build()?, &options)?,
    }
    Ok(ExitCode::SUCCESS)
}
