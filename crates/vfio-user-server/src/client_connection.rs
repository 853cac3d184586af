//! Description of a client's connection, for its transfer to another server.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// Connection of a client, as one server describes it to another.
#[derive(Debug)]
pub struct ClientConnection {
    /// Socket of the client.
    pub stream: OwnedFd,
    /// The version negotiation has completed.
    pub negotiated: bool,
    /// The client gives up on replies after a timeout.
    pub impatient: bool,
    /// Ranges of bus addresses.
    pub ranges: Vec<ClientRange>,
    /// Files of guest memory, to which the ranges refer by their index.
    pub files: Vec<OwnedFd>,
    /// Targets of the device's interrupts.
    pub interrupts: ClientInterrupts,
}

/// Range of bus addresses of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientRange {
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// `true` if the device may write.
    pub writable: bool,
    /// Memory of the range. `None`: the range is known, but not accessible.
    pub memory: Option<FilePart>,
}

/// Part of a file that a range shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FilePart {
    /// Index in [`ClientConnection::files`].
    pub file: usize,
    /// Offset in the file in bytes.
    pub offset: u64,
}

/// Eventfds of a client, and the state of the legacy interrupt line.
#[derive(Debug, Default)]
pub struct ClientInterrupts {
    /// Eventfds of the MSI-X vectors, by vector.
    pub vectors: Vec<Option<OwnedFd>>,
    /// Eventfd of the error interrupt.
    pub error: Option<OwnedFd>,
    /// Eventfd of the legacy interrupt line.
    pub line: Option<OwnedFd>,
    /// The device asserts the line.
    pub asserted: bool,
    /// The line has been signalled, or masked by the client, and the client has not unmasked it since.
    pub masked: bool,
}
