//! Builds the guest image, boots guests with the device, and tests and measures it there.
//!
//! The crate has two programs: `guest-tests` is for this project, `pvrdma-lab` for other projects, whose programs it
//! runs in guests.

mod agent;
mod bench;
mod cases;
mod cli;
mod cloud_hypervisor;
mod daemon;
mod demo;
mod device_pair;
#[cfg(test)]
mod documents;
mod doorbells;
mod endpoints;
mod guest_with_daemon;
mod host_adapter;
mod image;
mod kvm_bed;
mod kvm_host;
mod kvm_qemu;
mod lab;
mod namespaces;
mod net_peer;
mod pair;
mod played_pair;
mod process;
mod recording;
mod shell;
mod suite;
mod vm;
mod vmm_pair;
mod workflow;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use cli::{Cli, Command};
use image::GuestImage;

/// The program `guest-tests`.
pub fn guest_tests() -> ExitCode {
    init_log();
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", cases::causes(&error));
            ExitCode::FAILURE
        }
    }
}

/// The program `pvrdma-lab`.
pub fn pvrdma_lab() -> ExitCode {
    init_log();
    match lab::LabCli::try_parse() {
        Ok(cli) => lab::run(&cli),
        Err(error) => lab::not_understood(&error),
    }
}

fn init_log() {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Agent => agent::serve()?,
        Command::NetPeer(peer) => net_peer::run(&peer)?,
        Command::Doorbells(options) => doorbells::ring(&options)?,
        Command::HostAdapter(command) => host_adapter::run(&command)?,
        Command::WirePeer(options) => bench::wire::run_peer(&options)?,
        Command::WireInGuest { loss } => bench::wire::run_in_guest(loss)?,
        Command::Dumbbell(options) => bench::wire::dumbbell::run_inside(&options)?,
        Command::DumbbellHosts(options) => bench::wire::dumbbell::run_hosts(&options)?,
        Command::Image => {
            let image = GuestImage::build()?;
            println!("the image is ready in {} ({})", image.directory().display(), image.qemu_version()?);
        }
        Command::Demo { no_speed } => demo::run(&GuestImage::build()?, !no_speed)?,
        Command::Published => {
            let root = daemon::workspace_manifest().context("the workspace this program was built from is gone")?;
            bench::published::draw(&root.with_file_name("docs"))?;
        }
        Command::HoldLastFrame { picture } => recording::hold_last_frame(&picture)?,
        Command::Matrix => print!("{}", cases::matrix::table(&cases::names())),
        Command::Guests { build } => cases::guests::run(&GuestImage::build()?, &build)?,
        Command::Test(options) => return suite::run(&options),
        Command::Bench(options) => bench::run(&options)?,
        Command::Lab(cli) => return Ok(lab::run(&cli)),
        Command::Shell(options) => shell::run(&GuestImage::build()?, &options)?,
    }
    Ok(ExitCode::SUCCESS)
}
