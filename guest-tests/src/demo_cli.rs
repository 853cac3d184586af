//! The command line of the demo.

use clap::{Args, Parser};

/// The command line of the program `guest-tests-demo`.
#[derive(Debug, Parser)]
#[command(name = "guest-tests")]
pub(crate) enum DemoCli {
    /// Boot two guests, run the RDMA programs between them, and print the results.
    Demo(DemoOptions),
    /// The program's other half, started by the guest's init.
    #[command(hide = true)]
    Agent,
}

/// Options of `demo`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DemoOptions {
    /// Leave out measurements.
    #[arg(long)]
    pub(crate) no_speed: bool,
    /// Build everything that the demo needs, and boot no guests.
    #[arg(long)]
    pub(crate) prepare: bool,
}
