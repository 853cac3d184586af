//! `backend-ibverbs` on an adapter of this machine: a guest acts as the host, with `rdma_rxe` as its adapter.

mod bench;
mod cm;
mod daemon;
mod devices;
mod limits;
mod native;
mod nested;
mod pingpong;
mod port_events;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pvrdma_dev::testing::Placement;
use pvrdma_ibverbs::{CmMode, Ibverbs, IbverbsConfig};
use pvrdma_verbs::conformance::{Profile, Subject, cases};

use crate::cli::{HostAdapterCommand, RpingOptions};
use crate::device_pair::{connected, connected_at, connected_mapped_at};

pub(crate) use bench::Measured;
pub(crate) use nested::PROGRAMS as NESTED_PROGRAMS;

/// Deviations of the backend on this adapter, with their causes; see `docs/host-adapter.md`.
const RXE: Profile = Profile {
    // The responder of `rdma_rxe` raises the limit event of SRQs and no other.
    responder_events: false,
    established_event: false,
    // The completions of libibverbs do not report it.
    exact_solicited: false,
    // `rdma_rxe` reports "remote invalid request" and "local QP operation" for length and protection errors.
    receive_errors: false,
    // The posted request contains keys of the host, so the guest's keys are checked before.
    peer_first: false,
    // The host's GID replaces those of guests whose addresses the host does not have.
    guest_addresses: false,
    // Memory windows of type 2B belong to the queue pair that binds them.
    fast_keys_for_all: false,
    ..Profile::FULL
};

/// The same with the guests' addresses on the host's interface.
const RXE_WITH_ADDRESSES: Profile = Profile { guest_addresses: true, ..RXE };

/// All operations, errors and integrity on two devices of a daemon.
pub(crate) fn check_at(sockets: &[PathBuf; 2]) -> Result<()> {
    devices::check(connected_at(sockets, 1 << 20)?)
}

/// Same as [`check_at`] over a wire: connections, with each byte compared.
pub(crate) fn compare_at(sockets: &[PathBuf; 2]) -> Result<()> {
    let [mut a, mut b] = connected_at(sockets, 1 << 20)?;
    devices::integrity(&mut a, &mut b)
}

/// Runs a hidden command.
pub(crate) fn run(command: &HostAdapterCommand) -> Result<()> {
    match command {
        HostAdapterCommand::Conformance { device, only } => {
            conformance(&backend(device)?, RXE, only)?;
            // The rest of the suite does not check addresses.
            conformance(&with_addresses(device)?, RXE_WITH_ADDRESSES, "datagrams::")
        }
        HostAdapterCommand::Devices { device } => {
            devices::check(connected(&backend(device)?, 1 << 20, Placement::Scattered)?)
        }
        HostAdapterCommand::Limits { device } => limits::check(device),
        HostAdapterCommand::PortEvents { device } => port_events::check(&backend(device)?, device),
        HostAdapterCommand::Sockets { sockets, hold, mapped } => {
            let sockets: &[PathBuf; 2] = sockets.as_slice().try_into().context("it takes two sockets")?;
            let connected = if *mapped { connected_mapped_at } else { connected_at };
            let sides = connected(sockets, 1 << 20)?;
            if *hold { devices::hold(sides) } else { devices::check(sides) }
        }
        HostAdapterCommand::Nested(options) => nested::check(options),
        HostAdapterCommand::Pingpong { device, port } => pingpong::client(&backend(device)?, *port),
        HostAdapterCommand::Daemon { device, cm } => daemon::check(device, cm),
        HostAdapterCommand::Rping(options) => cm::run(&everywhere(options)?, options),
        HostAdapterCommand::Bench { device, runs } => bench::run(&backend(device)?, device, *runs),
    }
}

fn backend(device: &str) -> Result<Ibverbs> {
    Ibverbs::new(IbverbsConfig::new(device)).context("backend ibverbs")
}

/// Opens the backend with the addresses of the suite's devices on the host's interface.
fn with_addresses(device: &str) -> Result<Ibverbs> {
    let networks = vec!["10.0.0.0/24".parse().map_err(anyhow::Error::msg)?];
    let config = IbverbsConfig::new(device).with_add_addresses(networks).with_cm(CmMode::Local);
    Ibverbs::new(config).context("backend ibverbs with addresses")
}

/// Opens the backend with a connection manager that may reach every address.
fn everywhere(options: &RpingOptions) -> Result<Ibverbs> {
    let cm = if options.by_host { CmMode::Host } else { CmMode::Umad };
    Ibverbs::new(IbverbsConfig::new(&options.device).with_cm(cm)).context("backend ibverbs")
}

/// Runs every case whose name contains `only`, one after the other, because they share GIDs.
fn conformance(backend: &Ibverbs, profile: Profile, only: &str) -> Result<()> {
    let subject = Subject { backend, profile };
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, case) in cases().into_iter().filter(|(name, _)| name.contains(only)) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&subject)));
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
