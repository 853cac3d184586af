//! Sandbox profiles.

use clap::ValueEnum;

/// What the process serves a network with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Profile {
    /// The software adapter: it opens nothing, and sends to the peers of connected sockets.
    Rxe,
    /// The same with frames that are sent to addresses, by VXLAN or a packet socket.
    RxeAddressed,
    /// The host's adapter: libibverbs reads its configuration and `/sys` and opens the adapter's device nodes whenever
    /// a guest's driver starts.
    Ibverbs,
}

impl Profile {
    /// The word for it on a command line.
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
    /// The kernel kills the process with SIGSYS: for tests, which find calls that a filter lacks by this.
    Kill,
}
