//! Sandbox profiles.

use clap::ValueEnum;

/// Adapter with which the process serves a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Profile {
    /// The software adapter. It opens nothing, and sends only to the peers of connected sockets.
    Rxe,
    /// The software adapter with links that name a destination in the system calls that send frames (VXLAN, packet
    /// sockets).
    RxeAddressed,
    /// The host's adapter. libibverbs reads its configuration and `/sys`, and opens the adapter's device nodes whenever
    /// a guest's driver starts.
    Ibverbs,
}

impl Profile {
    /// Returns the word for the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Rxe => "rxe",
            Self::RxeAddressed => "rxe-addressed",
            Self::Ibverbs => "ibverbs",
        }
    }
}

/// Action for a system call that a filter does not permit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// The call fails with EPERM.
    Refuse,
    /// The kernel kills the process with SIGSYS. Tests use this to find calls that a filter should permit.
    Kill,
}
