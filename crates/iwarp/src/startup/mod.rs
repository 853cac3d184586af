//! The MPA startup: request and reply, before the first FPDU (RFC 5044 7.1, RFC 6581).
//!
//! An [`Initiator`] sends the request and receives the reply; a [`Responder`] does the reverse. Until they have an
//! answer, both take all bytes of the connection that have arrived so far, so the caller keeps them. After its frame,
//! an end must send nothing until it is its turn: bytes behind a frame are an error.
//!
//! An iWARP responder must not send before the initiator has sent. For programs whose server speaks first, this
//! initiator always offers a ready-to-receive message (RTR): a READ of zero bytes, because some adapters announce WRITE
//! as well and then accept only READ. The responder prefers WRITE if both are offered, because a WRITE needs no
//! response.
//!
//! Markers are refused: common implementations never ask for them.

use std::time::Duration;

use thiserror::Error;

use crate::wire::{
    Cause, Enhanced, FrameError, FrameKind, MAX_PRIVATE_DATA, NOT_NEGOTIATED, Opcode, Placement, SegmentHeader,
    StartupFrame, Terminate, fpdu,
};

/// Time within which a complete request must arrive, however slowly the peer sends it.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time within which a complete reply must arrive. It includes the decision of the peer's program.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a program's private data beside the enhanced data of revision 2.
pub const MAX_PROGRAM_DATA: usize = MAX_PRIVATE_DATA - 4;
/// Largest number of READs that can be negotiated.
const MAX_READS: u16 = NOT_NEGOTIATED - 1;

/// Ready-to-receive message (RTR), which the initiator sends first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rtr {
    /// A WRITE of no bytes.
    Write,
    /// A READ of no bytes.
    Read,
}

/// End of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The end that connected. It sends first.
    Initiator,
    /// The end that accepted.
    Responder,
}

/// Properties of one end that the startup negotiates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// READ requests that this end executes at a time.
    pub ird: u16,
    /// READ requests that this end may have outstanding.
    pub ord: u16,
    /// This end requests the CRC. It is used if either end requests it.
    pub crc: bool,
}

/// Result of a startup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiated {
    /// This end.
    pub role: Role,
    /// FPDUs have a CRC.
    pub crc: bool,
    /// READ requests of the peer that may be outstanding.
    pub ird: u16,
    /// READ requests of this end that may be outstanding.
    pub ord: u16,
    /// The initiator sends this message first.
    pub rtr: Option<Rtr>,
}

/// Reason why a startup failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum StartupError {
    /// The frame is invalid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer sent bytes before it was its turn.
    #[error("bytes behind the frame of the MPA startup")]
    ExtraBytes,
    /// The peer wants markers.
    #[error("the peer wants MPA markers")]
    Markers,
    /// The reply has a higher revision than the request, or lacks enhanced data although the request had them.
    #[error("the reply does not fit the request")]
    Reply,
    /// The peer may have more READs outstanding than this end executes, or executes none although the RTR is a READ.
    #[error("the numbers of outstanding READs do not fit")]
    ReadResources,
    /// The ends have no ready-to-receive message in common.
    #[error("no ready-to-receive message in common")]
    NoRtr,
    /// The frame did not arrive in time.
    #[error("no whole frame of the MPA startup in time")]
    Timeout,
    /// TCP has ended the connection before the startup was complete.
    #[error("the connection ended during the MPA startup")]
    Closed,
    /// The program's private data is too long.
    #[error("more than {MAX_PROGRAM_DATA} bytes of private data")]
    PrivateData,
}

/// Failure of a startup.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{error}")]
pub struct StartupFailure {
    /// Reason.
    pub error: StartupError,
    /// Bytes that tell the peer the reason, if there are any. The connection is closed after them.
    pub last_words: Vec<u8>,
}

impl From<StartupError> for StartupFailure {
    fn from(error: StartupError) -> Self {
        Self { error, last_words: Vec::new() }
    }
}

impl From<FrameError> for StartupFailure {
    fn from(error: FrameError) -> Self {
        StartupError::from(error).into()
    }
}

/// Answer of the responder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The connection is established.
    Accepted {
        /// Its properties.
        negotiated: Negotiated,
        /// Private data of the peer's program.
        private_data: Vec<u8>,
    },
    /// The peer's program rejected the connection and closes it.
    Rejected {
        /// Private data of the peer's program.
        private_data: Vec<u8>,
    },
}

/// The end that connects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Initiator {
    limits: Limits,
    request: StartupFrame,
    deadline: Duration,
}

impl Initiator {
    /// Creates the initiator of a connection with a request of revision 2.
    ///
    /// # Errors
    /// The private data is longer than [`MAX_PROGRAM_DATA`].
    pub fn new(now: Duration, limits: Limits, private_data: &[u8]) -> Result<Self, StartupError> {
        if private_data.len() > MAX_PROGRAM_DATA {
            return Err(StartupError::PrivateData);
        }
        let limits = Limits { ird: limits.ird.min(MAX_READS), ord: limits.ord.min(MAX_READS), ..limits };
        let enhanced = Enhanced {
            peer_to_peer: true,
            rtr_read: true,
            ird: limits.ird,
            // The RTR is a READ.
            ord: limits.ord.max(1),
            ..Enhanced::default()
        };
        let request = StartupFrame {
            kind: FrameKind::Request,
            markers: false,
            crc: limits.crc,
            rejected: false,
            revision: 2,
            enhanced: Some(enhanced),
            private_data: private_data.to_vec(),
        };
        Ok(Self { limits, request, deadline: now.saturating_add(REPLY_TIMEOUT) })
    }

    /// Returns an initiator of revision 1, for a peer that closed or reset the connection instead of replying. It needs
    /// a new connection. `None`: this initiator already has revision 1.
    pub fn fallback(self, now: Duration) -> Option<Self> {
        (self.request.revision == 2).then(|| Self {
            request: StartupFrame { revision: 1, enhanced: None, ..self.request },
            deadline: now.saturating_add(REPLY_TIMEOUT),
            ..self
        })
    }

    /// The bytes to send.
    pub fn request(&self) -> Vec<u8> {
        self.request.to_bytes()
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub const fn poll_timeout(&self) -> Duration {
        self.deadline
    }

    /// Checks the deadline.
    ///
    /// # Errors
    /// It has passed.
    pub fn handle_timeout(&self, now: Duration) -> Result<(), StartupFailure> {
        if now < self.deadline { Ok(()) } else { Err(StartupError::Timeout.into()) }
    }

    /// Processes all bytes that have arrived so far. Returns `None` if the reply is incomplete.
    ///
    /// # Errors
    /// The connection cannot be established, and is to be closed.
    pub fn handle_bytes(&self, bytes: &[u8]) -> Result<Option<Answer>, StartupFailure> {
        let Some((reply, len)) = StartupFrame::parse(FrameKind::Reply, bytes)? else { return Ok(None) };
        if reply.rejected {
            return Ok(Some(Answer::Rejected { private_data: reply.private_data }));
        }
        let crc = self.limits.crc || reply.crc;
        let negotiated = self.negotiate(&reply, crc, bytes.len() > len).map_err(|error| {
            let last_words = error.cause().map(|cause| last_words(cause, crc)).unwrap_or_default();
            StartupFailure { error, last_words }
        })?;
        Ok(Some(Answer::Accepted { negotiated, private_data: reply.private_data }))
    }

    fn negotiate(&self, reply: &StartupFrame, crc: bool, extra_bytes: bool) -> Result<Negotiated, StartupError> {
        let Limits { ird, mut ord, .. } = self.limits;
        if extra_bytes {
            return Err(StartupError::ExtraBytes);
        }
        if reply.markers {
            return Err(StartupError::Markers);
        }
        if reply.revision > self.request.revision {
            return Err(StartupError::Reply);
        }
        let mut rtr = None;
        if let (Some(_), Some(peer)) = (self.request.enhanced, reply.enhanced) {
            if peer.peer_to_peer {
                if !peer.rtr_read {
                    return Err(StartupError::NoRtr);
                }
                rtr = Some(Rtr::Read);
            }
            if peer.ord != NOT_NEGOTIATED && peer.ord > ird || peer.ird == 0 && rtr.is_some() {
                return Err(StartupError::ReadResources);
            }
            if peer.ird != NOT_NEGOTIATED {
                ord = ord.min(peer.ird);
            }
        } else if reply.revision == 2 {
            return Err(StartupError::Reply);
        }
        Ok(Negotiated { role: Role::Initiator, crc, ird, ord, rtr })
    }
}

impl StartupError {
    /// Returns the reason that the initiator reports to the responder, if there is a code for it (RFC 6581 9).
    const fn cause(self) -> Option<Cause> {
        match self {
            Self::ReadResources => Some(Cause::READ_RESOURCES),
            Self::NoRtr => Some(Cause::NO_RTR),
            Self::Markers | Self::Reply => Some(Cause::STARTUP),
            Self::Frame(_) | Self::ExtraBytes | Self::Timeout | Self::Closed | Self::PrivateData => None,
        }
    }
}

/// A Terminate as the first message of a connection.
fn last_words(cause: Cause, crc: bool) -> Vec<u8> {
    let placement = Placement::Untagged { stag: 0, queue: 2, msn: 1, offset: 0 };
    let header = SegmentHeader { last: true, opcode: Opcode::Terminate, placement };
    let body = Terminate { cause, segment: None, read: None }.to_bytes();
    let mut out = vec![0; fpdu::LENGTH_LEN];
    out.extend(header.to_raw().bytes());
    out.extend(body);
    let segment = out.len() - fpdu::LENGTH_LEN;
    out.resize(fpdu::fpdu_len(segment), 0);
    match fpdu::seal(&mut out, segment, crc) {
        Some(_) => out,
        None => Vec::new(),
    }
}

/// The end that accepts, until the request has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Responder {
    deadline: Duration,
}

impl Responder {
    /// Creates the responder of a connection that was made at `now`.
    pub const fn new(now: Duration) -> Self {
        Self { deadline: now.saturating_add(REQUEST_TIMEOUT) }
    }

    /// Time at which [`Self::handle_timeout`] is due.
    pub const fn poll_timeout(&self) -> Duration {
        self.deadline
    }

    /// Checks the deadline.
    ///
    /// # Errors
    /// It has passed.
    pub fn handle_timeout(&self, now: Duration) -> Result<(), StartupFailure> {
        if now < self.deadline { Ok(()) } else { Err(StartupError::Timeout.into()) }
    }

    /// Processes all bytes that have arrived so far. Returns `None` if the request is incomplete.
    ///
    /// # Errors
    /// The connection cannot be established, and is to be closed.
    pub fn handle_bytes(&self, bytes: &[u8]) -> Result<Option<Incoming>, StartupFailure> {
        let Some((request, len)) = StartupFrame::parse(FrameKind::Request, bytes)? else { return Ok(None) };
        if bytes.len() > len {
            return Err(StartupError::ExtraBytes.into());
        }
        let incoming = Incoming { request };
        if incoming.request.markers {
            return Err(StartupFailure { error: StartupError::Markers, last_words: incoming.reject(&[])? });
        }
        Ok(Some(incoming))
    }
}

/// A request that waits for the decision of the program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Incoming {
    request: StartupFrame,
}

impl Incoming {
    /// Private data of the peer's program.
    pub fn private_data(&self) -> &[u8] {
        &self.request.private_data
    }

    /// Number of READ requests that the peer executes at a time. `None`: it does not say.
    pub fn peer_ird(&self) -> Option<u16> {
        self.request.enhanced.map(|enhanced| enhanced.ird).filter(|&ird| ird != NOT_NEGOTIATED)
    }

    /// Number of READ requests that the peer may have outstanding. `None`: it does not say.
    pub fn peer_ord(&self) -> Option<u16> {
        self.request.enhanced.map(|enhanced| enhanced.ord).filter(|&ord| ord != NOT_NEGOTIATED)
    }

    /// Accepts the connection. Returns the reply and the properties of the connection.
    ///
    /// # Errors
    /// There is no ready-to-receive message in common, or the private data is too long.
    pub fn accept(&self, limits: Limits, private_data: &[u8]) -> Result<(Vec<u8>, Negotiated), StartupFailure> {
        let mut negotiated = Negotiated {
            role: Role::Responder,
            crc: limits.crc || self.request.crc,
            ird: limits.ird.min(MAX_READS),
            ord: limits.ord.min(self.peer_ird().unwrap_or(MAX_READS)).min(MAX_READS),
            rtr: None,
        };
        let mut enhanced = None;
        if let Some(peer) = self.request.enhanced {
            if peer.peer_to_peer {
                // A zero-length SEND is not accepted, because it cannot be told from one that needs a receive.
                negotiated.rtr = match peer {
                    Enhanced { rtr_write: true, .. } => Some(Rtr::Write),
                    Enhanced { rtr_read: true, .. } => Some(Rtr::Read),
                    _ => {
                        return Err(StartupFailure { error: StartupError::NoRtr, last_words: self.reject(&[])? });
                    }
                };
            }
            let rtr_read = negotiated.rtr == Some(Rtr::Read);
            enhanced = Some(Enhanced {
                peer_to_peer: peer.peer_to_peer,
                rtr_send: false,
                rtr_write: negotiated.rtr == Some(Rtr::Write),
                rtr_read,
                ird: if peer.ord == NOT_NEGOTIATED { NOT_NEGOTIATED } else { negotiated.ird.max(rtr_read.into()) },
                ord: if peer.ird == NOT_NEGOTIATED { NOT_NEGOTIATED } else { negotiated.ord },
            });
        }
        let reply = self.reply(negotiated.crc, false, enhanced, private_data)?;
        Ok((reply, negotiated))
    }

    /// Rejects the connection. Returns the reply, behind which the connection is closed.
    ///
    /// # Errors
    /// The private data is too long.
    pub fn reject(&self, private_data: &[u8]) -> Result<Vec<u8>, StartupError> {
        let enhanced = self.request.enhanced.map(|_| Enhanced::default());
        self.reply(self.request.crc, true, enhanced, private_data)
    }

    fn reply(
        &self,
        crc: bool,
        rejected: bool,
        enhanced: Option<Enhanced>,
        private_data: &[u8],
    ) -> Result<Vec<u8>, StartupError> {
        if private_data.len() > MAX_PROGRAM_DATA {
            return Err(StartupError::PrivateData);
        }
        let private_data = private_data.to_vec();
        let revision = self.request.revision;
        let kind = FrameKind::Reply;
        Ok(StartupFrame { kind, markers: false, crc, rejected, revision, enhanced, private_data }.to_bytes())
    }
}

#[cfg(test)]
mod tests;
