//! `backend-ibverbs` on an adapter of this machine: a guest plays the host, and its `rdma_rxe` the adapter.

mod bench;
mod cm;
mod daemon;
mod devices;
mod limits;
mod nested;
mod pingpong;
mod port_events;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pvrdma_dev::testing::Placement;
use pvrdma_ibverbs::{CmMode, Ibverbs, IbverbsConfig};
use pvrdma_verbs::conformance::{Bed, Profile, cases};

use crate::cli::HostAdapterCommand;
use crate::device_pair::{connected, connected_at};

pub(crate) use bench::Measured;

/// What `rdma_rxe` and the library of the host leave out.
const RXE: Profile = Profile {
    responder_events: false,
    established_event: false,
    exact_solicited: false,
    receive_errors: false,
    guest_addresses: false,
    fast_keys_for_all: false,
    ..Profile::FULL
};

/// Does what a hidden command says.
pub(crate) fn run(command: &HostAdapterCommand) -> Result<()> {
    match command {
        HostAdapterCommand::Conformance { device, only } => conformance(&backend(device)?, only),
        HostAdapterCommand::Devices { device } => {
            devices::check(connected(&backend(device)?, 1 << 20, Placement::Scattered)?)
        }
        HostAdapterCommand::Limits { device } => limits::check(device),
        HostAdapterCommand::PortEvents { device } => port_events::check(&backend(device)?, device),
        HostAdapterCommand::Sockets { sockets, hold } => {
            let sockets: &[PathBuf; 2] = sockets.as_slice().try_into().context("it takes two sockets")?;
            let sides = connected_at(sockets, 1 << 20)?;
            if *hold { devices::hold(sides) } else { devices::check(sides) }
        }
        HostAdapterCommand::Nested(options) => nested::check(options),
        HostAdapterCommand::Pingpong { device, port } => pingpong::client(&backend(device)?, *port),
        HostAdapterCommand::Daemon { device, cm } => daemon::check(device, cm),
        HostAdapterCommand::Rping(options) => cm::run(&everywhere(&options.device)?, options),
        HostAdapterCommand::Bench { device, runs } => bench::run(&backend(device)?, device, *runs),
    }
}

fn backend(device: &str) -> Result<Ibverbs> {
    Ibverbs::new(IbverbsConfig::new(device)).context("backend ibverbs")
}

/// The same, with a connection manager that reaches everybody.
fn everywhere(device: &str) -> Result<Ibverbs> {
    Ibverbs::new(IbverbsConfig { cm: CmMode::Umad, ..IbverbsConfig::new(device) }).context("backend ibverbs")
}

/// Every case, one after the other: they share GIDs.
fn conformance(backend: &Ibverbs, only: &str) -> Result<()> {
    let bed = Bed { backend, profile: RXE };
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, case) in cases().into_iter().filter(|(name, _)| name.contains(only)) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&bed)));
        let seconds = start.elapsed().as_secs_f64();
        if outcome.is_ok() {
            println!("{name}: ok ({seconds:.2} s)");
            passed += 1;
        } else {
            println!("{name}: FAILED ({seconds:.2} s)");
            failed.push(name);
        }
    }
    println!("{passed} passed");
    if !failed.is_empty() {
        bail!("{} failed: {}", failed.len(), failed.join(", "));
    }
    Ok(())
}
