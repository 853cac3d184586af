//! One connection from its first byte to its last: the startup, then a [`Stream`].
//!
//! [`Connection`] keeps the bytes that the protocol cannot process yet, at most one frame of the startup or one FPDU,
//! and the frames of the startup until TCP has accepted them. All other memory is that of the stream.

mod pending;

use std::collections::VecDeque;
use std::time::Duration;

use pvrdma_verbs_types::{RequesterOps, ResponderOps};

use crate::startup::{Answer, Incoming, Initiator, Limits, Negotiated, Responder, StartupError, StartupFailure};
use crate::stream::{Close, End, Finished, Stream, Tuning};
use crate::wire::MAX_STARTUP_FRAME;
use pending::{Outgoing, Partial};

/// Change of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The request of an accepted connection has arrived. It waits for [`Connection::accept`] or
    /// [`Connection::reject`].
    Requested(Incoming),
    /// The peer has accepted the connection. From now on it has a stream.
    Established {
        /// Properties of the connection.
        negotiated: Negotiated,
        /// Private data of the peer's program.
        private_data: Vec<u8>,
    },
    /// The peer's program has rejected the connection.
    Rejected {
        /// Private data of the peer's program.
        private_data: Vec<u8>,
    },
    /// The startup has failed.
    Failed(StartupError),
    /// The stream has ended.
    Ended(End),
}

/// Progress of a connection.
#[derive(Debug)]
enum Phase {
    /// The request was sent, and the reply is to come.
    Requested(Initiator),
    /// The request is to come.
    Listening(Responder),
    /// The program of this end decides.
    Deciding(Incoming),
    Established(Box<Stream>),
    /// The connection ends without a stream: its startup has failed, a program has rejected it, or the owner has
    /// flushed it. It is to be closed in this way.
    Refused(Close),
}

/// A connection, as the owner of its TCP socket sees it.
#[derive(Debug)]
pub struct Connection {
    phase: Phase,
    tuning: Tuning,
    /// Frame of the startup that TCP has not accepted completely.
    outgoing: Outgoing,
    /// The frame or FPDU that has not arrived completely, or that waits for a receive.
    partial: Partial,
    /// The peer has closed the connection behind a SEND that waits for a receive.
    closed: bool,
    /// An initiator whose peer has closed the connection instead of replying.
    unanswered: Option<Initiator>,
    events: VecDeque<Event>,
    /// End in the last [`Event::Ended`]. A second one may follow [`End::PeerClosed`].
    reported: Option<End>,
}

impl Connection {
    /// Creates the connection of an end that has connected, and requests its establishment.
    ///
    /// # Errors
    /// The private data is longer than [`MAX_PROGRAM_DATA`](crate::MAX_PROGRAM_DATA).
    pub fn initiate(now: Duration, limits: Limits, tuning: Tuning, private_data: &[u8]) -> Result<Self, StartupError> {
        Initiator::new(now, limits, private_data).map(|initiator| Self::request(initiator, tuning))
    }

    /// Creates the connection of an end that has accepted.
    pub fn respond(now: Duration, tuning: Tuning) -> Self {
        Self::new(Phase::Listening(Responder::new(now)), tuning)
    }

    fn request(initiator: Initiator, tuning: Tuning) -> Self {
        let request = initiator.request();
        let mut connection = Self::new(Phase::Requested(initiator), tuning);
        connection.outgoing.push(request);
        connection
    }

    fn new(phase: Phase, tuning: Tuning) -> Self {
        Self {
            phase,
            tuning,
            outgoing: Outgoing::default(),
            partial: Partial::default(),
            closed: false,
            unanswered: None,
            events: VecDeque::new(),
            reported: None,
        }
    }

    /// Returns a connection that requests revision 1, for a new TCP connection, if the peer has closed the old one
    /// instead of replying to a request of revision 2.
    pub fn fallback(self, now: Duration) -> Option<Self> {
        let initiator = self.unanswered?.fallback(now)?;
        Some(Self::request(initiator, self.tuning))
    }

    /// The next change.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The stream, once the connection is established.
    pub const fn stream(&self) -> Option<&Stream> {
        match &self.phase {
            Phase::Established(stream) => Some(stream),
            _ => None,
        }
    }

    /// The stream, to post requests and to change its parameters. All bytes pass through the connection.
    pub const fn stream_mut(&mut self) -> Option<&mut Stream> {
        match &mut self.phase {
            Phase::Established(stream) => Some(stream),
            _ => None,
        }
    }

    /// Number of bytes that have arrived and are kept.
    pub const fn kept(&self) -> usize {
        self.partial.len()
    }

    /// Accepts the connection that the peer has requested.
    ///
    /// # Errors
    /// No request waits for a decision, the private data is too long, or the ends have nothing in common. In the last
    /// case the peer is told so.
    pub fn accept(&mut self, limits: Limits, private_data: &[u8]) -> Result<Negotiated, StartupError> {
        let Phase::Deciding(incoming) = &self.phase else { return Err(StartupError::Closed) };
        match incoming.accept(limits, private_data) {
            Ok((reply, negotiated)) => {
                self.outgoing.push(reply);
                self.phase = Phase::Established(Box::new(Stream::new(negotiated, self.tuning)));
                Ok(negotiated)
            }
            Err(StartupFailure { error: StartupError::PrivateData, .. }) => Err(StartupError::PrivateData),
            Err(failure) => {
                self.outgoing.push(failure.last_words);
                self.phase = Phase::Refused(Close::Finish);
                Err(failure.error)
            }
        }
    }

    /// Rejects the connection that the peer has requested.
    ///
    /// # Errors
    /// No request waits for a decision, or the private data is too long.
    pub fn reject(&mut self, private_data: &[u8]) -> Result<(), StartupError> {
        let Phase::Deciding(incoming) = &self.phase else { return Err(StartupError::Closed) };
        let reply = incoming.reject(private_data)?;
        self.outgoing.push(reply);
        self.phase = Phase::Refused(Close::Finish);
        Ok(())
    }

    /// Processes bytes of the peer, and returns how many of them it has processed or kept. If there are more, a SEND
    /// waits for a receive: the caller keeps them, and stops reading until [`Self::resume`] has processed the SEND.
    pub fn handle_bytes(&mut self, now: Duration, bytes: &[u8], ops: &mut (impl RequesterOps + ResponderOps)) -> usize {
        match &mut self.phase {
            Phase::Established(stream) => {
                let used = self.partial.deliver(stream, now, bytes, ops);
                self.report_end();
                return used;
            }
            Phase::Requested(_) | Phase::Listening(_) => self.handle_frame(bytes),
            Phase::Deciding(_) if !bytes.is_empty() => self.fail(StartupError::ExtraBytes.into()),
            Phase::Deciding(_) | Phase::Refused(_) => {}
        }
        bytes.len()
    }

    /// Processes the SEND that waits for a receive, after one was posted. Then pass the bytes behind it.
    pub fn resume(&mut self, now: Duration, ops: &mut (impl RequesterOps + ResponderOps)) {
        let Phase::Established(stream) = &mut self.phase else { return };
        self.partial.deliver(stream, now, &[], ops);
        if self.closed && !stream.waits_for_receive() {
            stream.finished(Finished::Closed(self.partial.len()), ops);
        }
        self.report_end();
    }

    /// Processes the end of the byte stream, behind all bytes.
    pub fn peer_closed(&mut self, ops: &mut impl RequesterOps) {
        match &mut self.phase {
            Phase::Established(stream) if stream.waits_for_receive() => self.closed = true,
            Phase::Established(stream) => stream.finished(Finished::Closed(self.partial.len()), ops),
            _ => self.lose(),
        }
        self.report_end();
    }

    /// Processes the loss of the TCP connection: it was reset, or the peer does not answer.
    pub fn reset(&mut self, ops: &mut impl RequesterOps) {
        self.outgoing.clear();
        match &mut self.phase {
            Phase::Established(stream) => stream.finished(Finished::Reset, ops),
            _ => self.lose(),
        }
        self.report_end();
    }

    /// Writes the next bytes to send into `out` and returns their number, or `None` if there is nothing to send now.
    /// `out` must have room as for [`Stream::poll_transmit`]. Call it after each other method.
    pub fn poll_transmit(&mut self, out: &mut [u8], ops: &mut (impl RequesterOps + ResponderOps)) -> Option<usize> {
        if let Some(written) = self.outgoing.write(out) {
            return Some(written);
        }
        let Phase::Established(stream) = &mut self.phase else { return None };
        let written = stream.poll_transmit(out, ops);
        self.report_end();
        written
    }

    /// Reports that TCP has accepted `bytes` more of the bytes that [`Self::poll_transmit`] returned.
    pub fn taken(&mut self, bytes: usize, ops: &mut impl RequesterOps) {
        let bytes = self.outgoing.taken(bytes);
        if let Phase::Established(stream) = &mut self.phase {
            stream.taken(bytes, ops);
        }
        self.report_end();
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Requested(initiator) => Some(initiator.poll_timeout()),
            Phase::Listening(responder) => Some(responder.poll_timeout()),
            Phase::Established(stream) => stream.poll_timeout(),
            Phase::Deciding(_) | Phase::Refused(_) => None,
        }
    }

    /// Ends the connection if its peer, or the consumer of this end, has taken too long.
    pub fn handle_timeout(&mut self, now: Duration, ops: &mut (impl RequesterOps + ResponderOps)) {
        let checked = match &mut self.phase {
            Phase::Requested(initiator) => initiator.handle_timeout(now),
            Phase::Listening(responder) => responder.handle_timeout(now),
            Phase::Established(stream) => {
                stream.handle_timeout(now, ops);
                Ok(())
            }
            Phase::Deciding(_) | Phase::Refused(_) => Ok(()),
        };
        if let Err(failure) = checked {
            self.fail(failure);
        }
        self.report_end();
    }

    /// Ends the connection for a reason of this end. Requests are flushed.
    pub fn flush(&mut self, ops: &mut impl RequesterOps) {
        match &mut self.phase {
            Phase::Established(stream) => stream.flush(ops),
            Phase::Refused(_) => {}
            _ => self.phase = Phase::Refused(Close::Reset),
        }
        self.report_end();
    }

    /// Returns how to close the TCP connection now. `None`: the connection is in use, or bytes are to be sent first. A
    /// connection that the peer has closed stays in use until the owner calls [`Self::flush`].
    ///
    /// For [`Close::Finish`], the caller shuts down the sending direction and reads until the peer has closed as well:
    /// a socket that is closed with unread bytes resets the connection, and the peer may then miss the last bytes.
    pub fn close(&self) -> Option<Close> {
        match &self.phase {
            Phase::Refused(Close::Reset) => Some(Close::Reset),
            Phase::Refused(Close::Finish) => self.outgoing.is_empty().then_some(Close::Finish),
            Phase::Established(stream) => match stream.end() {
                Some(_) if !self.outgoing.is_empty() => None,
                _ => stream.closing(),
            },
            _ => None,
        }
    }

    /// Processes bytes of the startup.
    fn handle_frame(&mut self, bytes: &[u8]) {
        // One byte more shows that there are bytes behind the frame.
        let frame = self.partial.collect(bytes, MAX_STARTUP_FRAME + 1);
        let event = match &self.phase {
            Phase::Requested(initiator) => initiator.handle_bytes(frame).map(|answer| answer.map(Step::Answered)),
            Phase::Listening(responder) => responder.handle_bytes(frame).map(|incoming| incoming.map(Step::Asked)),
            _ => return,
        };
        match event {
            Ok(None) => return,
            Ok(Some(Step::Asked(incoming))) => {
                self.events.push_back(Event::Requested(incoming.clone()));
                self.phase = Phase::Deciding(incoming);
            }
            Ok(Some(Step::Answered(Answer::Accepted { negotiated, private_data }))) => {
                self.phase = Phase::Established(Box::new(Stream::new(negotiated, self.tuning)));
                self.events.push_back(Event::Established { negotiated, private_data });
            }
            Ok(Some(Step::Answered(Answer::Rejected { private_data }))) => {
                self.phase = Phase::Refused(Close::Finish);
                self.events.push_back(Event::Rejected { private_data });
            }
            Err(failure) => return self.fail(failure),
        }
        self.partial.clear();
    }

    /// Ends the connection because its startup has failed.
    fn fail(&mut self, failure: StartupFailure) {
        self.partial.clear();
        self.phase = Phase::Refused(if failure.last_words.is_empty() { Close::Reset } else { Close::Finish });
        self.outgoing.push(failure.last_words);
        self.events.push_back(Event::Failed(failure.error));
    }

    /// Ends the startup because TCP has ended the connection.
    fn lose(&mut self) {
        match &self.phase {
            Phase::Refused(_) | Phase::Established(_) => return,
            Phase::Requested(initiator) if self.partial.len() == 0 => self.unanswered = Some(initiator.clone()),
            _ => {}
        }
        self.outgoing.clear();
        self.fail(StartupError::Closed.into());
    }

    fn report_end(&mut self) {
        let end = self.stream().and_then(Stream::end);
        if end.is_some() && end != self.reported {
            self.reported = end;
            self.events.extend(end.map(Event::Ended));
        }
    }
}

/// Result of a frame of the startup.
enum Step {
    Asked(Incoming),
    Answered(Answer),
}
