//! A worker's requests to its supervisor, as they come over its socket.

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

/// Requests that are looked at when a worker is gone: more than its socket holds.
const LEFT_OVER: usize = 8192;

/// What no worker of ours does.
#[derive(Debug, Error)]
pub(super) enum UpcallError {
    /// It is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// It is no request.
    #[error("not understood: {0}")]
    Content(#[from] serde_json::Error),
    /// It does not read what it asked for.
    #[error("it does not read its replies: {0}")]
    Unsent(io::Error),
}

/// The requests of one worker.
#[derive(Debug)]
pub(super) struct Upcalls {
    /// Never waits.
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

    /// Returns `true` if requests may come now, and else when they may.
    pub(super) fn interest(&mut self, now: Instant) -> (bool, Option<Duration>) {
        let wait = self.budget.wait(now);
        (wait.is_none(), wait)
    }

    /// Takes what is there, as far as the budget goes. Returns `false` at the end of the stream.
    ///
    /// # Errors
    /// It is not what a worker sends.
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

    /// Takes the notes that are left of a worker that is gone.
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
            HostRequest::QueuePairFailed { device, qpn, peer, history } => {
                services.queue_pair_failed(&device, qpn, peer, &history);
                return Ok(());
            }
            HostRequest::AddressConflict { device, address, vlan, kept } => {
                services.address_conflict(&device, address, vlan, kept);
                return Ok(());
            }
            HostRequest::Connect { device } => ("connecting", services.connect(device.as_deref()).map(Some)),
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
