//! An interface of this host: whole frames through a packet socket.
//!
//! The host's own network stack receives the same frames and is otherwise independent of the link. Frames that the host
//! itself sends through the interface are not received. Runs of packets cross the kernel as super-frames ([`offload`]).
//! If another sender of the host left checksums or segmentation to the hardware, they are completed here, because a
//! guest has not negotiated such offloads with that sender.

mod error;
mod filter;
mod host;
mod input;
mod offload;
mod output;
mod priority;
mod segmentation;
mod socket;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;
use rustix::io::Errno;

use input::Input;
use output::Output;
use pvrdma_link::{Connector, Frames, Link, LinkInspect, Offload, Readiness, Reconnect};
use socket::Presence;

pub use error::AfPacketError;
pub use filter::{MAX_ADDRESSES, VlanFilter};
pub use host::AfPacketSocket;
pub use segmentation::{Segmentation, SegmentationSample};

/// Interval of checks of an interface that is down.
const LOOK: Duration = Duration::from_millis(500);

/// State of the link's socket.
#[derive(Debug)]
enum State {
    Up(Arc<OwnedFd>),
    /// The interface is down, with the time of the next check.
    Down(Arc<OwnedFd>, Instant),
    /// The interface has been deleted.
    Gone,
}

impl State {
    fn of(socket: Arc<OwnedFd>) -> Self {
        match socket::presence(socket.as_fd()) {
            Presence::Up => Self::Up(socket),
            Presence::Down => Self::Down(socket, Instant::now() + LOOK),
            Presence::Gone => Self::Gone,
        }
    }

    const fn socket(&self) -> Option<&Arc<OwnedFd>> {
        match self {
            Self::Up(socket) => Some(socket),
            Self::Down(..) | Self::Gone => None,
        }
    }
}

/// A link over an interface of the host. While the interface is down or deleted, sent frames are lost, as without a
/// cable.
#[derive(Debug)]
pub struct AfPacketLink {
    interface: String,
    state: Mutex<State>,
    reconnect: Reconnect,
    input: Mutex<Input>,
    output: Output,
    lost: AtomicU64,
}

impl AfPacketLink {
    /// Uses `interface` for a device with the address `mac`, and receives frames to that address and to groups. The
    /// interface may still be down.
    ///
    /// # Errors
    /// Missing privileges, no such interface, or not an Ethernet interface.
    pub fn open(interface: &str, mac: MacAddr) -> Result<Self, AfPacketError> {
        let failed =
            |error: io::Error| AfPacketError::new(interface, Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let host = AfPacketSocket::open(interface, VlanFilter::All)?;
        host.set_addresses(&[mac]).map_err(failed)?;
        let socket = host.descriptor().map_err(failed)?;
        Ok(Self::from_socket(interface, socket, Arc::new(host)))
    }

    /// Uses a socket on `interface` that an [`AfPacketSocket`] has provided. If the interface is deleted, `connector`
    /// opens another socket once it exists again.
    pub fn from_socket(interface: &str, socket: OwnedFd, connector: Arc<dyn Connector>) -> Self {
        let state = State::of(Arc::new(socket));
        if state.socket().is_none() {
            // Log: once, when the link is opened.
            log::warn!("{interface} is down; the link waits for it");
        }
        Self {
            interface: interface.to_owned(),
            state: Mutex::new(state),
            reconnect: Reconnect::new(connector),
            input: Mutex::default(),
            output: Output::default(),
            lost: AtomicU64::new(0),
        }
    }

    /// Disables super-frames: each packet is sent separately, and no offload is left to the kernel or the interface.
    #[must_use]
    pub fn without_offload(mut self) -> Self {
        self.output = Output::without_offload();
        self
    }

    fn socket(&self) -> Option<Arc<OwnedFd>> {
        self.state.lock().socket().cloned()
    }

    /// Returns the socket. Checks the interface first if a check is due.
    fn socket_now(&self) -> Option<Arc<OwnedFd>> {
        let state = &mut *self.state.lock();
        if let State::Down(socket, due) = state
            && *due <= Instant::now()
        {
            *state = State::of(Arc::clone(socket));
            self.note_up(state);
        }
        if matches!(state, State::Gone)
            && let Some(socket) = self.reconnect.attempt()
        {
            self.output.forget_socket();
            *state = State::of(Arc::new(socket));
            self.note_up(state);
        }
        state.socket().cloned()
    }

    fn note_up(&self, state: &State) {
        if state.socket().is_some() {
            // Log: only the host's administrator causes this by taking the interface down and up, at most once in
            // `REOPEN`.
            log::info!("{} is back", self.interface);
        }
    }

    /// Handles an error of the socket, after which the interface may be down or deleted.
    fn close(&self, old: &Arc<OwnedFd>, errno: Errno) {
        let state = &mut *self.state.lock();
        if state.socket().is_some_and(|now| Arc::ptr_eq(now, old)) {
            *state = State::of(Arc::clone(old));
            if state.socket().is_none() {
                // Log: as above.
                log::warn!("{}: {errno}; the link waits for it", self.interface);
            }
        }
    }

    fn lose(&self, count: usize) {
        self.lost.fetch_add(count as u64, Ordering::Relaxed);
    }
}

impl Link for AfPacketLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let Some(socket) = self.socket_now() else { return };
        match self.input.lock().receive(&socket, frames, most) {
            Ok(lost) => self.lose(lost),
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {}
            // The kernel cannot describe the received super-frame in a `virtio_net_hdr`.
            Err(Errno::INVAL) => self.lose(1),
            Err(errno) => self.close(&socket, errno),
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.len().saturating_sub(from);
        let Some(socket) = self.socket() else {
            self.lose(all);
            return all;
        };
        let sent = self.output.send(&socket, frames, from);
        self.lose(sent.lost);
        match sent.error {
            None => sent.taken,
            Some(Errno::AGAIN) => sent.taken,
            Some(errno) => {
                self.close(&socket, errno);
                self.lose(all.saturating_sub(sent.taken));
                all
            }
        }
    }

    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        self.output.takes(frame, offload)
    }

    fn readiness(&self) -> Readiness {
        let state = self.state.lock();
        match &*state {
            State::Up(socket) => Readiness {
                readable: Some(Arc::clone(socket)),
                writable: Some(Arc::clone(socket)),
                ..Readiness::default()
            },
            State::Down(..) => Readiness { wait: Some(LOOK), ..Readiness::default() },
            State::Gone => Readiness { wait: Some(self.reconnect.interval()), ..Readiness::default() },
        }
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.reconnect.connector().set_addresses(addresses)
    }

    fn inspect(&self) -> LinkInspect {
        let up = self.state.try_lock().map(|state| state.socket().is_some());
        LinkInspect { kind: "af_packet", name: self.interface.clone(), peers: Vec::new(), up: up.into() }
    }

    fn lost(&self) -> u64 {
        let dropped = self.socket().map_or(0, |socket| socket::drops(socket.as_fd()));
        let dropped = u64::from(dropped);
        self.lost.fetch_add(dropped, Ordering::Relaxed).saturating_add(dropped)
    }
}
