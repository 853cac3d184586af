//! One connection of a guest.

use pvrdma_verbs_types::Gid;

use super::host_side::HostSide;
use crate::connection::Connection;
use crate::req::Req;

/// Progress of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The guest's REQ waits for the peer.
    Connecting,
    /// The peer has accepted. The guest has the REP.
    Offered,
    /// The guest has the REQ of a peer.
    Asking,
    /// The guest has accepted, and the host has been told.
    Accepting,
    /// The connection can be used.
    Established,
    /// The guest has ended the connection; the host has been told.
    Closing,
    /// The host's part is gone. Late messages of the guest are answered.
    Closed,
}

impl Stage {
    /// Returns `true` until the connection is established or has failed.
    pub(super) const fn in_progress(self) -> bool {
        matches!(self, Self::Connecting | Self::Offered | Self::Asking | Self::Accepting)
    }
}

/// A connection.
pub(super) struct End<H: HostSide> {
    /// This end of the connection with the guest.
    pub(super) guest: Connection,
    /// `None` once it is released.
    pub(super) part: Option<H::Part>,
    pub(super) stage: Stage,
    /// Address of the guest.
    pub(super) own: H::Own,
    /// Address by which the guest knows the peer.
    pub(super) peer: Gid,
    /// Transaction and REQ of the guest, if it began the connection.
    pub(super) request: Option<(u64, Box<Req>)>,
    pub(super) _permit: H::Permit,
}
