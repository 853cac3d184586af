//! Kinds of threads.

use std::fmt;

/// Purpose of a thread. It determines the thread's system call filter and the effect of its panic.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ThreadKind {
    /// Main thread of a process that serves a network; not started by [`threads::spawn`](crate::threads::spawn).
    Main,
    /// Starts all other threads.
    Launcher,
    /// Answers the control socket, restarts networks and waits for signals.
    Supervisor,
    /// Accepts the clients of a device.
    Accept,
    /// Serves the client of a device and executes the guest's commands.
    Connection,
    /// Polls the rings of a device whose doorbells are not trapped.
    Doorbells,
    /// Reports accesses to doorbell pages.
    DoorbellPages,
    /// Locks guest memory.
    Pin,
    /// Delivers a device's interrupts where the delivery may block.
    Interrupts,
    /// Writes a capture file.
    Capture,
    /// Runs tasks of the software adapter.
    Engine,
    /// Serves the links of a device.
    Port,
    /// Distributes the frames of a link that several devices share.
    Switch,
    /// Authenticates the other end of a link.
    Handshake,
    /// Receives completions and events of the host's adapter.
    HostEvents,
    /// Sends or receives management datagrams on the host's adapter, or resolves peers.
    HostManagement,
}

impl ThreadKind {
    /// All kinds of threads.
    pub const ALL: [Self; 16] = [
        Self::Main,
        Self::Launcher,
        Self::Supervisor,
        Self::Accept,
        Self::Connection,
        Self::Doorbells,
        Self::DoorbellPages,
        Self::Pin,
        Self::Interrupts,
        Self::Capture,
        Self::Engine,
        Self::Port,
        Self::Switch,
        Self::Handshake,
        Self::HostEvents,
        Self::HostManagement,
    ];

    /// Returns one word for tables and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Launcher => "launcher",
            Self::Supervisor => "supervisor",
            Self::Accept => "accept",
            Self::Connection => "connection",
            Self::Doorbells => "doorbells",
            Self::DoorbellPages => "doorbell-pages",
            Self::Pin => "pin",
            Self::Interrupts => "interrupts",
            Self::Capture => "capture",
            Self::Engine => "engine",
            Self::Port => "port",
            Self::Switch => "switch",
            Self::Handshake => "handshake",
            Self::HostEvents => "host-events",
            Self::HostManagement => "host-management",
        }
    }
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = ThreadKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), ThreadKind::ALL.len());
    }
}
