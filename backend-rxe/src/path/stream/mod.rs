//! Streams: the path to iWARP peers, over a TCP socket.
//!
//! A connection has one state for both directions, because a segment may carry a message of the peer as well as the
//! response to a request of this end. It lives in the requester half, and a run locks the responder half for it, in the
//! order of all paths. The runs of the queue pair read and write the socket, without guest memory. The thread of the
//! device reports that the socket is ready, and then the queue pair runs ([`crate::iwarp`]).
//!
//! | module | purpose |
//! | --- | --- |
//! | `run` | a run of a queue pair |
//! | `socket` | the connection with its socket, and the bytes between the two |
//! | `hooks` | the callbacks of the connection |
//! | `limits` | limits, and the memory that a connection is charged for |

mod hooks;
pub(crate) mod limits;
pub(crate) mod run;
mod socket;

use std::sync::Arc;
use std::time::Duration;

use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_iwarp::{Stream, StreamInspect};
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::QpAttrs;
use serde::Serialize;

use crate::iwarp::meeting::{Meeting, StreamLink};
use crate::qp::Qp;
use socket::StreamSocket;

/// Path of a queue pair whose peer is reached by iWARP.
#[derive(Debug)]
pub(crate) struct StreamRoute {
    meeting: Arc<Meeting>,
    link: Arc<StreamLink>,
    /// `None` until the connection is established.
    open: Option<Box<StreamSocket>>,
    /// The next request that begins was counted for the faults of the device before.
    counted: bool,
    _charge: Charge,
}

/// State of a stream at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct StreamRouteInspect {
    /// Bytes that were built and that the socket has not accepted.
    outgoing_bytes: usize,
    /// Bytes that have arrived and wait for a receive or for the rest of their message.
    incoming_bytes: usize,
    /// State of the protocol. `null`: the connection is not established yet.
    stream: Option<StreamInspect>,
}

impl StreamRoute {
    /// Returns the route of a queue pair that the guest moves to RTR. `None`: the manager has no connection that fits.
    ///
    /// # Errors
    /// The budget of the device does not cover the connection.
    pub(crate) fn begin(qp: &Qp, attrs: &QpAttrs) -> Result<Option<Box<Self>>, VerbsError> {
        let Some(meeting) = qp.adapter.iwarp.as_ref().filter(|meeting| meeting.reaches(attrs.av.dgid)) else {
            return Ok(None);
        };
        let charge = qp.adapter.budget.charge(Kept::Requests, limits::bytes(qp.max_send_sge))?;
        let found = meeting.begin(qp.qpn.get(), attrs.dest_qpn.get(), attrs.av.dgid, qp.task());
        Ok(found.map(|link| {
            let meeting = Arc::clone(meeting);
            Box::new(Self { meeting, link, open: None, counted: false, _charge: charge })
        }))
    }

    /// Returns `true` if no request is started and unfinished.
    pub(crate) fn is_idle(&self) -> bool {
        self.stream().is_none_or(Stream::is_idle)
    }

    fn stream(&self) -> Option<&Stream> {
        self.open.as_ref()?.connection.stream()
    }

    /// Returns the state of the route for inspection.
    pub(crate) fn inspect(&self) -> StreamRouteInspect {
        let [outgoing_bytes, incoming_bytes] = self.open.as_ref().map_or([0; 2], |open| open.waiting());
        StreamRouteInspect { outgoing_bytes, incoming_bytes, stream: self.stream().map(Stream::inspect) }
    }

    /// Takes over the connection once it is established, and the reports about its socket.
    fn update(&mut self, timeout: Duration) -> Option<&mut StreamSocket> {
        if self.open.is_none() {
            let established = self.link.take_established()?;
            self.open = Some(Box::new(StreamSocket::new(established, timeout)));
        }
        let open = self.open.as_deref_mut()?;
        open.note(self.link.take_reports());
        Some(open)
    }
}

impl Drop for StreamRoute {
    /// Closes the connection, because the queue pair is reset or has ended.
    fn drop(&mut self) {
        let closing = self.open.take().and_then(|open| open.finish());
        self.meeting.ended(&self.link, closing);
    }
}
