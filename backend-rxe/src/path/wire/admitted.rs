//! Result of the checks of a flow of received packets.

/// Packets of a flow that a device accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Admitted {
    /// All.
    All,
    /// Those of connections. The sender is a device of this process, which reaches everything else by local delivery.
    /// A queue pair without a connection on the wire drops the packets itself, because it has no path to the sender.
    Connections,
}
