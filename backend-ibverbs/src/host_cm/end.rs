//! One connection: the daemon's end toward the guest, and the host's identifier.

use pvrdma_ib_cm::{Connection, Req};
use pvrdma_verbs_types::Gid;

use crate::gid::Bound;
use crate::rdmacm::CmId;

/// Progress of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// The guest's REQ waits for the address and the path of the peer.
    Resolving,
    /// The host has asked the peer.
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
        matches!(self, Self::Resolving | Self::Connecting | Self::Offered | Self::Asking | Self::Accepting)
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct End {
    /// The daemon's end of the connection with the guest.
    pub(super) guest: Connection,
    /// `None` once it is closed.
    pub(super) host: Option<CmId>,
    pub(super) stage: Stage,
    /// Address of the guest.
    pub(super) own: Bound,
    /// Address by which the guest knows the peer.
    pub(super) peer: Gid,
    /// Transaction and REQ of the guest, if it began the connection.
    pub(super) request: Option<(u64, Box<Req>)>,
}
