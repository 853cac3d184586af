//! Reasons why a queue pair sends nothing.

use pvrdma_pacing::Stop;
use pvrdma_roce::SendWait;
use serde::Serialize;

/// Reason why a queue pair with requests sends nothing. The last run of its requester records it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SendGate {
    /// As many packets are in flight as its window allows.
    Window,
    /// As many packets are in flight to the peer as the window of all connections to it allows.
    PeerWindow,
    /// Its rate, which congestion notifications of the peer have reduced.
    Pacing,
    /// A quiet period for another connection to the peer.
    Quiet,
    /// The link has no room.
    LinkFull,
    /// The rate limit of the device.
    DeviceRate,
    /// The rate limit of the queue pair.
    QpRate,
    /// The peer has no receive.
    RnrWait,
    /// Everything was sent, and is not acknowledged.
    AckWait,
    /// The peer is paused.
    PeerPaused,
    /// A fault on request delays the next request.
    Delay,
}

impl From<Stop> for SendGate {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Quiet => Self::Quiet,
            Stop::PeerWindow => Self::PeerWindow,
            Stop::Rate => Self::Pacing,
        }
    }
}

impl From<SendWait> for SendGate {
    fn from(wait: SendWait) -> Self {
        match wait {
            SendWait::Rnr => Self::RnrWait,
            SendWait::Window => Self::Window,
            SendWait::Ack => Self::AckWait,
        }
    }
}
