//! Boots guests with the device, and tests and measures it there.
//!
//! The package has three programs. `guest-tests` builds one of the others and becomes it: `guest-tests-demo`, which
//! needs few crates, or `guest-tests-suite`, which is everything else. `pvrdma-lab` builds the guest image and runs
//! machines.
#![cfg(feature = "demo")]
#![cfg_attr(not(feature = "suite"), expect(dead_code, reason = "the demo needs a part of the cases"))]

#[cfg(feature = "suite")]
mod bench;
mod cases;
#[cfg(feature = "suite")]
mod cli;
mod cloud_hypervisor;
mod demo;
mod demo_cli;
#[cfg(feature = "suite")]
mod device_pair;
#[cfg(test)]
mod documents;
#[cfg(feature = "suite")]
mod doorbells;
#[cfg(feature = "suite")]
mod fabric;
mod guest_with_daemon;
#[cfg(feature = "suite")]
mod host_adapter;
#[cfg(feature = "suite")]
mod iwarp_peer;
mod kvm_bed;
mod kvm_host;
mod kvm_qemu;
mod namespaces;
#[cfg(feature = "suite")]
mod net_peer;
mod pair;
mod played_pair;
#[cfg(feature = "suite")]
mod recording;
#[cfg(feature = "suite")]
mod shell;
#[cfg(feature = "suite")]
mod suite;
mod times;
#[cfg(feature = "suite")]
mod upstream;
mod vmm_pair;
#[cfg(feature = "suite")]
mod workflow;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
#[cfg(feature = "suite")]
use pvrdma_lab::lab;
use pvrdma_lab::{agent, daemon, endpoints, image, process, vm};

use demo_cli::DemoCli;

/// The program `guest-tests-demo`.
pub fn guest_tests_demo() -> ExitCode {
    finish(|| match DemoCli::parse() {
        DemoCli::Demo(options) => demo::run_from_sources(&options).map(|()| ExitCode::SUCCESS),
        DemoCli::Agent => agent::serve().map(|()| ExitCode::SUCCESS),
    })
}

/// The program `guest-tests-suite`.
#[cfg(feature = "suite")]
pub fn guest_tests_suite() -> ExitCode {
    finish(|| run(cli::Cli::parse()))
}

/// Runs a program and reports its error.
fn finish(run: impl FnOnce() -> Result<ExitCode>) -> ExitCode {
    pvrdma_lab::init_log();
    run().unwrap_or_else(|error| {
        eprintln!("error: {}", pvrdma_lab::causes(&error));
        ExitCode::FAILURE
    })
}

#[cfg(feature = "suite")]
fn run(cli: cli::Cli) -> Result<ExitCode> {
    use anyhow::Context;

    use cli::Command;
    use image::GuestImage;

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
        Command::Demo(options) => demo::run_from_sources(&options)?,
        Command::Published => {
            let root = daemon::workspace_manifest().context("the workspace this program was built from is gone")?;
            bench::published::draw(&root.with_file_name("docs"))?;
        }
        Command::HoldLastFrame { picture, result } => recording::hold_last_frame(&picture, &result)?,
        Command::Suites { records } => {
            let root = daemon::workspace_manifest().context("the workspace this program was built from is gone")?;
            upstream::take(&root.with_file_name("docs"), &records)?;
        }
        Command::Matrix => print!("{}", cases::matrix::table(&cases::names())),
        Command::Guests { build } => cases::guests::run(&GuestImage::build()?, &build)?,
        Command::Test(options) => return suite::run(&options),
        Command::Bench(options) => bench::run(&options)?,
        Command::Lab(cli) => return Ok(lab::run(&cli)),
        Command::Shell(options) => shell::run(&GuestImage::build()?, &options)?,
    }
    Ok(ExitCode::SUCCESS)
}
