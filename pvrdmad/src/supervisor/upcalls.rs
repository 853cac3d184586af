//! Upcalls: requests of a worker to its supervisor, received over a socket.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::services::Services;
use super::timing::{Budget, Rate};
use crate::protocol::frame::{encode, send};
use crate::protocol::{FrameError, FrameReader, HostReply, HostRequest, MAX_HOST_REQUEST, Outgoing, Received};
use crate::worker::Host;

/// Most requests that are read after a worker has ended: more than its socket holds.
const LEFT_OVER: usize = 8192;

/// Protocol violations, which a genuine worker never commits.
#[derive(Debug, Error)]
pub(super) enum UpcallError {
    /// The data is not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame is not a request.
    #[error("not understood: {0}")]
    Content(#[from] serde_json::Error),
    /// The worker does not read the replies to its requests.
    #[error("it does not read its replies: {0}")]
    Unsent(io::Error),
}

/// The upcalls of one worker.
#[derive(Debug)]
pub(super) struct Upcalls {
    /// Non-blocking.
    stream: UnixStream,
    reader: FrameReader,
    services: Arc<Services>,
    budget: Budget,
}

impl Upcalls {
    pub(super) fn new(stream: UnixStream, services: Arc<Services>, rate: Rate) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let budget = Budget::new(rate, Instant::now());
        Ok(Self { stream, reader: FrameReader::new(), services, budget })
    }

    pub(super) const fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Returns whether requests may be read now, and otherwise the time until they may.
    pub(super) fn interest(&mut self, now: Instant) -> (bool, Option<Duration>) {
        let wait = self.budget.wait(now);
        (wait.is_none(), wait)
    }

    /// Handles pending requests within the budget. Returns `false` at the end of the stream.
    ///
    /// # Errors
    /// The data violates the protocol.
    pub(super) fn take(&mut self) -> Result<bool, UpcallError> {
        while self.budget.wait(Instant::now()).is_none() {
            let frame = match self.reader.receive(&self.stream, MAX_HOST_REQUEST)? {
                Received::Frame(frame) => frame,
                Received::Pending => break,
                Received::Closed => return Ok(false),
            };
            self.budget.take(Instant::now());
            let (id, request) = HostRequest::parse(&frame.body)?;
            self.serve(id, request)?;
        }
        Ok(true)
    }

    /// Handles the pending notes about clients of a worker that has ended, and drops its other requests.
    pub(super) fn drain(&mut self) {
        for _ in 0..LEFT_OVER {
            let Ok(Received::Frame(frame)) = self.reader.receive(&self.stream, MAX_HOST_REQUEST) else { return };
            match HostRequest::parse(&frame.body) {
                Ok((_, HostRequest::ClientConnected { device })) => self.services.client(&device, true),
                Ok((_, HostRequest::ClientGone { device })) => self.services.client(&device, false),
                _ => {}
            }
        }
    }

    fn serve(&self, id: u64, request: HostRequest) -> Result<(), UpcallError> {
        let services = &self.services;
        let (what, done) = match request {
            HostRequest::ClientConnected { device } => {
                services.client(&device, true);
                return Ok(());
            }
            HostRequest::ClientGone { device } => {
                services.client(&device, false);
                return Ok(());
            }
            HostRequest::ClientRecovered { device, network_function, problem } => {
                services.client_recovered(&device, network_function, problem.as_deref());
                return Ok(());
            }
            HostRequest::QueuePairFailed { device, qpn, peer, cause, history } => {
                services.queue_pair_failed(&device, qpn, peer, (cause, &history));
                return Ok(());
            }
            HostRequest::AddressConflict { device, address, vlan, kept } => {
                services.address_conflict(&device, address, vlan, kept);
                return Ok(());
            }
            HostRequest::Connect { device, interface } => {
                ("connecting", services.connect(device.as_deref(), interface).map(Some))
            }
            HostRequest::Keeper { device } => ("a keeper", services.keeper(&device).map(Some)),
            HostRequest::AddAddress { address } => ("an address", services.add_address(address).map(|()| None)),
            HostRequest::RemoveAddress { address } => ("an address", services.remove_address(address).map(|()| None)),
        };
        let (reply, socket) = match done {
            Ok(socket) => (HostReply::Done {}, socket),
            Err(error) => {
                log::debug!("{what}: {error}");
                (HostReply::Refused(error.to_string()), None)
            }
        };
        let fds: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
        send(&self.stream, &encode(&Outgoing { id, body: &reply })?, &fds).map_err(UpcallError::Unsent)
    }
}
