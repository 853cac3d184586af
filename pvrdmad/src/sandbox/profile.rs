//! What a process is confined to.

/// What the process serves a network with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Profile {
    /// The software adapter: nothing is opened, no socket made.
    Rxe {
        /// Frames are sent to addresses, by VXLAN or a packet socket. Where none are, a socket reaches only what it is
        /// connected to.
        addressed: bool,
    },
    /// The host's adapter: libibverbs reads its configuration and `/sys` and opens the adapter's device nodes whenever
    /// a guest's driver starts.
    Ibverbs,
}

/// What becomes of a system call that a filter does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// It fails with EPERM.
    Refuse,
    /// The kernel kills the process with SIGSYS: for tests, which so find what a filter lacks.
    Kill,
}
