//! The owner of the guest's connections, which makes them on the host.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pvrdma_verbs_types::{Gid, Qpn};

use crate::mad::MAD_LEN;
use crate::message::{RejectReason, Rep};
use crate::req::Req;

/// Events that the owner counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// A connection was established.
    Established,
    /// A request for a connection is invalid.
    Refused,
    /// A request exceeds the number of connections.
    Overflow,
}

/// Queue pairs of a connection that the peer has accepted or asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpBinding {
    /// QP of the guest. `None`: the guest chooses it.
    pub own: Option<Qpn>,
    /// QP of the peer, as the guest knows it.
    pub peer_qpn: Qpn,
    /// Address by which the guest knows the peer.
    pub peer: Gid,
}

/// Progress of an accepted connection on the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accepted {
    /// The host will report the end of the handshake:
    /// [`GuestConnections::accepted`](super::GuestConnections::accepted).
    Pending,
    /// The connection can be used.
    Established,
}

/// The host's side of a guest's connections. Connections have keys, which are the communication IDs of this end.
pub trait HostSide {
    /// Address of the guest, with all that is needed to deliver datagrams to it.
    type Own: Copy;
    /// The host's part of a connection.
    type Part;
    /// Permission to keep the state of a connection.
    type Permit;
    /// Failure of the host.
    type Error;

    /// Returns the GID of an address of the guest.
    fn gid(own: &Self::Own) -> Gid;

    /// Returns a random number, or `None` if there are no random numbers.
    fn random(&mut self) -> Option<u32>;

    /// Counts an event.
    fn count(&self, event: Counted);

    /// Permits to keep another connection. `None`: there is no memory for it.
    fn permit(&mut self) -> Option<Self::Permit>;

    /// Returns `true` if the host may connect the guest to a peer.
    fn reaches(&self, peer: IpAddr) -> bool;

    /// Passes a datagram of `peer` to QP 1 of the guest, or drops it.
    fn deliver(&mut self, own: &Self::Own, peer: Gid, mad: &[u8; MAD_LEN]);

    /// Assigns a QP of the guest to a connection that the guest begins. Returns `false` if there is no such QP, or it
    /// has another connection.
    fn claim(&mut self, qpn: Qpn, key: u32) -> bool;

    /// Assigns a QP of the guest to a connection that the guest accepts. Returns `false` as [`Self::claim`], or if the
    /// guest has moved another one to RTR for it.
    fn claim_prepared(&mut self, qpn: Qpn, key: u32) -> bool;

    /// Begins a connection to a peer.
    ///
    /// # Errors
    /// The connection fails.
    fn connect(
        &mut self,
        now: Duration,
        key: u32,
        own: &Self::Own,
        to: SocketAddr,
        req: &Req,
    ) -> Result<Self::Part, Self::Error>;

    /// Prepares for the guest's change of its QP to RTR. Returns the path MTU, as the number of the specification.
    ///
    /// # Errors
    /// The connection fails.
    fn prepare(&mut self, key: u32, part: &mut Self::Part, binding: QpBinding) -> Result<u8, Self::Error>;

    /// Confirms the peer's acceptance, as the guest has done.
    ///
    /// # Errors
    /// The connection fails.
    fn confirm(&mut self, key: u32, part: &mut Self::Part) -> Result<(), Self::Error>;

    /// Accepts the request of a peer, as the guest has done.
    ///
    /// # Errors
    /// The connection fails.
    fn accept(&mut self, now: Duration, key: u32, part: &mut Self::Part, rep: &Rep) -> Result<Accepted, Self::Error>;

    /// Lets the guest's QP of an accepted connection send.
    fn established(&mut self, key: u32);

    /// Rejects the request or the acceptance of a peer.
    fn reject(&mut self, part: &mut Self::Part, private_data: &[u8]);

    /// Ends a connection, as the guest has done. Returns `true` if the host will report its end.
    fn disconnect(&mut self, key: u32, part: &mut Self::Part) -> bool;

    /// Ends the host's part of a connection, if it still has one.
    fn release(&mut self, key: u32, part: Option<Self::Part>);

    /// Reports that the guest cannot be connected with a peer. Returns the reason for the guest.
    fn failed(&mut self, peer: Gid, error: &Self::Error) -> RejectReason;
}
