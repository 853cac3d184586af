//! Results of the end of a connection.

use serde::Serialize;

use crate::wire::Cause;

/// End of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum End {
    /// The peer has sent a Terminate.
    Terminated {
        /// Its reason.
        cause: Cause,
        /// No open request could report the error, so only an event can.
        unreported: bool,
    },
    /// The peer has sent an invalid message, or one that the QP does not allow. A Terminate is sent in response.
    Refused(Cause),
    /// A request of this end failed at this end.
    Local,
    /// TCP has ended the connection, or the peer has closed it within a message.
    Lost,
    /// The peer has closed the connection between two messages. Requests stay until
    /// [`Stream::flush`](crate::Stream::flush).
    PeerClosed,
    /// The owner has ended the connection.
    Flushed,
}

/// Way to close the connection, after all bytes of [`Stream::poll_transmit`](crate::Stream::poll_transmit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close {
    /// In order.
    Finish,
    /// By a reset, because the peer would otherwise take a part for the whole message, or wait for the rest.
    Reset,
}

/// End of the TCP connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finished {
    /// The peer has closed it (FIN), and [`Stream::receive`](crate::Stream::receive) has not processed this number of
    /// bytes.
    Closed(usize),
    /// It was reset, or the peer does not answer.
    Reset,
}

/// Notification that the consumer still needs when a message of the peer is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Notify {
    /// Memory cannot be accessed.
    Access,
    /// The message is invalid.
    InvalidRequest,
}
